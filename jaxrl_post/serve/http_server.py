"""The HTTP server around an application: uvicorn, with the limits that all of this project's servers have.

It has uvloop's event loop where that is installed, and httptools' parser. They leave the engine more of the host's time.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

CLOSING_S = 5  # for open responses when the server is stopped
LAST_WORD_S = 3.5  # of these, before responses that go on are told of the end
ABORT = "jaxrl_post.abort"  # among the extensions of a scope: cuts the connection
_IDLE_S = 75  # of a connection without a request, as nginx has it
HEAD_S, BODY_S, UNREAD_S = 20.0, 120.0, 30.0  # for a head, for a whole request, and for a client that reads nothing
LONGEST_HEAD, LONGEST_REQUEST = 64 << 10, 128 << 20  # bytes, with what a refused request still sends
MOST_CONNECTIONS = 4096  # and half of the descriptors that the process may have


class Guarded(HttpToolsProtocol):
    """A connection with bounds of time and bytes. What is behind them is cut.

    A trailer behind a body is no header. Where there are too many connections, the oldest one without a request makes room.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._since, self._size = time.monotonic(), 0
        self._begun, self._headed = False, False  # a request, and the end of its head
        self._incoming = self._later(HEAD_S)
        self._outgoing: asyncio.TimerHandle | None = None
        if len(self.connections) > _most():
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._incoming, self._outgoing, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        idle, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        self._size += len(data)
        super().data_received(data)
        if idle is not None and not self._begun and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = idle  # empty lines are no request
        elif idle is not None:
            idle.cancel()
        if not self._headed and self._size > LONGEST_HEAD:
            self._refuse(431, f"the head of a request has more than {LONGEST_HEAD} bytes")
        elif self._size > LONGEST_REQUEST:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun, self._headed, self._size = True, False, 0
        self._until(HEAD_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headed:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._headed = True
        self.scope["extensions"] = {ABORT: self.transport.abort}
        self._until(BODY_S)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._begun, self._size = False, 0
        self._incoming.cancel()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() and self._outgoing is None:
            self._outgoing = self._later(UNREAD_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._outgoing is None:
            self._outgoing = self._later(UNREAD_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._outgoing is not None and not self.transport.is_closing():
            self._outgoing.cancel()
            self._outgoing = None

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()

    @property
    def _idle(self) -> bool:
        """Returns whether no request is answered here."""
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        """Cuts the oldest connection without a request, or refuses this one."""
        oldest = min((one for one in self.connections if one._idle), key=lambda one: one._since)
        if oldest is self:
            self._refuse(
                503, f"{len(self.connections) - 1} connections are open, the most that are served; ask again later"
            )
        else:
            oldest.transport.abort()
            self.connections.discard(oldest)

    def _refuse(self, status: int, sentence: str) -> None:
        """Sends a response before there is a request, and closes."""
        text = sentence.encode()
        head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(text)
        if not self.transport.is_closing():
            self.transport.write(STATUS_LINE[status] + head + text)
            self.transport.close()

    def _until(self, seconds: float) -> None:
        self._incoming.cancel()
        self._incoming = self._later(seconds)

    def _later(self, seconds: float) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, self._cut)

    def _cut(self) -> None:
        if self.pipeline:  # the request before is still answered, and reading has stopped meanwhile
            self._until(BODY_S)
        else:
            self.transport.abort()


def _most() -> int:
    return min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class _Ending(uvicorn.Server):
    """A server that tells before it ends."""

    ending: Callable[[], object]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.get_running_loop().call_later(LAST_WORD_S, self.ending)
        await super().shutdown(sockets)
        ending.cancel()


class HttpServer:
    """Serves an ASGI application.

    Args:
      ending: is called while the server is stopped, so that open responses end with a last word.
      how: further options of uvicorn.
    """

    def __init__(self, application: Any, ending: Callable[[], object] = bool, **how: Any):
        limits = {"timeout_graceful_shutdown": CLOSING_S, "timeout_keep_alive": _IDLE_S, "http": Guarded, "ws": "none"}
        self._http = _Ending(uvicorn.Config(application, log_level="warning", access_log=False, **limits, **how))
        self._http.ending = ending

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
