"""What a request asks for: the body of /v1/completions or /v1/chat/completions, read and checked.

Invariant: a field that is not served is refused, unless its value asks for nothing. So no response differs from what
its body says. Fields that only label a request are passed over.
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
_TEXTS = "a text has no special tokens and no stop string; return_token_ids=true gives the ids"


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


def _logprobs(name: str, value: Any) -> bool:
    """Returns whether a completion asks for log-probs. vLLM's clients send false for none."""
    if value is False:
        return False
    fields.only(0, _LIKELIEST, instead="the valid value is 0")(name, value)
    return True


_FORMAT = fields.only({"type": "text"}, _ALONE, instead='the valid value is {"type": "text"}')
# Fields of other servers: the value that asks for nothing, and why no other is served.
_NEUTRAL: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), (0, _ALONE)),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), (1, _ALONE)),
    **dict.fromkeys(("ignore_eos", "use_beam_search", "early_stopping"), (False, _ALONE)),
    **dict.fromkeys(("bad_words", "allowed_token_ids"), ([], _ALONE)),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), (None, _ALONE)
    ),
    "logit_bias": ({}, _ALONE),
    "prompt_logprobs": (None, "no log-prob of a prompt is computed"),
    "skip_special_tokens": (True, _TEXTS),
    "spaces_between_special_tokens": (True, _TEXTS),
    "include_stop_str_in_output": (False, _TEXTS),
    "truncate_prompt_tokens": (None, "a prompt is never cut"),
}
_TEMPLATE = "the template beside the tokenizer is used as it is"
_NEUTRAL_IN_CHAT: dict[str, tuple[Any, str]] = {
    "modalities": (["text"], "texts alone are served"),
    "audio": (None, "texts alone are served"),
    "functions": ([], "tools are served in the field tools"),
    "function_call": ("none", "tools are served in the field tools"),
    "prediction": (None, _ALONE),
    "reasoning_effort": (None, _TEMPLATE),
}
TEMPLATE_FIELDS: dict[str, fields.Reader] = {
    "chat_template": fields.only(None, _TEMPLATE),
    "chat_template_kwargs": fields.only({}, _TEMPLATE),
    "add_generation_prompt": fields.only(True, _TEMPLATE),
    "continue_final_message": fields.only(False, _TEMPLATE),
}


_LABELS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
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
    "max_completion_tokens": fields.whole(1, _POSITIONS),
    "response_format": _FORMAT,
    **dict.fromkeys(_LABELS, fields.anything),
    **{name: fields.only(*neutral) for name, neutral in _NEUTRAL.items()},
}
_COMPLETION: dict[str, fields.Reader] = {
    **_COMMON,
    "prompt": _prompt,
    "logprobs": _logprobs,
    "echo": fields.only(False, "the prompt is no part of a rollout"),
    "best_of": fields.whole(1, MOST_SAMPLES),
    "suffix": fields.only("", "the policy continues a text and fills no gap"),
}
_CHAT: dict[str, fields.Reader] = {
    **_COMMON,
    "messages": messages.messages,
    "tools": messages.tools,
    "tool_choice": _tool_choice,
    "parallel_tool_calls": fields.only(True, "the policy decides how many calls it writes"),
    "logprobs": fields.truth,
    "top_logprobs": fields.only(0, _LIKELIEST),
    **{name: fields.only(*neutral) for name, neutral in _NEUTRAL_IN_CHAT.items()},
    **TEMPLATE_FIELDS,
}


def completion(body: Mapping[str, Any]) -> Asked:
    """Reads the body of /v1/completions.

    Raises:
      Refusal: a field is unknown, wrong or missing.
    """
    given = fields.read(body, _COMPLETION)
    if "prompt" not in given:
        raise Refusal(400, "prompt is missing: give a text, token ids, or a list of these", "prompt")
    n, best_of = given.get("n", 1), given.get("best_of", 1)
    if best_of > n:
        raise Refusal(
            400, f"best_of={best_of} above n={n} is not served: every sample is returned; leave it out", "best_of"
        )
    return Asked(prompts=given["prompt"], logprobs=given.get("logprobs", False), **_shared(given))


def chat(body: Mapping[str, Any]) -> Asked:
    """Reads the body of /v1/chat/completions.

    Raises:
      Refusal: a field is unknown, wrong or missing.
    """
    given = fields.read(body, _CHAT)
    if "messages" not in given:
        raise Refusal(400, "messages is missing: give a list of objects with role and content", "messages")
    shown_tools = () if given.get("tool_choice") == "none" else given.get("tools", ())
    return Asked(messages=given["messages"], tools=shown_tools, logprobs=given.get("logprobs", False), **_shared(given))


def _shared(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what both kinds of requests have.

    Raises:
      Refusal: two fields contradict each other.
    """
    both = given.get("max_tokens"), given.get("max_completion_tokens")
    if None not in both and both[0] != both[1]:
        raise Refusal(400, f"max_tokens={both[0]} and max_completion_tokens={both[1]} differ: give one", "max_tokens")
    law = {ours: given[name] for name, ours in _LAW.items() if name in given}
    if "top_k" in law:
        law["top_k"] = max(law["top_k"], 0)  # vLLM's -1 cuts nothing, too
    return {
        "model": given.get("model", ""),
        "law": law,
        "n": given.get("n", 1),
        "seed": given.get("seed"),
        "max_tokens": both[0] or both[1] or 0,
        "stream": given.get("stream", False),
        "usage": given.get("stream_options", False),
        "token_ids": given.get("return_token_ids", False),
        "timeout_s": given.get("timeout", 0.0),
    }
