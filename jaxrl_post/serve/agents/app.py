"""The ASGI application of a run's sessions: a harness takes one, plays it by OpenAI's chat endpoint, and posts its reward.

A session has a base URL of its own, so that an OpenAI client needs no change. The run samples by its own law and seeds:
what would ask for other tokens is refused.

Invariant: a request may be sent again while its session is open, and gets the same response. Every refusal is one sentence
in OpenAI's error form.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.rewards.environments.session import AGAIN, OVER, UNKNOWN, UNLIKE, NotPlayed, Session
from jaxrl_post.rewards.environments.sessions import Sessions, Wake
from jaxrl_post.serve import exchange, schema
from jaxrl_post.serve import request_bodies as bodies
from jaxrl_post.serve.forms import TurnForm
from jaxrl_post.serve.request_bodies import SamplingRequest
from jaxrl_post.serve.schema import Refusal, not_served, wrong

LONGEST_S = 600.0  # of a request that waits
LARGEST = 1e30  # of a reward or a component
MOST = 4096  # sessions that are taken at a time
_MOST_NUMBERS, _LONGEST_NAME = 64, 200
_STATUS = {UNKNOWN: 404, OVER: 410, UNLIKE: 400, AGAIN: 409}
_OTHERS = ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "seed")
_PATHS = "POST /v1/sessions, POST /v1/sessions/release, GET /v1/sessions, GET /health and those below /sessions/ID/"
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class About:
    """What a run says to harnesses.

    `model`: its name. `tools`: that the chat template shows. `max_turns`, `max_tokens`: of a conversation.
    """

    model: str
    tokenizer: Tokenizer
    tools: tuple[Mapping, ...]
    max_turns: int
    max_tokens: int


def app(sessions: Sessions, about: About, token: str) -> Starlette:
    """Returns the application."""
    endpoints = Endpoints(sessions, about)
    routes = [
        Route("/v1/sessions", endpoints.take, methods=["POST"]),
        Route("/v1/sessions", endpoints.count),
        Route("/v1/sessions/release", endpoints.release, methods=["POST"]),
        Route("/sessions/{name}/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/sessions/{name}/v1/models", endpoints.models),
        Route("/sessions/{name}/reward", endpoints.reward, methods=["POST"]),
        Route("/sessions/{name}/failed", endpoints.failed, methods=["POST"]),
        Route("/health", endpoints.health),
    ]
    return exchange.openai(routes, token, _PATHS, refusals={NotPlayed: _refusal})


class Endpoints:
    """What each path does."""

    def __init__(self, sessions: Sessions, about: About):
        self._sessions, self._about = sessions, about

    async def take(self, request: Request) -> Response:
        """POST /v1/sessions: sessions to play, or none within `wait` seconds. `ended`: there will be no more."""
        given = await exchange.body(request, functools.partial(schema.read, _Take))
        try:
            found = await self._until(
                request, lambda wake: self._sessions.claim(given.harness, given.most, wake), given.wait
            )
        except NotPlayed:
            return JSONResponse({"sessions": [], "ended": True})
        taken = {"sessions": [self._described(one, request) for one in found or ()], "ended": False}
        return Response(json.dumps(taken, default=_plain), media_type="application/json")

    async def count(self, request: Request) -> Response:
        """GET /v1/sessions."""
        waiting, played = self._sessions.count()
        return JSONResponse({"waiting": waiting, "played": played})

    async def release(self, request: Request) -> Response:
        """POST /v1/sessions/release: sessions of a harness that begins anew are offered again."""
        given = await exchange.body(request, functools.partial(schema.read, _Release))
        return JSONResponse({"released": self._sessions.release(given.harness)})

    async def chat(self, request: Request) -> Response:
        """POST /sessions/ID/v1/chat/completions: the turn behind the messages."""
        name = request.path_params["name"]
        body, sampling = await exchange.body(request, lambda value: (value, bodies.chat(value)))
        self._refuse_others(body, sampling)
        spoken = await self._until(
            request,
            lambda wake: self._sessions.heard(name, sampling.messages, wake),
            sampling.timeout_s or LONGEST_S,
            name,
        )
        if spoken is None:
            raise Refusal("the policy's turn is not sampled yet; send the same request again", status=408)
        about = self._about
        form = TurnForm(spoken, sampling, about.tokenizer, name=name, model=about.model, max_turns=about.max_turns)
        if not sampling.stream:
            return JSONResponse(form.whole())
        events = b"".join(map(exchange.event, form.chunks())) + b"data: [DONE]\n\n"
        return Response(events, media_type="text/event-stream")

    async def models(self, request: Request) -> Response:
        """GET /sessions/ID/v1/models."""
        model = {"id": self._about.model, "object": "model", "created": 0, "owned_by": "jaxrl_post"}
        return JSONResponse({"object": "list", "data": [model]})

    async def reward(self, request: Request) -> Response:
        """POST /sessions/ID/reward: the reward of the last turn, which ends the conversation unless `done` is false."""
        given = await exchange.body(request, functools.partial(schema.read, _Reward))
        self._sessions.rewarded(request.path_params["name"], given.reward, given.components, given.done)
        return JSONResponse({"reward": given.reward, "done": given.done})

    async def failed(self, request: Request) -> Response:
        """POST /sessions/ID/failed: the rollout is masked."""
        given = await exchange.body(request, functools.partial(schema.read, _Failed))
        self._sessions.failed(request.path_params["name"], _plain_words(given.why))
        return JSONResponse({"failed": True})

    async def health(self, request: Request) -> Response:
        """GET /health."""
        return JSONResponse({"status": "ok"})

    async def _until(
        self, request: Request, look: Callable[[Wake], Found | None], seconds: float, name: str = ""
    ) -> Found | None:
        """Looks again and again, whenever it is woken. `name`: of a session that wakes it.

        Returns None where nothing is found within the seconds, or the client has gone: what it took would be lost."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        end = loop.time() + seconds

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ready.set)

        try:
            while not (found := look(wake)):
                await asyncio.wait_for(ready.wait(), end - loop.time())
                ready.clear()
                if await request.is_disconnected():
                    return None
            return found
        except TimeoutError:
            return None
        finally:
            self._sessions.leave(wake, name)

    def _refuse_others(self, body: Mapping[str, Any], sampling: SamplingRequest) -> None:
        """Refuses what would ask for other tokens than those of the run."""
        about = self._about
        if sampling.model and sampling.model != about.model:
            raise Refusal(
                f"there is no model {sampling.model[:80]!r}; the only one is {about.model!r}", "model", status=404
            )
        for name in _OTHERS:
            if body.get(name) is not None:
                raise not_served(name, body[name], "the run samples by its own law and seeds; leave it out")
        if sampling.n != 1:
            raise wrong("n", sampling.n, "1: every sample is a session of its own", "1")
        if 0 < sampling.max_tokens < about.max_tokens:
            near = str(about.max_tokens)
            raise wrong("max_tokens", sampling.max_tokens, "left out, or the run's sampling.max_tokens at least", near)
        for name in ("chat_template_kwargs", "continue_final_message"):
            if body.get(name):
                raise Refusal(f"{name} is not served: the template has the run's arguments alone; leave it out", name)
        if about.tools and body.get("tool_choice") == "none":
            raise not_served("tool_choice", "none", "the policy is shown the run's tools; leave it out")
        if body.get("tools") and list(body["tools"]) != list(about.tools):
            raise Refusal(
                f"tools has {len(body['tools'])} functions that are not those of the run's environment.arguments.tools, "
                f"{len(about.tools)}; send these, or leave tools out",
                "tools",
            )

    def _described(self, session: Session, request: Request) -> dict[str, Any]:
        """Returns what a harness must know of a session."""
        asking, turn = session.asking, len(session.asking.said)
        rollout = asking.rollout
        return {
            "id": session.name,
            "base_url": f"{request.base_url}sessions/{session.name}/v1",
            "model": self._about.model,
            "messages": session.begun(),
            "turn": turn,
            "turns_left": self._about.max_turns - turn,
            "tools": list(self._about.tools),
            "row": asking.row,
            "seed": rollout.id.seed().tolist(),
            **{name: value for name, value in rollout.id._asdict().items() if name != "run_seed"},
        }


