"""What the HTTP interfaces share: the door, JSON bodies, server-sent events, and responses to refused requests.

Invariant: bodies are read, parsed and checked beside the event loop, and their bytes and values have bounds. So no body
holds up other requests. Every refusal is one sentence in OpenAI's error form.
"""

from __future__ import annotations

import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import anyio
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxrl_post import json_text
from jaxrl_post.serve.refusal import Refusal, error

LONGEST_BODY = 16 << 20  # bytes
MOST_VALUES = 1 << 18  # of a body: members of its lists and objects; a named one costs as much as three
MOST_DIGITS = 640  # of a whole number in a body
OWNER = "owner"  # of a scope: the name of the key that let a request in
Read = TypeVar("Read")


class Door:
    """Lets requests in that carry a key, and says whose it is.

    Args:
      keys: key -> owner; without one, everybody is let in.
      header: that carries it, behind `prefix`.
      free: paths that need no key.
      refusal: the response to others.
    """

    def __init__(
        self, inner: Any, *, keys: Mapping[str, str], header: str, prefix: str, free: Sequence[str], refusal: Response
    ):
        self._inner, self._header, self._free, self._refusal = inner, header.encode(), free, refusal
        self._owners = {f"{prefix}{key}".encode(): owner for key, owner in keys.items()}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given = [value for name, value in scope["headers"] if name == self._header]
            owners = [
                owner for key, owner in self._owners.items() if len(given) == 1 and hmac.compare_digest(given[0], key)
            ]
            if self._owners and not owners and scope["path"] not in self._free:
                return await self._refusal(scope, receive, send)
            scope[OWNER] = owners[0] if owners else ""
        await self._inner(scope, receive, send)


def door(token: str) -> Middleware:
    """Returns the door of OpenAI's interface: a bearer token, and /health for everybody."""
    sentence = "the token is missing or wrong: send the header Authorization: Bearer TOKEN, as the server printed it"
    refusal = JSONResponse(error(401, sentence), 401, headers={"WWW-Authenticate": "Bearer"})
    keys = {token: ""} if token else {}
    return Middleware(Door, keys=keys, header="authorization", prefix="Bearer ", free=("/health",), refusal=refusal)


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


async def body(
    request: Request, read: Callable[[Any], Read], longest: int = LONGEST_BODY, most: int = MOST_VALUES
) -> Read:
    """Returns what `read` makes of the JSON value of a body, in a thread: one body at a time, as Python runs one thread.

    Raises:
      Refusal: the body is too long, is no JSON, or `read` refuses it.
    """
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > longest:
            raise Refusal(413, f"the body has more than {longest} bytes, the most that is read")
    state = request.app.state
    if not hasattr(state, "reading"):
        state.reading = anyio.CapacityLimiter(1)
    return await anyio.to_thread.run_sync(lambda: read(parsed(bytes(data), most)), limiter=state.reading)


def parsed(data: bytes, most: int = MOST_VALUES) -> Any:
    """Returns the JSON value of a body.

    Raises:
      Refusal: it has none, or too many values. They are counted before anything is made of them.
    """
    values = sum(map(data.count, (b",", b"[", b"{"))) + 2 * data.count(b":")
    if values > most:
        raise Refusal(413, f"the body has {values} values, by its commas, brackets and colons; at most {most} are read")
    try:
        return json_text.parsed(data.decode("utf-8"), "the body", MOST_DIGITS)
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
        allowed, path = (wrong.headers or {}).get("Allow"), request.scope["path"][:80]
        what = f"{request.method} is not served at {path}; valid is {allowed}" if allowed else ""
        sentence = what or f"there is no path {path}; valid are {paths}"
        return JSONResponse(error(wrong.status_code, sentence), wrong.status_code, headers=wrong.headers)

    return respond
