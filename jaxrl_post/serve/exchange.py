"""The HTTP layer of every API here: its application, the door, JSON bodies, server-sent events, and refused requests.

Invariant: bodies are read, parsed and checked beside the event loop, and their bytes and values have bounds. So no body
holds up other requests. Every refusal is one sentence.
"""

from __future__ import annotations

import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxrl_post.ring import json_text
from jaxrl_post.serve.device_service import DeviceService
from jaxrl_post.serve.schema import Refusal

LONGEST_BODY = 16 << 20  # bytes
MOST_VALUES = 1 << 18  # of a body: members of its lists and objects; a named one costs as much as three
MOST_DIGITS = 640  # of a whole number in a body
OWNER = "owner"  # of a scope: the name of the key that let a request in
Read = TypeVar("Read")


@dataclass(frozen=True, kw_only=True)
class Api:
    """What the applications of an API share.

    `respond`: makes the response to a request that is refused. `header`: carries the key, behind `prefix`. `free`: a path
    that needs no key. `closed`: the refusal of requests without one.
    """

    respond: Callable[[Refusal], Response]
    header: str
    prefix: str = ""
    free: str
    closed: Refusal


OPENAI = Api(
    respond=lambda refusal: JSONResponse(refusal.body, refusal.status, headers=refusal.headers),
    header="authorization",
    prefix="Bearer ",
    free="/health",
    closed=Refusal(
        "the token is missing or wrong: send the header Authorization: Bearer TOKEN, as the server printed it",
        headers={"WWW-Authenticate": "Bearer"},
        status=401,
    ),
)


class Door:
    """Lets requests in that carry a key, and says whose it is. `keys`: key -> owner; without one, everybody is let in."""

    def __init__(self, inner: Any, *, api: Api, keys: Mapping[str, str]):
        self._inner, self._api, self._header = inner, api, api.header.encode()
        self._owners = {f"{api.prefix}{key}".encode(): owner for key, owner in keys.items()}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given = [value for name, value in scope["headers"] if name == self._header]
            owners = [
                owner for key, owner in self._owners.items() if len(given) == 1 and hmac.compare_digest(given[0], key)
            ]
            if self._owners and not owners and scope["path"] != self._api.free:
                return await self._api.respond(self._api.closed)(scope, receive, send)
            scope[OWNER] = owners[0] if owners else ""
        await self._inner(scope, receive, send)


def application(
    api: Api,
    routes: Sequence[Route],
    keys: Mapping[str, str],
    unrouted: Callable[[str, str, str], str],
    *,
    service: DeviceService | None = None,
    refusals: Mapping[type[Exception], Callable[[Any], Refusal]] = MappingProxyType({}),
) -> Starlette:
    """Returns an application. A service starts and stops with it, in the event loop.

    `unrouted`: the sentence for a method at a path that is not served, of both and of the methods that are served there.
    `refusals`: what becomes of other errors.
    """

    @contextlib.asynccontextmanager
    async def alive(_: Any) -> AsyncIterator[None]:
        if service is not None:
            service.start()
        try:
            yield
        finally:
            if service is not None:
                await service.stop()

    async def refused(request: Request, wrong: Exception) -> Response:
        return api.respond(wrong if isinstance(wrong, Refusal) else refusals[type(wrong)](wrong))

    async def failed(request: Request, wrong: Exception) -> Response:
        return api.respond(Refusal("the server failed on this request; its log says how", status=500))

    async def nowhere(request: Request, wrong: HTTPException) -> Response:
        headers = wrong.headers or {}
        sentence = unrouted(request.method, request.scope["path"][:80], headers.get("Allow", ""))
        return api.respond(Refusal(sentence, headers=headers, status=wrong.status_code))

    return Starlette(
        routes=routes,
        lifespan=alive,
        middleware=[Middleware(Door, api=api, keys=keys)],
        exception_handlers={**dict.fromkeys((Refusal, *refusals), refused), HTTPException: nowhere, 500: failed},
    )


def openai(routes: Sequence[Route], token: str, paths: str, **more: Any) -> Starlette:
    """Returns an application of OpenAI's API. `token`: an empty one lets everybody in. `paths`: those that are served."""

    def unrouted(method: str, path: str, allowed: str) -> str:
        if allowed:
            return f"{method} is not served at {path}; valid is {allowed}"
        return f"there is no path {path}; valid are {paths}"

    return application(OPENAI, routes, {token: ""} if token else {}, unrouted, **more)


async def body(
    request: Request, read: Callable[[Any], Read], longest: int = LONGEST_BODY, most: int = MOST_VALUES
) -> Read:
    """Returns what `read` makes of the JSON value of a body, in a thread: one body at a time, as Python runs one thread.

    Refused: a body that is too long, is no JSON, or that `read` refuses."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > longest:
            raise Refusal(f"the body has more than {longest} bytes, the most that is read", status=413)
    state = request.app.state
    if not hasattr(state, "reading"):
        state.reading = anyio.CapacityLimiter(1)
    return await anyio.to_thread.run_sync(lambda: read(parsed(bytes(data), most)), limiter=state.reading)


def parsed(data: bytes, most: int = MOST_VALUES) -> Any:
    """Returns the JSON value of a body. Refused: too many values; they are counted before it is made."""
    values = sum(map(data.count, (b",", b"[", b"{"))) + 2 * data.count(b":")
    if values > most:
        raise Refusal(
            f"the body has {values} values, by its commas, brackets and colons; at most {most} are read", status=413
        )
    try:
        return json_text.parsed(data.decode("utf-8"), "the body", MOST_DIGITS)
    except UnicodeDecodeError as wrong:
        raise Refusal(f"the body is no UTF-8 text: {wrong.reason} at byte {wrong.start}") from wrong
    except ValueError as wrong:
        raise Refusal(str(wrong)) from wrong


def event(chunk: dict[str, Any]) -> bytes:
    """Returns a server-sent event."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
