"""What a request asks for: the body of /v1/completions or /v1/chat/completions, read and checked.

Invariant: a field that is not served is refused, unless its value asks for nothing. So no response differs from what
its body says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrl_post.json_text import shown
from jaxrl_post.serve import fields, messages
from jaxrl_post.serve.refusal import Refusal, wrong
from jaxrl_post.types import LEAST_OF_LAW

MOST_SAMPLES, MOST_PROMPTS, MOST_STOPS = 1024, 1024, 16
LONGEST_S = 86400.0  # of a request
_POSITIONS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request.

    `prompts`: texts or token ids, of /v1/completions. `messages`, `tools`: of /v1/chat/completions. `law`: changes of the
    policy's sampling law. `max_tokens`: 0: the policy's own. `seed`: None: the server draws one. `usage`: whether a
    stream ends with counts of tokens. `timeout_s`: 0: the server's own.
    """

    model: str = ""
    prompts: tuple[Any, ...] = ()
    messages: tuple[Mapping, ...] = ()
    tools: tuple[Mapping, ...] = ()
    law: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    seed: int | None = None
    max_tokens: int = 0
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    timeout_s: float = 0.0

    @property
    def chat(self) -> bool:
        """Returns whether it is a chat request."""
        return bool(self.messages)


_LAW = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "stop": "stop_strings"} | {
    "stop_token_ids": "stop_ids"
}
_ALONE = "tokens follow temperature, top_p and top_k alone"
_LIKELIEST = "the sampled token's log-prob is known, those of other tokens are not"


def _stream_options(name: str, value: Any) -> bool:
    if not isinstance(value, dict):
        raise wrong(name, value, "an object with include_usage")
    return fields.read(value, {"include_usage": fields.truth}).get("include_usage", False)


def _prompt(name: str, value: Any) -> tuple[Any, ...]:
    """Returns prompts: each a text or a tuple of token ids."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed:
        raise Refusal(400, f"{name}={shown(value)} must be a text, token ids, or a list of these", name)
    if all(isinstance(one, int) for one in listed):
        return (fields.ids(name, listed),)
    if len(listed) > MOST_PROMPTS:
        raise Refusal(400, f"{name} has {len(listed)} prompts; at most {MOST_PROMPTS} are served in one request", name)
    read = []
    for place, one in enumerate(listed):
        read.append(one if isinstance(one, str) else fields.ids(f"{name}[{place}]", one))
    return tuple(read)


def _tool_choice(name: str, value: Any) -> str:
    if value not in ("auto", "none"):
        raise Refusal(
            400, f"{name}={shown(value)} is not served: the policy decides; valid are 'auto' and 'none'", name
        )
    return value


def _response_format(name: str, value: Any) -> Any:
    if value != {"type": "text"}:
        raise Refusal(
            400, f'{name}={shown(value)} is not served: {_ALONE}; the valid value is {{"type": "text"}}', name
        )
    return value


_COMMON: dict[str, fields.Reader] = {
    "model": fields.text,
    "n": fields.whole(1, MOST_SAMPLES),
    "seed": fields.whole(-(1 << 63), (1 << 63) - 1),
    "max_tokens": fields.whole(1, _POSITIONS),
    "temperature": fields.number(LEAST_OF_LAW, 100.0, zero=True),
    "top_p": fields.number(LEAST_OF_LAW, 1.0),
    "top_k": fields.whole(-1, 1 << 30),
    "stop": fields.texts(MOST_STOPS),
    "stop_token_ids": fields.ids,
    "stream": fields.truth,
    "stream_options": _stream_options,
    "return_token_ids": fields.truth,
    "timeout": fields.number(0.0, LONGEST_S, above=True),
    "presence_penalty": fields.only(0, _ALONE),
    "frequency_penalty": fields.only(0, _ALONE),
    "logit_bias": fields.only({}, _ALONE),
    **dict.fromkeys(("user", "metadata", "store", "service_tier", "safety_identifier"), fields.anything),
}
_COMPLETION: dict[str, fields.Reader] = {
    **_COMMON,
    "prompt": _prompt,
    "logprobs": fields.only(0, f"{_LIKELIEST}, so logprobs=0 is the valid value"),
    "echo": fields.only(False, "the prompt is no part of a rollout"),
    "best_of": fields.only(1, "every sample is returned"),
    "suffix": fields.only("", "the policy continues a text and fills no gap"),
}
_CHAT: dict[str, fields.Reader] = {
    **_COMMON,
    "messages": messages.messages,
    "tools": messages.tools,
    "tool_choice": _tool_choice,
    "parallel_tool_calls": fields.only(True, "the policy decides how many calls it writes"),
    "max_completion_tokens": fields.whole(1, _POSITIONS),
    "logprobs": fields.truth,
    "top_logprobs": fields.only(0, _LIKELIEST),
    "response_format": _response_format,
    "prompt_cache_key": fields.anything,
}


def completion(body: Mapping[str, Any]) -> Asked:
    """Reads the body of /v1/completions.

    Raises:
      Refusal: a field is unknown, wrong or missing.
    """
    given = fields.read(body, _COMPLETION)
    if "prompt" not in given:
        raise Refusal(400, "prompt is missing: give a text, token ids, or a list of these", "prompt")
    return Asked(prompts=given["prompt"], logprobs="logprobs" in given, **_shared(given))


def chat(body: Mapping[str, Any]) -> Asked:
    """Reads the body of /v1/chat/completions.

    Raises:
      Refusal: a field is unknown, wrong or missing.
    """
    given = fields.read(body, _CHAT)
    if "messages" not in given:
        raise Refusal(400, "messages is missing: give a list of objects with role and content", "messages")
    both = given.get("max_tokens"), given.get("max_completion_tokens")
    if None not in both and both[0] != both[1]:
        raise Refusal(400, f"max_tokens={both[0]} and max_completion_tokens={both[1]} differ: give one", "max_tokens")
    given["max_tokens"] = both[0] or both[1] or 0
    shown_tools = () if given.get("tool_choice") == "none" else given.get("tools", ())
    return Asked(messages=given["messages"], tools=shown_tools, logprobs=given.get("logprobs", False), **_shared(given))


def _shared(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what both kinds of requests have."""
    law = {ours: given[name] for name, ours in _LAW.items() if name in given}
    if "top_k" in law:
        law["top_k"] = max(law["top_k"], 0)  # vLLM's -1 cuts nothing, too
    return {
        "model": given.get("model", ""),
        "law": law,
        "n": given.get("n", 1),
        "seed": given.get("seed"),
        "max_tokens": given.get("max_tokens", 0),
        "stream": given.get("stream", False),
        "usage": given.get("stream_options", False),
        "token_ids": given.get("return_token_ids", False),
        "timeout_s": given.get("timeout", 0.0),
    }
