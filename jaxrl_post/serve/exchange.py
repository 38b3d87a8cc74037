"""What the HTTP interfaces share: the bearer token, JSON bodies, server-sent events, and responses to refused requests.

Every refusal is one sentence in OpenAI's error form.
"""

from __future__ import annotations

import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxrl_post import json_text
from jaxrl_post.serve.refusal import Refusal, error

LONGEST_BODY = 16 << 20  # bytes


class Door:
    """Lets requests in that carry the key.

    Args:
      key: without one, everybody is let in.
      header: that carries it, behind `prefix`.
      free: paths that need no key.
      refusal: the response to others.
    """

    def __init__(self, inner: Any, *, key: str, header: str, prefix: str, free: Sequence[str], refusal: Response):
        self._inner, self._header, self._free, self._refusal = inner, header.encode(), free, refusal
        self._wanted = f"{prefix}{key}".encode() if key else b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and self._wanted and scope["path"] not in self._free:
            given = dict(scope["headers"]).get(self._header, b"")
            if not hmac.compare_digest(given, self._wanted):
                return await self._refusal(scope, receive, send)
        await self._inner(scope, receive, send)


def door(token: str) -> Middleware:
    """Returns the door of OpenAI's interface: a bearer token, and /health for everybody."""
    sentence = "the token is missing or wrong: send the header Authorization: Bearer TOKEN, as the server printed it"
    refusal = JSONResponse(error(401, sentence), 401, headers={"WWW-Authenticate": "Bearer"})
    return Middleware(Door, key=token, header="authorization", prefix="Bearer ", free=("/health",), refusal=refusal)


class Serviced(Protocol):
    """What an application serves: it begins and ends with it, in the event loop."""

    def start(self) -> None: ...

    async def stop(self) -> None: ...


def lifespan(service: Serviced) -> Callable[[Any], contextlib.AbstractAsyncContextManager[None]]:
    """Returns what starts a service with its application, and stops it at the end."""

    @contextlib.asynccontextmanager
    async def alive(_: Any) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.stop()

    return alive


async def body(request: Request) -> dict[str, Any]:
    """Returns the JSON object of a body.

    Raises:
      Refusal: the body is too long, or no JSON object.
    """
    value = parsed(await read(request))
    if not isinstance(value, dict):
        raise Refusal(400, f"the body must be a JSON object, got a {type(value).__name__}")
    return value


async def read(request: Request, longest: int = LONGEST_BODY) -> bytes:
    """Returns a body of at most `longest` bytes.

    Raises:
      Refusal: it is too long.
    """
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > longest:
            raise Refusal(413, f"the body has more than {longest} bytes, the most that is read")
    return bytes(data)


def parsed(data: bytes) -> Any:
    """Returns the JSON value of a body.

    Raises:
      Refusal: it has none.
    """
    try:
        return json_text.parsed(data.decode("utf-8"), "the body")
    except UnicodeDecodeError as wrong:
        raise Refusal(400, f"the body is no UTF-8 text: {wrong.reason} at byte {wrong.start}") from wrong
    except ValueError as wrong:
        raise Refusal(400, str(wrong)) from wrong


def event(chunk: dict[str, Any]) -> bytes:
    """Returns a server-sent event."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def refused(request: Request, refusal: Refusal) -> Response:
    """Returns the response to a request that is refused."""
    return JSONResponse(refusal.body, refusal.status, headers=refusal.headers)


async def failed(request: Request, wrong: Exception) -> Response:
    """Returns the response to a request on which the server failed."""
    return JSONResponse(error(500, "the server failed on this request; its log says how"), 500)


def unrouted(paths: str) -> Callable[[Request, HTTPException], Awaitable[Response]]:
    """Returns what responds to a path or a method that is not served. `paths`: those that are."""

    async def respond(request: Request, wrong: HTTPException) -> Response:
        allowed, path = (wrong.headers or {}).get("Allow"), request.url.path[:80]
        what = f"{request.method} is not served at {path}; valid is {allowed}" if allowed else ""
        sentence = what or f"there is no path {path}; valid are {paths}"
        return JSONResponse(error(wrong.status_code, sentence), wrong.status_code, headers=wrong.headers)

    return respond
