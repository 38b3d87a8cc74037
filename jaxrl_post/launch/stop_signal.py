"""SIGTERM and SIGINT end a run at a safe point, with an exit code that says: resume me.

After a signal the run goes on to its next publish, but for at most PATIENCE_S seconds of further dispatches. At a
publish with no rollout in the engine an extra checkpoint changes no bit, so one is saved there. Elsewhere the newest
checkpoint counts. A second signal ends the process at once.

Invariant: a signal decides where a run stops, never what it computes. The resumed run ends as an undisturbed one.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import jax

from jaxrl_post.parallel.processes import share_text

PATIENCE_S = 12.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(RuntimeError):
    """A signal ended the run at a safe point. --resume continues it."""


class StopSignal:
    """Notices signals from `__enter__` to `__exit__`, in the main thread only, and listens to the ring.

    Args:
      save: saves a checkpoint of a version, unless there is one.
      may_save: whether the run saves checkpoints, and no rollout is in the engine.
      last: the version that ends the run, at which a signal has nothing to stop.
    """

    def __init__(self, save: Callable[[int], None], may_save: Callable[[], bool], last: int):
        self._save, self._may_save, self._last = save, may_save, last
        self._name, self._since = "", 0.0
        self._before: dict = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._notice) for number in SIGNALS}
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _notice(self, number: int, frame) -> None:
        self._name, self._since = signal.Signals(number).name, time.monotonic()
        for one in SIGNALS:
            signal.signal(one, signal.SIG_DFL)

    def stepped(self, *_) -> None:
        """Listens to `stepped`. A job of several processes stops at publishes alone, where all of them agree.

        Raises:
          Stopped: a signal came more than PATIENCE_S seconds ago.
        """
        if self._name and jax.process_count() == 1 and time.monotonic() - self._since > PATIENCE_S:
            raise Stopped(f"{self._name}: stopped after a dispatch; --resume continues from the newest checkpoint")

    def published(self, version: int) -> None:
        """Listens to `published`, after everything else.

        Raises:
          Stopped: a signal came to process 0.
        """
        name = self._name if jax.process_count() == 1 else share_text(self._name)
        if not name or version >= self._last:
            return
        if self._may_save():
            self._save(version)
            raise Stopped(f"{name}: stopped after step {version}, which is saved; --resume continues from there")
        raise Stopped(f"{name}: stopped after step {version}; --resume continues from the newest checkpoint")
