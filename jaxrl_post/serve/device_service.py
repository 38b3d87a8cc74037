"""A thread of devices between an event loop and HTTP endpoints: it begins and ends with the loop, and reports there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import anyio

from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.serve.device_thread import DeviceThread, Updates

_STOP_S = 30.0  # for the last dispatch or call


class DeviceService:
    """What every service here is.

    Args:
      say: gets lines for the operator.
      counted: gets the counters of each dispatch.

    Attributes:
      failed: set where the thread has ended for good. broken: whether it was not told to.
    """

    def __init__(
        self,
        engine: RowEngine,
        *,
        say: Callable[[str], object],
        counted: Callable[[Mapping[str, float]], object] = lambda _: None,
    ):
        self.thread = DeviceThread(
            engine,
            post=lambda updates: self._later(_deliver, updates),
            counted=counted,
            say=say,
            ended=lambda: self._later(self._end),
        )
        self.failed, self.broken, self._stopping = asyncio.Event(), False, False
        self._say = say
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Starts the thread. It is called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self.thread.start()

    async def stop(self) -> None:
        """Ends the thread, and open requests with it."""
        self._stopping = True
        await anyio.to_thread.run_sync(self.thread.stop, _STOP_S)

    def last_word(self) -> None:
        """Ends open requests, as the server is stopping."""
        raise NotImplementedError

    def _begin_anew(self) -> None:
        """Ends open requests, as the thread has failed, and restarts it."""
        raise NotImplementedError

    def _give_up(self) -> None:
        """Ends open requests, as the thread cannot begin anew."""
        self.last_word()

    def _end(self) -> None:
        """Follows the end of the thread. One that was not told to end begins anew."""
        if self.thread.sound and not self._stopping:
            self._begin_anew()
            return
        self.last_word() if self._stopping else self._give_up()
        self.broken = not self._stopping
        self.failed.set()

    def _later(self, call: Callable[..., object], *arguments: Any) -> None:
        """Calls something in the event loop, where there still is one."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)


def _deliver(updates: Updates) -> None:
    for request, update in updates:
        request.receive(update)
