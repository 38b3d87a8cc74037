"""Host work that nobody waits for yet, put off until a dispatch is on its way: starting graders, packing what the learner
gets, logs.

Invariant: chores are done in the order in which they were put off, and before anything that needs one of them; when they are
done follows from dispatches and calls alone. So what comes out is what would without them: only where the host's seconds lie
is another matter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any


class Chores:
    """Calls, in order. `run` is to be called where a device is at work, and before whatever needs one of them."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable, tuple]] = deque()

    def later(self, call: Callable, *arguments: Any) -> None:
        self._waiting.append((call, arguments))

    def run(self) -> None:
        """All of them, those that come meanwhile too. One that fails is not tried again."""
        while self._waiting:
            call, arguments = self._waiting.popleft()
            call(*arguments)


class PutOff:
    """Any part of the ring, some of whose methods, which give nothing back, become chores: `later`. All chores are done before
    one of `after` is called."""

    def __init__(self, part: Any, chores: Chores, *, later: Collection[str], after: Collection[str]):
        self._part, self._chores, self._later, self._after = part, chores, later, after

    def __getattr__(self, name: str) -> Any:
        value, chores = getattr(self._part, name), self._chores
        if name in self._later:
            return lambda *arguments: chores.later(value, *arguments)
        if name not in self._after:
            return value

        def called(*arguments: Any) -> Any:
            chores.run()
            return value(*arguments)

        return called
