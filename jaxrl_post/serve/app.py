"""The ASGI application: OpenAI's endpoints over a Service, behind a bearer token.

Invariant: a request whose client goes away is closed at once, whether it is streamed or not. Every refusal is one sentence
in OpenAI's error form.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxrl_post.serve import asked as bodies
from jaxrl_post.serve.asked import Asked
from jaxrl_post.serve.choices import Choice
from jaxrl_post.serve.exchange import body, door, event, failed, lifespan, refused, unrouted
from jaxrl_post.serve.forms import Chat, Completion
from jaxrl_post.serve.http_server import ABORT
from jaxrl_post.serve.refusal import Refusal
from jaxrl_post.serve.service import GONE, Service, Ticket
from jaxrl_post.serve.words import Words

_PATHS = "/v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize, /version, /health and /metrics"
GRACE_S = 5.0  # behind the deadline of a request, for what its client has not read yet
_EVENTS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def app(service: Service, token: str) -> Starlette:
    """Returns the application. An empty token lets everybody in."""
    endpoints, words = Endpoints(service), Words(service)
    routes = [
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/tokenize", words.tokenize, methods=["POST"]),
        Route("/detokenize", words.detokenize, methods=["POST"]),
        Route("/version", words.version),
        Route("/health", endpoints.health),
        Route("/metrics", endpoints.metrics),
    ]
    return Starlette(
        routes=routes,
        lifespan=lifespan(service),
        middleware=[door(token)],
        exception_handlers={Refusal: refused, HTTPException: unrouted(_PATHS), 500: failed},
    )


class Endpoints:
    """What each path does."""

    def __init__(self, service: Service):
        self._service, self._created = service, int(time.time())
        self._watchers: set[asyncio.Task] = set()

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._sampled(request, bodies.completion, Completion)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._sampled(request, bodies.chat, Chat)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        name = request.path_params["name"]
        self._service.check_model(name)
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the engine runs, else 503."""
        alive = not self._service.failed.is_set()
        return JSONResponse({"status": "ok" if alive else "the engine has stopped"}, 200 if alive else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(self._service.gauges.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._service.name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxrl_post",
            "max_model_len": self._service.policy.config.engine.max_length,
            "weight_version": self._service.thread.version,
        }

    # ---- a request that samples

    async def _sampled(self, request: Request, read: Callable[[Any], Asked], form: type[Completion]) -> Response:
        service = self._service
        status = 500
        try:
            asked = await body(request, read)
            ticket = await service.open(asked)
            self._watch(request, ticket)
            choices = _choices(ticket, asked, service)
            made = form(
                asked, model=service.name, key=service.key, seed=ticket.seed, words=service.words, parser=service.parser
            )
            status = 200
            if asked.stream:
                return StreamingResponse(
                    self._events(ticket, choices, made), media_type="text/event-stream", headers=_EVENTS
                )
            await self._collected(ticket, choices)
            return JSONResponse(made.whole(choices))
        except ClientDisconnect:
            status = GONE
            return Response(status_code=status)
        except Refusal as refusal:
            status = refusal.status
            raise
        finally:
            service.gauges.requests.labels(request.scope["route"].path, str(status)).inc()

    def _watch(self, request: Request, ticket: Ticket) -> None:
        """Closes a ticket when its client goes away, and cuts a response that is not read by its deadline."""

        async def wait() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self._service.close(ticket)
            ticket.leave()

        task = asyncio.create_task(wait())
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)
        ticket.watcher = task
        abort = request.scope.get("extensions", {}).get(ABORT)
        if abort is not None and ticket.work is not None:
            late = ticket.work.deadline - time.monotonic() + GRACE_S
            ticket.cut = asyncio.get_running_loop().call_later(late, abort)

    async def _collected(self, ticket: Ticket, choices: list[Choice]) -> None:
        """Adds pieces to choices until all have ended."""
        try:
            async for piece in ticket.pieces():
                self._first(ticket)
                choices[piece.place].add(piece)
                self._ended(choices[piece.place])
        finally:
            self._close(ticket)

    async def _events(self, ticket: Ticket, choices: list[Choice], made: Completion) -> AsyncIterator[bytes]:
        """Yields server-sent events. A refusal after the first byte is an event, too."""
        try:
            for chunk in made.begun(choices):
                yield event(chunk)
            async for piece in ticket.pieces():
                self._first(ticket)
                one = choices[piece.place]
                news = one.add(piece)
                for chunk in made.chunks(one, news):
                    yield event(chunk)
                self._ended(one)
            for chunk in made.last(choices):
                yield event(chunk)
            yield b"data: [DONE]\n\n"
        except Refusal as refusal:
            yield event(refusal.body)
        finally:
            self._close(ticket)

    def _first(self, ticket: Ticket) -> None:
        if not ticket.heard:
            ticket.heard = True
            self._service.gauges.first_token.observe(time.monotonic() - ticket.begun)

    def _ended(self, one: Choice) -> None:
        if one.finish:
            self._service.gauges.tokens.inc(len(one.tokens))

    def _close(self, ticket: Ticket) -> None:
        self._service.close(ticket)
        for one in (ticket.watcher, ticket.cut):
            if one is not None:
                one.cancel()


def _choices(ticket: Ticket, asked: Asked, service: Service) -> list[Choice]:
    """Returns the choices of a request: the samples of its first prompt, then those of the next."""
    prompts = [prompt for prompt in ticket.prompts for _ in range(asked.n)]
    return [Choice(index, prompt, ticket.law, service.words) for index, prompt in enumerate(prompts)]
