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
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from jaxrl_post.serve import exchange
from jaxrl_post.serve.schema import Refusal
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
        Route(f"{ROOT}/{name}", endpoints.called(name), methods=["POST"])
        for name in bodies.BODIES
        if name != "retrieve_future"
    ]
    routes += [
        Route(f"{ROOT}/retrieve_future", endpoints.retrieve_future, methods=["POST"]),
        Route(f"{ROOT}/client/config", endpoints.client_config, methods=["POST"]),
        Route(f"{ROOT}/telemetry", endpoints.telemetry, methods=["POST"]),
        Route(f"{ROOT}/healthz", endpoints.healthz),
        Route(f"{ROOT}/get_server_capabilities", endpoints.capabilities),
        Route(f"{ROOT}/samplers/{{name}}", endpoints.sampler),
    ]
    return exchange.application(_API, routes, keys, _unrouted, service=service)


class Endpoints:
    """What each path does."""

    def __init__(self, service: Service):
        self._service = service

    def called(self, name: str) -> Callable[[Request], Any]:
        """Returns an endpoint that gives owner and body to the method of the service that has its name."""
        call: Callable[..., Mapping[str, Any]] = getattr(self._service, name)

        async def endpoint(request: Request) -> Response:
            try:
                given = await self._body(request, name)
            except ClientDisconnect:
                return Response(status_code=400)
            return _json(call(request.scope[exchange.OWNER], *given))

        return endpoint

    async def _body(self, request: Request, name: str) -> tuple[Any, ...]:
        """Returns a body, and what is made of it; see bodies.read."""
        if "protobuf" in request.headers.get("content-type", ""):
            raise Refusal("protobuf is not served; use the version of the SDK that docs/tinker.md names", status=415)
        return await exchange.body(
            request, lambda value: bodies.read(name, value, self._service.limits), LONGEST_BODY, MOST_VALUES
        )

    async def retrieve_future(self, request: Request) -> Response:
        """POST retrieve_future: the result, or 408 where it is not there yet, upon which clients ask again."""
        (given,) = await self._body(request, "retrieve_future")
        result = await self._service.retrieve_future(request.scope[exchange.OWNER], given, WAIT_S)
        if result is None:
            return _json({"detail": "the result is not there yet", "queue_state": "active"}, 408)
        text = await anyio.to_thread.run_sync(json.dumps, result)  # a result may have a million numbers
        return Response(text, media_type="application/json")

    async def client_config(self, request: Request) -> Response:
        """POST client/config: JSON bodies, one after another, so that gradients are added in the client's order."""
        return _json(dict.fromkeys(_OFF, False))

    async def telemetry(self, request: Request) -> Response:
        """POST telemetry: read by nobody, and kept nowhere."""
        return _json({"status": "accepted"})

    async def healthz(self, request: Request) -> Response:
        """GET healthz: 200 while the devices' thread runs, else 503."""
        alive = not self._service.failed.is_set()
        return _json({"status": "ok" if alive else "the devices' thread has stopped"}, 200 if alive else 503)

    async def capabilities(self, request: Request) -> Response:
        """GET get_server_capabilities."""
        about = {"model_name": self._service.name, "max_context_length": self._service.limits.positions}
        return _json({"supported_models": [about]})

    async def sampler(self, request: Request) -> Response:
        """GET samplers/NAME."""
        return _json(self._service.sampler(request.scope[exchange.OWNER], request.path_params["name"]))


def _json(value: Mapping[str, Any], status: int = 200) -> Response:
    """Returns a response. A loss may be infinite, which the client's JSON reader takes."""
    return Response(json.dumps(value), status, media_type="application/json")


def _unrouted(method: str, path: str, allowed: str) -> str:
    return f"{method} is not served at {path}; valid are the paths below {ROOT} of the SDK that docs/tinker.md names"


_API = exchange.Api(
    respond=lambda refusal: _json({"detail": refusal.sentence}, refusal.status),
    header="x-api-key",
    free=f"{ROOT}/healthz",
    closed=Refusal("the key is missing or wrong: set TINKER_API_KEY to the key that the server printed", status=401),
)
