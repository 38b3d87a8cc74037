"""What a request asks for: the bodies of /v1/completions, /v1/chat/completions, /tokenize and /detokenize, read and checked.

A template gets the arguments of an earlier call as an object, as transformers gives it, where OpenAI's form has a text of
JSON. A null is left out. Parts of other types than text, such as images, are refused.

Invariant: a field that is not served is refused, unless its value asks for nothing. So no response differs from what
its body says. Fields that only label a request are passed over.
"""

from __future__ import annotations

import dataclasses
import difflib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pydantic
from pydantic import Field

from jaxrl_post.data.messages import check_names
from jaxrl_post.ring import json_text
from jaxrl_post.ring.json_text import shown
from jaxrl_post.serve import schema
from jaxrl_post.serve.schema import Refusal, not_served, wrong

MOST_PROMPTS = 1024
LONGEST_S = 86400.0  # of a request
ROLES = ("system", "developer", "user", "assistant", "tool")
_KEPT = ("name", "tool_call_id", "reasoning_content")  # texts that a template may read
_MOST_TOOLS = 128


@dataclass(frozen=True, kw_only=True)
class SamplingRequest:
    """A request.

    `prompts`: texts or token ids, of /v1/completions. `messages`, `tools`, `arguments` of the chat template, and whether a last
    message of the assistant `continues`: of /v1/chat/completions. `sampling_changes`: of the policy's sampling parameters.
    `max_tokens`: 0: the policy's own. `seed`: None: the server draws one. `usage`: whether a stream ends with counts of tokens.
    `timeout_s`: 0: the server's own. `prompt_logprobs`: of the Tinker API.
    """

    model: str = ""
    prompts: tuple[Any, ...] = ()
    messages: tuple[Mapping, ...] = ()
    tools: tuple[Mapping, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = True
    sampling_changes: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    seed: int | None = None
    max_tokens: int = 0
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    timeout_s: float = 0.0
    prompt_logprobs: bool = False

    def seeded(self, bits: int) -> SamplingRequest:
        """Returns it with a seed, drawn of so many bits where it names none."""
        return self if self.seed is not None else dataclasses.replace(self, seed=secrets.randbits(bits))

    @property
    def chat(self) -> bool:
        """Returns whether it is a chat request."""
        return bool(self.messages)


# ---- Messages and tools of a chat


def chat_messages(name: str, value: Any) -> tuple[dict, ...]:
    """Returns messages as a template takes them; at least one. A developer's message becomes one of the system."""
    if not isinstance(value, list) or not value:
        raise wrong(name, value, "a list of at least one message")
    return tuple(_message(f"{name}[{place}]", one) for place, one in enumerate(value))


def chat_tools(name: str, value: Any) -> tuple[dict, ...]:
    """Returns functions as a template takes them. Refused: one without a name, or too many."""
    if not isinstance(value, list) or len(value) > _MOST_TOOLS:
        raise Refusal(f"{name} must be a list of at most {_MOST_TOOLS} functions", name)
    for place, one in enumerate(value):
        function = one.get("function") if isinstance(one, dict) and one.get("type") == "function" else None
        if not (isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]):
            raise wrong(f"{name}[{place}]", one, '{"type": "function", "function": {"name": ...}}')
    return tuple(value)


