"""All processes of a job start alike: with the same code, config, data and versions, before anything is compiled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

import jaxrl_post
from jaxrl_post import kernels
from jaxrl_post.parallel.exchange import Board
from jaxrl_post.ring.json_text import shown
from jaxrl_post.runs import agreement
from jaxrl_post.runs.checkpoint import identity

START_S = 300.0  # for the slowest process to read its data


def code() -> dict[str, str]:
    """Returns the hash of every source file of the package, by its path."""
    found = {}
    for name, folder in (("jaxrl_post", jaxrl_post.__path__[0]), ("kernels", kernels.__path__[-1])):
        for file in sorted(Path(folder).rglob("*.py")):
            found[f"{name}/{file.relative_to(folder)}"] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return found


def check(start: Callable[[], Mapping], limit_s: float = START_S) -> None:
    """Refuses a job whose processes do not start alike. Process 0 compares. A process by itself always does.

    Args:
      start: returns what this process starts with beside its code, as JSON. Called only where there are others.

    Raises:
      ValueError: a process differs from process 0, or one did not come within `limit_s` seconds.
    """
    if jax.process_count() == 1:
        return
    met, me = agreement.board("agreement"), jax.process_index()
    own = {**start(), "code": code()}
    text = json.dumps(own, sort_keys=True)
    met.put(f"{me}/whole", text)
    met.put(f"{me}/digest", hashlib.sha256(text.encode()).hexdigest())
    if me == 0:
        met.put("verdict", json.dumps(_verdict(met, own, limit_s)))
    try:
        verdict = json.loads(met.get("verdict", 2 * limit_s))
    except TimeoutError:
        verdict = f"process 0 compared nothing within {2 * limit_s:g} s"
    if verdict:
        raise ValueError(verdict)


def _verdict(met: Board, own: Mapping, limit_s: float) -> str:
    """Returns why the processes do not start alike, or an empty text."""
    wanted = met.get("0/digest", limit_s)
    for index in range(1, jax.process_count()):
        try:
            if met.get(f"{index}/digest", limit_s) == wanted:
                continue
            theirs = json.loads(met.get(f"{index}/whole", limit_s))
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
