"""Faults on purpose, to prove what a run survives: JAXRL_FAULT=POINT:COUNT[:KIND].

The COUNTth time that the run reaches POINT, it is killed (SIGKILL), raises, hangs or gets a SIGTERM. Without the
variable nothing happens. Points of a ring's call are reached before the call.
"""

from __future__ import annotations

import difflib
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping

CALLS = {  # (phase, function) of a ring's call -> point
    ("gen", "step"): "dispatch",
    ("reward", "start"): "reward_start",
    ("reward", "join"): "reward_join",
    ("update_actor", "accumulate"): "accumulate",
    ("update_actor", "commit"): "commit",
    ("update_weights", "swap"): "swap",
}
POINTS = (*CALLS.values(), "publish", "before_save", "mid_save", "after_save", "prune", "evaluation")
KINDS = ("kill", "raise", "hang", "term")


class Planted(RuntimeError):
    """The fault that JAXRL_FAULT asked for."""


class FaultPoints:
    """Counts how often each point is reached.

    Args:
      environment: may hold JAXRL_FAULT.

    Raises:
      ValueError: the variable is malformed, or names an unknown point or kind.
    """

    def __init__(self, environment: Mapping[str, str]):
        self._at, self._count, self._kind = _parsed(environment.get("JAXRL_FAULT", ""))
        self._reached: Counter[str] = Counter()

    def reach(self, point: str) -> None:
        """Does what the variable says, if this is the point and the count.

        Raises:
          Planted: the kind is "raise".
        """
        if point != self._at:
            return
        self._reached[point] += 1
        if self._reached[point] != self._count:
            return
        if self._kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._kind == "raise":
            raise Planted(f"JAXRL_FAULT: {point} is reached for the {self._count}. time")
        if self._kind == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        while self._kind == "hang":
            time.sleep(1.0)


def _parsed(text: str) -> tuple[str, int, str]:
    if not text:
        return "", 0, ""
    point, _, rest = text.partition(":")
    count, _, kind = rest.partition(":")
    for given, known in ((point, POINTS), (kind or "kill", KINDS)):
        if given not in known:
            near = difflib.get_close_matches(given, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"JAXRL_FAULT={text}: unknown {given!r}; nearest is {near!r}, all are {', '.join(known)}")
    if not count.isdecimal() or int(count) < 1:
        raise ValueError(f"JAXRL_FAULT={text}: the count {count!r} must be a number from 1 on, as in {point}:1")
    return point, int(count), kind or "kill"