class _Take(schema.Body):
    harness: schema.Name = Field(description="give a name, by which it may release its sessions")
    most: schema.whole(1, MOST) = 1
    wait: schema.number(0.0, LONGEST_S) = 0.0


class _Release(schema.Body):
    harness: schema.Name = Field(description="give the name under which sessions were taken")


def _names(value: Any) -> Any:
    """Refuses names of components that no log should hold."""
    for name in value if isinstance(value, dict) else ():
        if not (0 < len(name) <= _LONGEST_NAME and name.isprintable()):
            raise wrong("components", name, f"named by 1 to {_LONGEST_NAME} printable characters")
    return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else value


class _Reward(schema.Body):
    reward: schema.number(-LARGEST, LARGEST) = Field(description="give a number")
    components: Annotated[
        dict[str, schema.number(-LARGEST, LARGEST)], BeforeValidator(_names), Field(max_length=_MOST_NUMBERS)
    ] = Field(default_factory=dict)
    done: bool = True


class _Failed(schema.Body):
    why: schema.Text = Field(min_length=1, description="say in a few words what failed, for the log of the run")


def _plain_words(text: str) -> str:
    """Returns a text on one line as a terminal may show it: what is not printable becomes a space."""
    return " ".join("".join(one if one.isprintable() else " " for one in text[:2000]).split())[:200]


def _plain(value: Any) -> Any:
    """Returns a value of a data row as JSON has it."""
    return dict(value) if isinstance(value, Mapping) else value.tolist() if hasattr(value, "tolist") else str(value)


def _refusal(wrong: NotPlayed) -> Refusal:
    return Refusal(wrong.sentence, "messages" if wrong.kind == UNLIKE else None, status=_STATUS[wrong.kind])
