"""The weights of a run that goes on: its newest saved step, whenever there is a newer one.

Invariant: only whole steps are taken (runs/checkpoint/store.py). Where the run's folder cannot be read, or a step is deleted
while it is read or is damaged, that is said in one line and counted. The weights before it stay, and it looks again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from jaxrl_post.ring.json_text import said

# Orbax and its storage report missing and cut files as any of these, and JAX a device without room as RuntimeError.
UNREADABLE = (OSError, ValueError, KeyError, RuntimeError)


class FollowedRun:
    """Looks for newer steps until it is stopped.

    Args:
      newest: returns the newest saved step that is above a version, or None.
      load: returns the weights of a step.
      swap: takes weights and their version.
      say: gets one line for each step, and for what cannot be read.
      failed: is called at each look at which something cannot be read.
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
        failed: Callable[[], object],
        every_s: float,
    ):
        self._version, self._newest, self._load, self._swap = version, newest, load, swap
        self._say, self._failed, self._every_s = say, failed, every_s
        self._refused = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="followed run", daemon=True)

    def start(self) -> None:
        """Starts to look."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Ends it, behind the weights that it reads now."""
        self._over.set()
        self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        """Returns whether it looks."""
        return self._thread.is_alive()

    def look(self) -> None:
        """Takes the newest step, if it is newer. What cannot be read is said once, and tried again at the next look."""
        what = "the run cannot be looked at"
        try:
            step = self._newest(self._version)
            if step is None:
                self._refused = ""
                return
            what = f"step {step} of the run is not taken"
            params = self._load(step)
        except UNREADABLE as error:
            self._failed()
            if self._refused != what:
                self._say(f"{what}: {said(error) or type(error).__name__}")
            self._refused = what
            return
        self._swap(params, step)
        self._version, self._refused = step, ""
        self._say(f"weights of step {step}")

    def _run(self) -> None:
        """Looks until it is stopped. An error that is no fault of files ends it, with one line beside its traceback."""
        try:
            while not self._over.wait(self._every_s):
                self.look()
        finally:
            if not self._over.is_set():
                self._say(f"the run is followed no more: version {self._version} stays; start the server again")
