"""What all processes of a job do before their devices may be used, and how one sentence ends all of them.

Needs joined processes. Waits by the key-value store, because devices wait for each other for short times only.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import TypeVar

import jax

from jaxrl_post.buckets.store import Unreachable
from jaxrl_post.parallel.key_value import LIMIT_S, Board

_T = TypeVar("_T")
_ERRORS = {"refused": ValueError, "unreachable": Unreachable}
_ROUNDS = itertools.count()  # a board has a name that is used once, and all processes count alike


def board(name: str) -> Board:
    """Returns a board of this job for one use. All processes call it in the same order."""
    return Board(f"{name}/{next(_ROUNDS)}")


def everywhere(work: Callable[[], _T], limit_s: float = LIMIT_S) -> _T:
    """Returns what `work` returns in this process, once it has in all processes of the job.

    Raises:
      ValueError, Unreachable: a process raised one of them: the first that did, with the same sentence everywhere.
      TimeoutError: a process did not come within `limit_s` seconds.
    """
    if jax.process_count() == 1:
        return work()
    done, own = None, {"error": "", "why": ""}
    try:
        done = work()
    except (ValueError, OSError, Unreachable) as error:
        own = {"error": "unreachable" if isinstance(error, Unreachable) else "refused", "why": str(error)}
    met, me = board("everywhere"), jax.process_index()
    met.put(f"{me}", json.dumps(own))
    if me == 0:
        every = [json.loads(met.get(f"{index}", limit_s)) for index in range(jax.process_count())]
        failed = [index for index, one in enumerate(every) if one["error"]]
        verdict = every[failed[0]] if failed else own
        if failed and failed[0]:
            verdict["why"] = f"process {failed[0]}: {verdict['why']}"
        met.put("verdict", json.dumps(verdict))
    verdict = json.loads(met.get("verdict", limit_s))
    if verdict["error"]:
        raise _ERRORS[verdict["error"]](verdict["why"])
    return done


def told(text: str, limit_s: float = LIMIT_S) -> str:
    """Returns the text of process 0 in every process.

    Raises:
      TimeoutError: process 0 told nothing within `limit_s` seconds.
    """
    if jax.process_count() == 1:
        return text
    met = board("told")
    if jax.process_index() == 0:
        met.put("text", text)
    return met.get("text", limit_s)
