"""Texts and token ids of the served tokenizer: vLLM's paths /tokenize, /detokenize and /version.

Invariant: `tokens` of /tokenize are the ids that /v1/completions or /v1/chat/completions samples behind, where it takes
that text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import jaxrl_post
from jaxrl_post.serve import fields, messages
from jaxrl_post.serve.asked import TEMPLATE_FIELDS, Asked
from jaxrl_post.serve.exchange import body
from jaxrl_post.serve.refusal import Refusal, wrong
from jaxrl_post.serve.service import Service

_COMMON: dict[str, fields.Reader] = {"model": fields.text, "return_token_strs": fields.truth}
_TEXT: dict[str, fields.Reader] = {
    **_COMMON,
    "prompt": fields.text,
    "add_special_tokens": fields.only(True, "a prompt has the special tokens that a request's has"),
}
_MESSAGES: dict[str, fields.Reader] = {
    **_COMMON,
    "messages": messages.messages,
    "tools": messages.tools,
    "add_special_tokens": fields.only(False, "the template writes the special tokens"),
    **TEMPLATE_FIELDS,
}
_DETOKENIZE: dict[str, fields.Reader] = {"model": fields.text, "tokens": fields.ids}


class Words:
    """What the three paths do."""

    def __init__(self, service: Service):
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: the ids of a text, or of messages in the chat template."""
        asked = await body(request)
        talks, writes = (asked.get(name) is not None for name in ("messages", "prompt"))
        given = fields.read(asked, _MESSAGES if talks and not writes else _TEXT)
        if not (talks or writes):
            raise Refusal(400, "give either prompt, a text, or messages", "prompt")
        ids = await self._service.tokens(_asked(given))
        decode = self._service.words.decode

        def told() -> dict[str, Any]:
            return {
                "count": len(ids),
                "max_model_len": self._service.policy.config.engine.max_length,
                "tokens": ids,
                "token_strs": [decode([one], False) for one in ids] if given.get("return_token_strs") else None,
            }

        return await _written(told)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of ids, special tokens among it."""
        given = fields.read(await body(request), _DETOKENIZE)
        if "tokens" not in given:
            raise Refusal(400, "tokens is missing: give a list of token ids", "tokens")
        service, ids = self._service, given["tokens"]
        service.check_model(given.get("model", ""))
        if len(ids) > service.longest_text:
            raise Refusal(400, f"tokens has {len(ids)} ids; at most {service.longest_text} are read", "tokens")

        def told() -> dict[str, Any]:
            last = service.words.vocab_size - 1
            for token in ids:
                if not 0 <= token <= last:
                    raise wrong("tokens", token, f"token ids from 0 to {last}", str(min(max(token, 0), last)))
            return {"prompt": service.words.decode(ids, False)}

        return await _written(told)

    async def version(self, request: Request) -> Response:
        """GET /version: that of this package."""
        return JSONResponse({"version": jaxrl_post.__version__})


async def _written(made: Callable[[], dict[str, Any]]) -> Response:
    """Returns a JSON object as a response. A thread makes and writes it, so that streams go on meanwhile."""
    data = await anyio.to_thread.run_sync(lambda: json.dumps(made(), ensure_ascii=False).encode())
    return Response(data, media_type="application/json")


def _asked(given: Mapping[str, Any]) -> Asked:
    """Returns the request whose prompt is to be told."""
    prompts = (given["prompt"],) if "prompt" in given else ()
    return Asked(
        model=given.get("model", ""), prompts=prompts, messages=given.get("messages", ()), tools=given.get("tools", ())
    )
