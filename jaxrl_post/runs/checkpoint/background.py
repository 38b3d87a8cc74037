"""Saves on a thread of its own, while the run goes on.

The caller waits only until weights, optimizer and the host's state are copied to host memory. So a save takes as much
host memory as the arrays have bytes, until it is written. What is written is of one moment: the caller hands over the
lengths of the logs with the rest. A save is joined before the next one begins, and at the end of the run.

Several processes save together, with programs on their devices. There the caller waits for the whole save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jaxrl_post.runs.checkpoint import host_state
from jaxrl_post.runs.checkpoint.arrays import on_host
from jaxrl_post.runs.checkpoint.store import Checkpoints


class Background:
    """Saves steps with `saves`, one at a time. As a context manager it waits at its end for the save under way.

    Args:
      after: called when a save has ended, on the thread that saved.
    """

    def __init__(self, saves: Checkpoints, after: Callable[[], object] = lambda: None):
        self._saves, self._after = saves, after
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future | None = None

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()

    def steps(self) -> list[int]:
        """Returns the numbers of all steps on disk. One that is being saved is none yet."""
        return self._saves.steps()

    @property
    def lost(self) -> str:
        """Why the last save of the run failed; empty where it did not."""
        return self._saves.lost

    def save(self, step: int, arrays: Any, host: Mapping, about: Mapping, last: bool = False) -> None:
        """Begins to save a step, after the save before has ended. See Checkpoints.save.

        Raises:
          SaveFailed: saves before this one have failed too often.
        """
        self.join()
        if jax.process_count() > 1:
            self._write(step, arrays, host, about, last)
        else:
            copied = on_host(arrays), host_state.copied(host)
            self._running = self._thread.submit(self._write, step, *copied, about, last)

    def join(self) -> None:
        """Waits for the save under way, if any.

        Raises:
          SaveFailed: it was the last of too many failed ones.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _write(self, step: int, arrays: Any, host: Mapping, about: Mapping, last: bool) -> None:
        self._saves.save(step, arrays, host, about, last)
        self._after()
