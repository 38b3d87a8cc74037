"""The HTTP server around an application: uvicorn, with the limits that all of this project's servers have.

It has uvloop's event loop and httptools' parser where they are installed, as uvicorn does. They leave the engine more of the
host's time.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn

CLOSING_S = 5  # for open responses when the server is stopped
_IDLE_S = 75  # of a connection without a request, as nginx has it


class HttpServer:
    """Serves an ASGI application.

    Args:
      how: further options of uvicorn.
    """

    def __init__(self, application: Any, **how: Any):
        limits = {"timeout_graceful_shutdown": CLOSING_S, "timeout_keep_alive": _IDLE_S}
        self._http = uvicorn.Server(uvicorn.Config(application, log_level="warning", access_log=False, **limits, **how))

    def run(self, heard: socket.socket, failed: asyncio.Event | None = None) -> None:
        """Serves at a socket until a signal, `stop`, or `failed`, which tells that what is served has failed."""
        with asyncio.Runner(loop_factory=self._http.config.get_loop_factory()) as runner:
            runner.run(self._until_the_end(heard, failed or asyncio.Event()))

    def stop(self) -> None:
        """Ends the server. It may be called in any thread."""
        self._http.should_exit = True

    async def _until_the_end(self, heard: socket.socket, failed: asyncio.Event) -> None:
        async def watch() -> None:
            await failed.wait()
            self.stop()

        watcher = asyncio.create_task(watch())
        await self._http.serve(sockets=[heard])
        watcher.cancel()
