"""The weights of a run that goes on: its newest saved step, whenever there is a newer one.

Invariant: only whole steps are taken (checkpoint/store.py). A step that is deleted while it is read, or that is damaged, is
said in one line, and the weights before it stay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class FollowedRun:
    """Looks for newer steps until it is stopped.

    Args:
      newest: returns the newest saved step that is above a version, or None.
      load: returns the weights of a step.
      swap: takes weights and their version.
      every_s: between two looks.
    """

    def __init__(
        self,
        *,
        version: int,
        newest: Callable[[int], int | None],
        load: Callable[[int], Any],
        swap: Callable[[Any, int], object],
        say: Callable[[str], object],
        every_s: float,
    ):
        self._version, self._newest, self._load, self._swap = version, newest, load, swap
        self._say, self._every_s = say, every_s
        self._refused: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="followed run", daemon=True)

    def start(self) -> None:
        """Starts to look."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Ends it, behind the weights that it reads now."""
        self._over.set()
        self._thread.join(seconds)

    def look(self) -> None:
        """Takes the newest step, if it is newer. A step that cannot be read is tried again at the next look."""
        step = self._newest(self._version)
        if step is None:
            return
        try:
            params = self._load(step)
        except (OSError, ValueError) as error:
            if self._refused != step:
                self._say(f"step {step} of the run is not taken: {' '.join(str(error).split())}")
            self._refused = step
            return
        self._swap(params, step)
        self._version = step
        self._say(f"weights of step {step}")

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self.look()