def _message(where: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise wrong(where, given, "an object with role and content")
    role = given.get("role")
    if role not in ROLES:
        near = difflib.get_close_matches(str(role)[:100], ROLES, n=1, cutoff=0.0)
        raise Refusal(
            f"{where}.role={shown(role)} must be one of {', '.join(ROLES)}; the nearest is {near[0]!r}", where
        )
    out: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = given.get("tool_calls") or []
    if given.get("content") is not None or not calls:
        out["content"] = _content(f"{where}.content", given.get("content"))
    for name, value in given.items():
        if name in _KEPT and value is not None:
            if not isinstance(value, str):
                raise wrong(f"{where}.{name}", value, "a text")
            out[name] = value
        elif value and name not in ("role", "content", "tool_calls", *_KEPT):
            raise Refusal(f"{where}.{name}={shown(value)} is not served; leave it out", f"{where}.{name}")
    if calls:
        out["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    return out


def arguments(name: str, value: Any) -> dict[str, Any]:
    """Returns chat_template_kwargs. Refused: what is no object, or has a name that no template reads."""
    if not isinstance(value, dict):
        raise wrong(name, value, "an object")
    try:
        check_names(name, value)
    except ValueError as error:
        raise Refusal(str(error), name) from error
    return value


def _content(where: str, given: Any) -> str | list[dict]:
    """Returns the text of a message, or its parts."""
    if isinstance(given, list) and all(isinstance(part, dict) for part in given):
        for place, part in enumerate(given):
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = f"{where}[{place}]"
                raise Refusal(f"{kind}={shown(part)} is not served; parts of type text are", kind)
        return given
    if not isinstance(given, str):
        raise wrong(where, given, "a text or a list of parts of type text")
    return given


def _calls(where: str, given: Any) -> list[dict]:
    """Returns calls of an assistant's message, their arguments as objects."""
    if not isinstance(given, list):
        raise wrong(where, given, "a list of calls")
    return [_call(f"{where}[{place}]", one) for place, one in enumerate(given)]


def _call(where: str, one: Any) -> dict:
    function = one.get("function") if isinstance(one, Mapping) else None
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise Refusal(f"{where}={shown(one)} must have a function with a name and arguments", where)
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json_text.parsed(arguments or "{}", f"{where}.function.arguments")
        except ValueError as error:
            raise Refusal(str(error), where) from error
    if not isinstance(arguments, dict):
        raise Refusal(f"{where}.function.arguments={shown(arguments)} must be a JSON object", where)
    return {**one, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


# ---- Bodies


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
        raise wrong(name, value, "a text, token ids, or a list of these")
    if all(isinstance(one, int) for one in listed):
        return (ids(name, listed),)
    if len(listed) > MOST_PROMPTS:
        raise Refusal(f"{name} has {len(listed)} prompts; at most {MOST_PROMPTS} are served in one request", name)
    return tuple(one if isinstance(one, str) else ids(f"{name}[{at}]", one) for at, one in enumerate(listed))


def _tool_choice(name: str, value: Any) -> str:
    if value not in ("auto", "none"):
        raise not_served(name, value, "the policy decides; valid are 'auto' and 'none'")
    return value


def _logprobs(name: str, value: Any) -> bool:
    """Returns whether a completion asks for log-probs. vLLM's clients send false for none."""
    if value is not False and (value != 0 or isinstance(value, bool)):
        raise not_served(name, value, f"{_LIKELIEST}; the valid value is 0")
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
    messages: schema.by(chat_messages) = Field(description="give a list of objects with role and content")
    tools: schema.by(chat_tools) = ()
    chat_template_kwargs: schema.by(arguments) = Field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def conversation(self) -> dict[str, Any]:
        """Returns what the template gets. A last message of the assistant is continued, unless another turn is asked for.

        Refused: fields that contradict each other or the messages."""
        begins, goes_on, last = self.add_generation_prompt, self.continue_final_message, self.messages[-1]["role"]
        if goes_on and (begins or last != "assistant"):
            why = "add_generation_prompt=true begins another turn" if begins else f"the last message is of {last!r}"
            raise Refusal(f"continue_final_message=true: {why}; leave it out", "continue_final_message")
        if begins is False and (goes_on is False or last != "assistant"):
            why = f"add_generation_prompt=false is not served behind a message of {last!r}; leave it out"
            raise Refusal(why, "add_generation_prompt")
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

    def sampling_fields(self) -> dict[str, Any]:
        """Returns what both kinds of requests have. Refused: two fields that contradict each other."""
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise Refusal(f"max_tokens={both[0]} and max_completion_tokens={both[1]} differ: give one", "max_tokens")
        ends = {"stop_strings": self.stop, "stop_ids": self.stop_token_ids}
        return {
            "model": self.model,
            "sampling_changes": self.changes() | {name: tuple(one) for name, one in ends.items() if one},
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


def completion(body: Any) -> SamplingRequest:
    """Reads the body of /v1/completions."""
    given = schema.read(CompletionBody, body)
    if given.best_of > given.n:
        raise Refusal(
            f"best_of={given.best_of} above n={given.n} is not served: every sample is returned; leave it out",
            "best_of",
        )
    return SamplingRequest(prompts=given.prompt, logprobs=given.logprobs, **given.sampling_fields())


def chat(body: Any) -> SamplingRequest:
    """Reads the body of /v1/chat/completions."""
    given = schema.read(ChatBody, body)
    fields = given.conversation() | ({"tools": ()} if given.tool_choice == "none" else {})
    return SamplingRequest(**fields, logprobs=given.logprobs, **given.sampling_fields())


class _TokenizedText(schema.Body):
    """The body of /tokenize with a text."""

    model: schema.Text = ""
    return_token_strs: bool = False
    prompt: str | None = None
    add_special_tokens: schema.only(True, "a prompt has the special tokens that a request's has") = None


class _TokenizedMessages(TemplateFields):
    """The body of /tokenize with messages."""

    model: schema.Text = ""
    return_token_strs: bool = False
    add_special_tokens: schema.only(False, "the template writes the special tokens") = None


class DetokenizeBody(schema.Body):
    """The body of /detokenize."""

    model: schema.Text = ""
    tokens: schema.Ids = Field(description="give a list of token ids")


def tokenized(body: Any) -> tuple[SamplingRequest, bool]:
    """Reads the body of /tokenize: the request whose prompt is to be told, and whether its tokens' texts are, too."""
    talks, writes = (isinstance(body, dict) and body.get(name) is not None for name in ("messages", "prompt"))
    if talks and not writes:
        given = schema.read(_TokenizedMessages, body)
        return SamplingRequest(model=given.model, **given.conversation()), given.return_token_strs
    text = schema.read(_TokenizedText, body)
    if text.prompt is None:
        raise Refusal("give either prompt, a text, or messages", "prompt")
    return SamplingRequest(model=text.model, prompts=(text.prompt,)), text.return_token_strs
