"""Texts and token ids of the served tokenizer: vLLM's paths /tokenize, /detokenize and /version.

Invariant: `tokens` of /tokenize are the ids that /v1/completions or /v1/chat/completions would sample behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import jaxrl_post
from jaxrl_post.serve import fields, messages
from jaxrl_post.serve.asked import MOST_POSITIONS, TEMPLATE_FIELDS, Asked
from jaxrl_post.serve.exchange import body
from jaxrl_post.serve.refusal import Refusal, wrong
from jaxrl_post.serve.service import Service

_TOKENIZE: dict[str, fields.Reader] = {
    "model": fields.text,
    "prompt": fields.text,
    "messages": messages.messages,
    "tools": messages.tools,
    "add_special_tokens": fields.only(True, "a prompt has the special tokens that a request's has"),
    "return_token_strs": fields.truth,
    **TEMPLATE_FIELDS,
}


def _ids(name: str, value: Any) -> tuple[int, ...]:
    found = fields.ids(name, value)
    if len(found) > MOST_POSITIONS:
        raise Refusal(400, f"{name} has {len(found)} ids; at most {MOST_POSITIONS} are read", name)
    return found


_DETOKENIZE: dict[str, fields.Reader] = {"model": fields.text, "tokens": _ids}


class Words:
    """What the three paths do."""

    def __init__(self, service: Service):
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: the ids of a text, or of messages in the chat template."""
        given = fields.read(await body(request), _TOKENIZE)
        if ("prompt" in given) == ("messages" in given):
            raise Refusal(400, "give either prompt, a text, or messages", "prompt")
        ids = await self._service.tokens(_asked(given))
        words = self._service.words
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": self._service.policy.config.engine.max_length,
                "tokens": ids,
                "token_strs": [words.decode([one], False) for one in ids] if given.get("return_token_strs") else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of ids, special tokens among it."""
        given = fields.read(await body(request), _DETOKENIZE)
        if "tokens" not in given:
            raise Refusal(400, "tokens is missing: give a list of token ids", "tokens")
        self._service.check_model(given.get("model", ""))
        last = self._service.words.vocab_size - 1
        for token in given["tokens"]:
            if not 0 <= token <= last:
                raise wrong("tokens", token, f"token ids from 0 to {last}", str(min(max(token, 0), last)))
        text = await anyio.to_thread.run_sync(self._service.words.decode, given["tokens"], False)
        return JSONResponse({"prompt": text})

    async def version(self, request: Request) -> Response:
        """GET /version: that of this package."""
        return JSONResponse({"version": jaxrl_post.__version__})


def _asked(given: Mapping[str, Any]) -> Asked:
    """Returns the request whose prompt is to be told."""
    prompts = (given["prompt"],) if "prompt" in given else ()
    return Asked(
        model=given.get("model", ""), prompts=prompts, messages=given.get("messages", ()), tools=given.get("tools", ())
    )
