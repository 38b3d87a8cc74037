"""All processes of a job agree on code, config, data and versions before anything is compiled.

Process 0 compares. Every process gets its verdict, so all go on or all end with the same sentence.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

import jaxrl_post
from jaxrl_post import kernels
from jaxrl_post.checkpoint import identity
from jaxrl_post.json_text import shown
from jaxrl_post.parallel import key_value

LIMIT_S = 300.0  # for the slowest process to read its data
_ROUNDS = itertools.count()  # a key is used once, and all processes count alike


def code() -> dict[str, str]:
    """Returns the hash of every source file of the package, by its path."""
    found = {}
    for name, folder in (("jaxrl_post", jaxrl_post.__path__[0]), ("kernels", kernels.__path__[-1])):
        for file in sorted(Path(folder).rglob("*.py")):
            found[f"{name}/{file.relative_to(folder)}"] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return found


def check(told: Callable[[], Mapping], limit_s: float = LIMIT_S) -> None:
    """Refuses a job whose processes do not start alike. A process by itself always does.

    Args:
      told: returns what this process starts with beside its code, as JSON. Called only where there are others.

    Raises:
      ValueError: a process differs from process 0, or one did not come within `limit_s` seconds.
    """
    if jax.process_count() == 1:
        return
    key, me = f"agreement/{next(_ROUNDS)}", jax.process_index()
    own = {**told(), "code": code()}
    text = json.dumps(own, sort_keys=True)
    key_value.put(f"{key}/{me}/whole", text)
    key_value.put(f"{key}/{me}/digest", hashlib.sha256(text.encode()).hexdigest())
    if me == 0:
        key_value.put(f"{key}/verdict", json.dumps(_verdict(key, own, limit_s)))
    try:
        verdict = json.loads(key_value.get(f"{key}/verdict", 2 * limit_s))
    except TimeoutError:
        verdict = f"process 0 compared nothing within {2 * limit_s:g} s"
    if verdict:
        raise ValueError(verdict)


def _verdict(key: str, own: Mapping, limit_s: float) -> str:
    """Returns why the processes do not start alike, or an empty text."""
    wanted = key_value.get(f"{key}/0/digest", limit_s)
    for index in range(1, jax.process_count()):
        try:
            if key_value.get(f"{key}/{index}/digest", limit_s) == wanted:
                continue
            theirs = json.loads(key_value.get(f"{key}/{index}/whole", limit_s))
        except TimeoutError:
            return f"process {index} has not read its config and data within {limit_s:g} s, and process 0 has"
        field, here, there = next(found := identity.differences(own, theirs, "start"))
        more = sum(1 for _ in found)
        return (
            f"process {index} does not start as process 0: {field.removeprefix('start.')} is {shown(there, 60)} there and "
            f"{shown(here, 60)} on process 0{f', and {more} more differ' if more else ''}; start all processes with the "
            "same code, config, data and versions"
        )
    return ""
