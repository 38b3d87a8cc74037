"""What all processes of a job do together before their devices may be used, and how one sentence ends all of them.

Needs joined processes. Waits by the key-value store, because devices wait for each other for short times only.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxrl_post.parallel import exchange
from jaxrl_post.parallel.exchange import Board
from jaxrl_post.runs.buckets.store import Unreachable

_T = TypeVar("_T")
_ERRORS = {"refused": ValueError, "unreachable": Unreachable}
_USES = itertools.count()  # a board has a name that is used once, and all processes count alike


def board(name: str) -> Board:
    """Returns a board of this job for one use. All processes call it in the same order."""
    return Board(f"{name}/{next(_USES)}")


def everywhere(work: Callable[[], _T]) -> _T:
    """Returns what `work` returns in this process, once it has in all processes of the job.

    Raises:
      ValueError, Unreachable: a process raised one of them: the first that did, with the same sentence everywhere.
      TimeoutError: a process did not come within a day.
    """
    if jax.process_count() == 1:
        return work()
    done, own = None, {"error": "", "why": ""}
    try:
        done = work()
    except (ValueError, OSError, Unreachable) as error:
        own = {"error": "unreachable" if isinstance(error, Unreachable) else "refused", "why": str(error)}
    every = [json.loads(one) for one in exchange.gather(json.dumps(own).encode())]  # on process 0, which judges
    verdict = own
    for index, one in reversed([*enumerate(every)]):
        if one["error"]:
            verdict = one | {"why": f"process {index}: {one['why']}" if index else one["why"]}
    verdict = json.loads(exchange.broadcast_text(json.dumps(verdict)))
    if verdict["error"]:
        raise _ERRORS[verdict["error"]](verdict["why"])
    return done


def of_first(look: Callable[[], Any]) -> Any:
    """Returns on every process what `look` returns in process 0, as JSON has it. Only there is it called.

    Raises:
      ValueError: process 0 could not look. The sentence is the same everywhere.
    """
    answer = {}
    if jax.process_index() == 0:
        try:
            answer = {"found": look()}
        except (ValueError, OSError) as error:
            answer = {"refusal": str(error)}
    answer = json.loads(exchange.broadcast_text(json.dumps(answer)))
    if "refusal" in answer:
        raise ValueError(answer["refusal"])
    return answer["found"]
