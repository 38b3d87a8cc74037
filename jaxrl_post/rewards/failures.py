"""Failures of reward functions and environments, as a user sees them: each distinct one once, with its place and its traceback."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


class Failures:
    """Shows the first failure of each kind: of a function, with one type of exception, at one line.

    Later ones are counted by the pool (`reward/exceptions`, `reward/retries`, `reward/unscored`). A trace is shown without its
    last line, which the sentence has.

    Args:
      what: whose failures they are.
      log: whether they go to the log. Without it they are in `told` alone, for a caller who says them.
    """

    def __init__(self, what: str = "reward function", *, log: bool = True):
        self._what, self._log = what, log
        self._seen: set[tuple[str, str, str]] = set()
        self.told: list[str] = []  # a sentence for each kind

    def tell(self, function: str, rollout: object, reason: str, place: str, trace: str) -> None:
        """Takes a failure. `place` and `trace` are empty where no exception tells them."""
        kind = reason.partition(":")[0] if place else reason
        where = f" at {place}" if place else ""
        if (function, kind, place) in self._seen:
            _log.info("%s %s failed%s on %s: %s", self._what, function, where, rollout, reason)
            return
        self._seen.add((function, kind, place))
        self.told.append(f"{self._what} {function!r} fails{where}: {reason}")
        if not self._log:
            return
        _log.warning(
            "%s %s failed%s on %s: %s; further failures like this one are counted, not shown%s",
            self._what,
            function,
            where,
            rollout,
            reason,
            f"\n{frames}" if (frames := trace.rstrip().removesuffix(reason).rstrip()) else "",
        )
