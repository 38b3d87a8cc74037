"""Texts and token ids of the served tokenizer: vLLM's paths /tokenize, /detokenize and /version.

Invariant: `tokens` of /tokenize are the ids that /v1/completions or /v1/chat/completions samples behind, where it takes
that text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import anyio
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import jaxrl_post
from jaxrl_post.serve import schema
from jaxrl_post.serve.asked import Asked, TemplateFields
from jaxrl_post.serve.exchange import body
from jaxrl_post.serve.refusal import Refusal
from jaxrl_post.serve.service import Service


class _Text(schema.Body):
    """The body of /tokenize with a text."""

    model: schema.Text = ""
    return_token_strs: bool = False
    prompt: str | None = None
    add_special_tokens: schema.only(True, "a prompt has the special tokens that a request's has") = None


class _Messages(TemplateFields):
    """The body of /tokenize with messages."""

    model: schema.Text = ""
    return_token_strs: bool = False
    add_special_tokens: schema.only(False, "the template writes the special tokens") = None


class _Ids(schema.Body):
    """The body of /detokenize."""

    model: schema.Text = ""
    tokens: schema.Ids = Field(description="give a list of token ids")


def _tokenized(value: Any) -> tuple[Asked, bool]:
    """Returns the request whose prompt is to be told, and whether its tokens' texts are, too."""
    talks, writes = (isinstance(value, dict) and value.get(name) is not None for name in ("messages", "prompt"))
    if talks and not writes:
        given = schema.read(_Messages, value)
        return Asked(model=given.model, **given.conversation()), given.return_token_strs
    text = schema.read(_Text, value)
    if text.prompt is None:
        raise Refusal(400, "give either prompt, a text, or messages", "prompt")
    return Asked(model=text.model, prompts=(text.prompt,)), text.return_token_strs


class Words:
    """What the three paths do."""

    def __init__(self, service: Service):
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: the ids of a text, or of messages in the chat template."""
        asked, strings = await body(request, _tokenized)
        ids = await self._service.tokens(asked)
        decode = self._service.words.decode

        def told() -> dict[str, Any]:
            return {
                "count": len(ids),
                "max_model_len": self._service.policy.config.engine.max_length,
                "tokens": ids,
                "token_strs": [decode([one], False, ids[max(at - 1, 0) : at]) for at, one in enumerate(ids)]
                if strings
                else None,
            }

        return await _written(told)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of ids, special tokens among it."""
        given = await body(request, functools.partial(schema.read, _Ids))
        service, ids = self._service, given.tokens
        service.check_model(given.model)
        if len(ids) > service.longest_text:
            raise Refusal(400, f"tokens has {len(ids)} ids; at most {service.longest_text} are read", "tokens")

        def told() -> dict[str, Any]:
            schema.check_ids("tokens", ids, service.words.vocab_size)
            return {"prompt": service.words.decode(ids, False)}

        return await _written(told)

    async def version(self, request: Request) -> Response:
        """GET /version: that of this package."""
        return JSONResponse({"version": jaxrl_post.__version__})


async def _written(made: Callable[[], dict[str, Any]]) -> Response:
    """Returns a JSON object as a response. A thread makes and writes it, so that streams go on meanwhile."""
    data = await anyio.to_thread.run_sync(lambda: json.dumps(made(), ensure_ascii=False).encode())
    return Response(data, media_type="application/json")
