"""The ASGI application: OpenAI's endpoints, and vLLM's of the tokenizer, over a Service, behind a bearer token.

Invariant: `tokens` of /tokenize are the ids that the other endpoints sample behind, where they take that text. A request
whose client goes away is closed at once, whether it is streamed or not. Every refusal is one sentence in OpenAI's error form.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import jaxrl_post
from jaxrl_post.serve import request_bodies as bodies
from jaxrl_post.serve import schema
from jaxrl_post.serve.device_thread import TokenChunk
from jaxrl_post.serve.exchange import body, event, openai
from jaxrl_post.serve.forms import Chat, Choice, Completion, News
from jaxrl_post.serve.http_server import ABORT
from jaxrl_post.serve.request_bodies import SamplingRequest
from jaxrl_post.serve.schema import Refusal
from jaxrl_post.serve.service import GONE, Service, Ticket

_PATHS = "/v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize, /version, /health and /metrics"
GRACE_S = 5.0  # behind the deadline of a request, for what its client has not read yet
_EVENTS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def app(service: Service, token: str) -> Starlette:
    """Returns the application. An empty token lets everybody in."""
    endpoints = Endpoints(service)
    routes = [
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
        Route("/version", endpoints.version),
        Route("/health", endpoints.health),
        Route("/metrics", endpoints.metrics),
    ]
    return openai(routes, token, _PATHS, service=service)


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

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: the ids of a text, or of messages in the chat template."""
        sampling, strings = await body(request, bodies.tokenized)
        ids = await self._service.tokens(sampling)
        decode = self._service.tokenizer.decode

        def made() -> dict[str, Any]:
            return {
                "count": len(ids),
                "max_model_len": self._service.policy.config.engine.max_length,
                "tokens": ids,
                "token_strs": [decode([one], False, ids[max(at - 1, 0) : at]) for at, one in enumerate(ids)]
                if strings
                else None,
            }

        return await _written(made)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of ids, special tokens among it."""
        given = await body(request, functools.partial(schema.read, bodies.DetokenizeBody))
        service, ids = self._service, given.tokens
        service.check_model(given.model)
        if len(ids) > service.reading.longest:
            raise Refusal(f"tokens has {len(ids)} ids; at most {service.reading.longest} are read", "tokens")

        def made() -> dict[str, Any]:
            schema.check_ids("tokens", ids, service.tokenizer.vocab_size)
            return {"prompt": service.tokenizer.decode(ids, False)}

        return await _written(made)

    async def version(self, request: Request) -> Response:
        """GET /version: that of this package."""
        return JSONResponse({"version": jaxrl_post.__version__})

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

    async def _sampled(
        self, request: Request, read: Callable[[Any], SamplingRequest], form: type[Completion]
    ) -> Response:
        service = self._service
        status = 500
        try:
            sampling = await body(request, read)
            ticket = await service.open(sampling)
            self._watch(request, ticket)
            prompts = [prompt for prompt in ticket.prompts for _ in range(sampling.n)]
            choices = [
                Choice(at, prompt, ticket.sampling_params, service.tokenizer, calls=bool(sampling.tools))
                for at, prompt in enumerate(prompts)
            ]
            made = form(
                sampling,
                model=service.name,
                key=service.key,
                seed=ticket.seed,
                law=ticket.sampling_params.law,
                tokenizer=service.tokenizer,
                parser=service.parser,
            )
            status = 200
            if sampling.stream:
                return StreamingResponse(
                    self._events(ticket, choices, made), media_type="text/event-stream", headers=_EVENTS
                )
            try:
                async for chunk in ticket.chunks():
                    self._add(ticket, choices, chunk)
            finally:
                self._close(ticket)
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
        if abort is not None and ticket.request is not None:
            late = ticket.request.deadline - time.monotonic() + GRACE_S
            ticket.cut = asyncio.get_running_loop().call_later(late, abort)

    def _add(self, ticket: Ticket, choices: list[Choice], chunk: TokenChunk) -> tuple[Choice, News]:
        """Adds new tokens to their choice. Returns it, and what is new."""
        gauges, one = self._service.gauges, choices[chunk.place]
        if not ticket.heard:
            ticket.heard = True
            gauges.first_token.observe(time.monotonic() - ticket.begun)
        news = one.add(chunk)
        if one.finish:
            gauges.tokens.inc(len(one.tokens))
        return one, news

    async def _events(self, ticket: Ticket, choices: list[Choice], made: Completion) -> AsyncIterator[bytes]:
        """Yields server-sent events. A refusal after the first byte is an event, too."""
        try:
            for chunk in made.begun(choices):
                yield event(chunk)
            async for chunk in ticket.chunks():
                for part in made.chunks(*self._add(ticket, choices, chunk)):
                    yield event(part)
            for chunk in made.last(choices):
                yield event(chunk)
            yield b"data: [DONE]\n\n"
        except Refusal as refusal:
            yield event(refusal.body)
        finally:
            self._close(ticket)

    def _close(self, ticket: Ticket) -> None:
        self._service.close(ticket)
        for one in (ticket.watcher, ticket.cut):
            if one is not None:
                one.cancel()


async def _written(made: Callable[[], dict[str, Any]]) -> Response:
    """Returns a JSON object as a response. A thread makes and writes it, so that streams go on meanwhile."""
    data = await anyio.to_thread.run_sync(lambda: json.dumps(made(), ensure_ascii=False).encode())
    return Response(data, media_type="application/json")
