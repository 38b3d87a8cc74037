"""What a request asks for: the body of /v1/completions or /v1/chat/completions, read and checked.

Invariant: a field that is not served is refused, unless its value asks for nothing. So no response differs from what
its body says. Fields that only label a request are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pydantic
from pydantic import Field

from jaxrl_post.json_text import shown
from jaxrl_post.serve import messages as talk
from jaxrl_post.serve import schema
from jaxrl_post.serve.refusal import Refusal, wrong

MOST_PROMPTS = 1024
LONGEST_S = 86400.0  # of a request


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request.

    `prompts`: texts or token ids, of /v1/completions. `messages`, `tools`, `arguments` of the chat template, and whether a last
    message of the assistant `continues`: of /v1/chat/completions. `law`: changes of the policy's sampling law. `max_tokens`: 0:
    the policy's own. `seed`: None: the server draws one. `usage`: whether a stream ends with counts of tokens. `timeout_s`: 0:
    the server's own.
    """

    model: str = ""
    prompts: tuple[Any, ...] = ()
    messages: tuple[Mapping, ...] = ()
    tools: tuple[Mapping, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = True
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


_ALONE = "tokens follow temperature, top_p and top_k alone"
_LIKELIEST = "the sampled token's log-prob is known, those of other tokens are not"
_TEXTS = "a text has no special tokens and no stop string; return_token_ids=true gives the ids"
_TEMPLATE = "the template beside the tokenizer is used as it is"


def ids(name: str, value: Any) -> tuple[int, ...]:
    """Returns token ids."""
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise wrong(name, value, "a list of token ids")
    return tuple(value)


def _prompt(name: str, value: Any) -> tuple[Any, ...]:
    """Returns prompts: each a text or a tuple of token ids."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed:
        raise Refusal(400, f"{name}={shown(value)} must be a text, token ids, or a list of these", name)
    if all(isinstance(one, int) for one in listed):
        return (ids(name, listed),)
    if len(listed) > MOST_PROMPTS:
        raise Refusal(400, f"{name} has {len(listed)} prompts; at most {MOST_PROMPTS} are served in one request", name)
    return tuple(one if isinstance(one, str) else ids(f"{name}[{at}]", one) for at, one in enumerate(listed))


def _tool_choice(name: str, value: Any) -> str:
    if value not in ("auto", "none"):
        raise Refusal(
            400, f"{name}={shown(value)} is not served: the policy decides; valid are 'auto' and 'none'", name
        )
    return value


def _logprobs(name: str, value: Any) -> bool:
    """Returns whether a completion asks for log-probs. vLLM's clients send false for none."""
    if value is not False and (value != 0 or isinstance(value, bool)):
        raise Refusal(400, f"{name}={shown(value)} is not served: {_LIKELIEST}; the valid value is 0", name)
    return value is not False


# Fields of other servers: the value that asks for nothing, and why no other is served.
_NEUTRAL: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), (0, _ALONE)),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), (1, _ALONE)),
    **dict.fromkeys(("ignore_eos", "use_beam_search", "early_stopping"), (False, _ALONE)),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "logits_processors"), ([], _ALONE)),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), (None, _ALONE)
    ),
    "logit_bias": ({}, _ALONE),
    "prompt_logprobs": (None, "no log-prob of a prompt is computed"),
    "skip_special_tokens": (True, _TEXTS),
    "spaces_between_special_tokens": (True, _TEXTS),
    "include_stop_str_in_output": (False, _TEXTS),
    "detokenize": (True, "every response has its text"),
    "return_tokens_as_token_ids": (False, "return_token_ids=true gives the ids"),
    "truncate_prompt_tokens": (None, "a prompt is never cut"),
    "priority": (0, "requests are served in the order of their arrival"),
}
_NEUTRAL_IN_CHAT: dict[str, tuple[Any, str]] = {
    "modalities": (["text"], "texts alone are served"),
    "audio": (None, "texts alone are served"),
    "functions": ([], "tools are served in the field tools"),
    "function_call": ("none", "tools are served in the field tools"),
    "prediction": (None, _ALONE),
    "best_of": (1, "every sample is returned"),
    "reasoning_effort": (None, _TEMPLATE),
    "top_logprobs": (0, _LIKELIEST),
    "parallel_tool_calls": (True, "the policy decides how many calls it writes"),
    "echo": (False, "the prompt is no part of a rollout"),
    "add_special_tokens": (False, "the template writes the special tokens"),
}
_LABELS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id")


