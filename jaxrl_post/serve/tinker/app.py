"""The ASGI application: the paths of the Tinker API over a Service, behind a key.

Invariant: what needs a device becomes a promise at once, so that no request holds the event loop. Every refusal is one
sentence with a status of HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from jaxrl_post.serve import exchange
from jaxrl_post.serve.refusal import Refusal
from jaxrl_post.serve.schema import Body
from jaxrl_post.serve.tinker import bodies
from jaxrl_post.serve.tinker.service import Service

ROOT = "/api/v1"
LONGEST_BODY, MOST_VALUES = 64 << 20, 1 << 20  # bytes, and numbers; a client sends at most 500,000 at a time
WAIT_S = 30.0  # of a request for a result; the client's own limit is 45 s
_OFF = (
    "parallel_fwdbwd_chunks",
    "proto_write_fwdbwd",
    "proto_compress_fwdbwd",
    "pjwt_auth_enabled",
    "use_pyqwest_transport",
)


def app(service: Service, keys: Mapping[str, str]) -> Starlette:
    """Returns the application. `keys`: key -> owner. Without a key everybody is let in."""
    endpoints = Endpoints(service)

    routes = [
        Route(f"{ROOT}/{name}", endpoints.called(form, getattr(service, name)), methods=["POST"])
        for name, form in bodies.POSTS.items()
    ]
    routes += [
        Route(f"{ROOT}/retrieve_future", endpoints.retrieve_future, methods=["POST"]),
        Route(f"{ROOT}/client/config", endpoints.client_config, methods=["POST"]),
        Route(f"{ROOT}/telemetry", endpoints.telemetry, methods=["POST"]),
        Route(f"{ROOT}/healthz", endpoints.healthz),
        Route(f"{ROOT}/get_server_capabilities", endpoints.capabilities),
        Route(f"{ROOT}/samplers/{{name}}", endpoints.sampler),
    ]
    return Starlette(
        routes=routes,
        lifespan=exchange.lifespan(service),
        middleware=[_door(keys)],
        exception_handlers={Refusal: _refused, HTTPException: _unrouted, 500: _failed},
    )


def _door(keys: Mapping[str, str]) -> Middleware:
    """Returns the door of the API: a key, and /healthz for everybody."""
    sentence = "the key is missing or wrong: set TINKER_API_KEY to the key that the server printed"
    refusal = _told({"detail": sentence}, 401)
    return Middleware(
        exchange.Door, keys=keys, header="x-api-key", prefix="", free=(f"{ROOT}/healthz",), refusal=refusal
    )


class Endpoints:
    """What each path does."""

    def __init__(self, service: Service):
        self._service = service

    def called(self, form: type[Body], call: Callable[..., Mapping[str, Any]]) -> Callable[[Request], Any]:
        """Returns an endpoint that gives owner and body to a method of the service."""

        async def endpoint(request: Request) -> Response:
            try:
                given = await self._body(request, form)
            except ClientDisconnect:
                return Response(status_code=400)
            return _told(call(request.scope[exchange.OWNER], *given))

        return endpoint

    async def _body(self, request: Request, form: type[Body]) -> tuple[Any, ...]:
        """Returns a body, and what is made of it; see bodies.read."""
        if "protobuf" in request.headers.get("content-type", ""):
            raise Refusal(415, "protobuf is not served; use the version of the SDK that docs/tinker.md names")
        return await exchange.body(
            request, lambda value: bodies.read(form, value, self._service.limits), LONGEST_BODY, MOST_VALUES
        )

    async def retrieve_future(self, request: Request) -> Response:
        """POST retrieve_future: the result, or 408 where it is not there yet, upon which clients ask again."""
        (given,) = await self._body(request, bodies.Fetched)
        result = await self._service.retrieve_future(request.scope[exchange.OWNER], given, WAIT_S)
        if result is None:
            return _told({"detail": "the result is not there yet", "queue_state": "active"}, 408)
        text = await anyio.to_thread.run_sync(json.dumps, result)  # a result may have a million numbers
        return Response(text, media_type="application/json")

    async def client_config(self, request: Request) -> Response:
        """POST client/config: JSON bodies, one after another, so that gradients are added in the client's order."""
        return _told(dict.fromkeys(_OFF, False))

    async def telemetry(self, request: Request) -> Response:
        """POST telemetry: read by nobody, and kept nowhere."""
        return _told({"status": "accepted"})

    async def healthz(self, request: Request) -> Response:
        """GET healthz: 200 while the devices' thread runs, else 503."""
        alive = not self._service.failed.is_set()
        return _told({"status": "ok" if alive else "the devices' thread has stopped"}, 200 if alive else 503)

    async def capabilities(self, request: Request) -> Response:
        """GET get_server_capabilities."""
        about = {"model_name": self._service.name, "max_context_length": self._service.limits.positions}
        return _told({"supported_models": [about]})

    async def sampler(self, request: Request) -> Response:
        """GET samplers/NAME."""
        return _told(self._service.sampler(request.scope[exchange.OWNER], request.path_params["name"]))


def _told(value: Mapping[str, Any], status: int = 200) -> Response:
    """Returns a response. A loss may be infinite, which the client's JSON reader takes."""
    return Response(json.dumps(value), status, media_type="application/json")


async def _refused(request: Request, refusal: Refusal) -> Response:
    return _told({"detail": refusal.sentence}, refusal.status)


async def _unrouted(request: Request, wrong: HTTPException) -> Response:
    valid = f"the paths below {ROOT} of the SDK that docs/tinker.md names"
    sentence = f"{request.method} is not served at {request.scope['path'][:80]}; valid are {valid}"
    return _told({"detail": sentence}, wrong.status_code)


async def _failed(request: Request, wrong: Exception) -> Response:
    return _told({"detail": "the server failed on this request; its log says how"}, 500)