def _neutral(fields: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    return schema.named(**{name: schema.only(*about) for name, about in fields.items()})


_Neutral = pydantic.create_model(
    "_Neutral",
    __base__=schema.Law,
    **_neutral(_NEUTRAL),
    **schema.named(
        response_format=schema.only({"type": "text"}, _ALONE, instead='the valid value is {"type": "text"}'),
        **dict.fromkeys(_LABELS, Any),
    ),
)
_NeutralInChat = pydantic.create_model("_NeutralInChat", __base__=schema.Body, **_neutral(_NEUTRAL_IN_CHAT))


class TemplateFields(schema.Body):
    """What a request may say of its chat template."""

    chat_template: schema.only(None, _TEMPLATE) = None
    messages: schema.by(talk.messages) = Field(description="give a list of objects with role and content")
    tools: schema.by(talk.tools) = ()
    chat_template_kwargs: schema.by(talk.arguments) = Field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def conversation(self) -> dict[str, Any]:
        """Returns what the template gets. A last message of the assistant is continued, unless another turn is asked for.

        Raises:
          Refusal: the fields contradict each other or the messages.
        """
        begins, goes_on, last = self.add_generation_prompt, self.continue_final_message, self.messages[-1]["role"]
        if goes_on and (begins or last != "assistant"):
            why = "add_generation_prompt=true begins another turn" if begins else f"the last message is of {last!r}"
            raise Refusal(400, f"continue_final_message=true: {why}; leave it out", "continue_final_message")
        if begins is False and (goes_on is False or last != "assistant"):
            why = f"add_generation_prompt=false is not served behind a message of {last!r}; leave it out"
            raise Refusal(400, why, "add_generation_prompt")
        return {
            "messages": self.messages,
            "tools": self.tools,
            "arguments": self.chat_template_kwargs,
            "continues": not begins if goes_on is None else goes_on,
        }


class _StreamOptions(schema.Body):
    include_usage: bool = False


class _Shared(_Neutral):
    """What both kinds of requests have."""

    model: schema.Text = ""
    n: schema.whole(1, schema.MOST_SAMPLES) = 1
    stop: schema.Stops = ()
    stop_token_ids: schema.Ids = ()
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    return_token_ids: bool = False
    timeout: Annotated[float, Field(gt=0, le=LONGEST_S, allow_inf_nan=False)] = 0.0
    max_completion_tokens: schema.whole(1, schema.POSITIONS) | None = None

    def asked(self) -> dict[str, Any]:
        """Returns what both kinds of requests have.

        Raises:
          Refusal: two fields contradict each other.
        """
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise Refusal(
                400, f"max_tokens={both[0]} and max_completion_tokens={both[1]} differ: give one", "max_tokens"
            )
        ends = {"stop_strings": self.stop, "stop_ids": self.stop_token_ids}
        return {
            "model": self.model,
            "law": self.changes() | {name: tuple(one) for name, one in ends.items() if one},
            "n": self.n,
            "seed": self.seed,
            "max_tokens": both[0] or both[1] or 0,
            "stream": self.stream,
            "usage": self.stream_options.include_usage,
            "token_ids": self.return_token_ids,
            "timeout_s": self.timeout,
        }


class CompletionBody(_Shared):
    """The body of /v1/completions."""

    prompt: schema.by(_prompt) = Field(description="give a text, token ids, or a list of these")
    logprobs: schema.by(_logprobs) = False
    echo: schema.only(False, "the prompt is no part of a rollout") = None
    best_of: schema.whole(1, schema.MOST_SAMPLES) = 1
    suffix: schema.only("", "the policy continues a text and fills no gap") = None
    add_special_tokens: schema.only(True, "a prompt has the special tokens that training gave it") = None


class ChatBody(TemplateFields, _NeutralInChat, _Shared):
    """The body of /v1/chat/completions."""

    tool_choice: schema.by(_tool_choice) = "auto"
    logprobs: bool = False


def completion(body: Any) -> Asked:
    """Reads the body of /v1/completions.

    Raises:
      Refusal: a field is unknown, wrong or missing.
    """
    given = schema.read(CompletionBody, body)
    if given.best_of > given.n:
        raise Refusal(
            400,
            f"best_of={given.best_of} above n={given.n} is not served: every sample is returned; leave it out",
            "best_of",
        )
    return Asked(prompts=given.prompt, logprobs=given.logprobs, **given.asked())


def chat(body: Any) -> Asked:
    """Reads the body of /v1/chat/completions.

    Raises:
      Refusal: a field is unknown, wrong or missing.
    """
    given = schema.read(ChatBody, body)
    told = given.conversation() | ({"tools": ()} if given.tool_choice == "none" else {})
    return Asked(**told, logprobs=given.logprobs, **given.asked())
