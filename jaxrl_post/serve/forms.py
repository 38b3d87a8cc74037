"""The objects that responses are made of, in OpenAI's form: /v1/completions and /v1/chat/completions, whole and in chunks.

Fields of our own stand beside theirs. A response has `seed`, `sampling_law` and `weight_versions`. A choice has `weight_versions` and
`stop_reason`, and with return_token_ids `prompt_token_ids`, `token_ids` and `token_versions`. The response to a turn of a
session has `weight_versions` and `session`.

Invariant: the pieces of a choice together are the text of the whole rollout. What a later token may still change is held
back: the bytes of a character that is not complete, and the beginning of a stop string. Neither a stop string nor the token
that ended the rollout is part of the text.
"""

from __future__ import annotations

import functools
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_post.data import tool_calls
from jaxrl_post.data.continuations import BROKEN, Decode, Pieces
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.rewards.environments.session import Spoken
from jaxrl_post.ring.types import Finish, Prompt, Sampling
from jaxrl_post.serve.device_thread import TokenChunk
from jaxrl_post.serve.request_bodies import SamplingRequest

_REASONS = {Finish.EOS: "stop", Finish.STOP: "stop", Finish.LENGTH: "length"}


class RunningText:
    """The text of one rollout.

    Args:
      decode: token ids to text. `settled`: how many of the first tokens no later token changes.
      before: the ids of its prompt.
    """

    def __init__(
        self,
        decode: Decode,
        sampling_params: Sampling,
        before: Sequence[int] = (),
        settled: Callable[[Sequence[int]], int] = len,
    ):
        self._settled = settled
        self._decode, self._sampling_params = functools.partial(decode, before=before), sampling_params
        self._shown = 0  # characters that were returned

    def more(self, tokens: Sequence[int]) -> str:
        """Returns the new text of an unfinished rollout. `tokens`: all of them so far."""
        text = self._decode(tokens[: self._settled(tokens)]).rstrip(BROKEN)
        return self._new(text[: len(text) - _begun(text, self._sampling_params.stop_strings)])

    def rest(self, tokens: Sequence[int], finish: Finish) -> tuple[str, str | int | None]:
        """Returns the last piece of a finished rollout, and the stop string or stop id that ended it."""
        tokens, reason = list(tokens), None
        text = self._decode(tokens)
        found = [(place, one) for one in self._sampling_params.stop_strings if (place := text.find(one)) >= 0]
        if finish is Finish.STOP and found:
            place, reason = min(found)
            text = text[:place]
        elif finish in (Finish.EOS, Finish.STOP):
            reason = self._named(tokens[-1]) if finish is Finish.STOP else None
            text = self._decode(tokens[:-1])
        return self._new(text), reason

    def _named(self, token: int) -> str | int:
        """Returns the stop string that a special token is, else its id."""
        text = self._decode([token], skip_special=False)
        return text if text in self._sampling_params.stop_strings else token

    def _new(self, text: str) -> str:
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new


def _begun(text: str, strings: Sequence[str]) -> int:
    """Returns how many characters at the end of a text may be the beginning of a string."""
    return max(
        (size for one in strings for size in range(1, min(len(one), len(text) + 1)) if text.endswith(one[:size])),
        default=0,
    )


@dataclass(frozen=True, kw_only=True)
class News:
    """What a chunk added to a choice. `first`: the place of its first token in the rollout."""

    text: str
    first: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]


class Choice:
    """A rollout of a response.

    Attributes:
      index: in the response. prompt: what it continues.
      text, tokens, logprobs, versions: all so far.
      finish: "stop" or "length"; None while it is sampled. reason: the stop string or stop id that ended it.

    Args:
      calls: whether tool calls are read from the text. Special tokens then stay in it, as some families write calls by them.
    """

    def __init__(
        self, index: int, prompt: Prompt, sampling_params: Sampling, tokenizer: Tokenizer, *, calls: bool = False
    ):
        self.index, self.prompt = index, prompt
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish: str | None = None
        self.reason: str | int | None = None
        decode = functools.partial(tokenizer.decode, skip_special=not calls)
        self._running = RunningText(decode, sampling_params, prompt.tokens, tokenizer.settled)
        self._pieces = Pieces(tokenizer.decode, prompt.tokens)
        self._token_texts: list[str] = []

    def add(self, chunk: TokenChunk) -> News:
        """Adds new tokens, and returns what is new."""
        first = len(self.tokens)
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self.versions += chunk.versions
        if chunk.finish is None:
            text = self._running.more(self.tokens)
        else:
            self.finish = _REASONS[chunk.finish]
            text, self.reason = self._running.rest(self.tokens, chunk.finish)
        self.text += text
        return News(text=text, first=first, tokens=chunk.tokens, logprobs=chunk.logprobs, versions=chunk.versions)

    def token_texts(self, news: News) -> list[str]:
        """Returns the texts of the tokens of a chunk, special tokens included. Joined they are the text of all."""
        read = len(self._token_texts)
        self._token_texts += self._pieces.more(self.tokens[read:], last=self.finish is not None)
        return self._token_texts[news.first : news.first + len(news.tokens)]

    def weight_versions(self) -> list[int]:
        """Returns the versions of the weights that sampled it, each once, in order."""
        return sorted(set(self.versions))

    def whole(self) -> News:
        """Returns all of it as one piece."""
        return News(text=self.text, first=0, tokens=self.tokens, logprobs=self.logprobs, versions=self.versions)


class Completion:
    """Responses of /v1/completions.

    Args:
      key: the numerics key, which the fingerprint names.
      law: of the sampled tokens and of their log-probs, Sampling.law.
    """

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self,
        sampling: SamplingRequest,
        *,
        model: str,
        key: str,
        seed: int,
        law: Mapping[str, float],
        tokenizer: Tokenizer,
        parser: str,
    ):
        self.sampling, self.tokenizer, self._parser, self._key = sampling, tokenizer, parser, key
        self._head = {
            "id": f"{self.prefix}{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "seed": seed,
            "sampling_law": dict(law),
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Returns the response with every choice."""
        listed = [self.choice(one) for one in choices]
        return self._envelope(self.kind, choices) | {"choices": listed, "usage": usage(choices)}

    def begun(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        """Yields the chunks before the first token."""
        yield from ()

    def chunks(self, one: Choice, news: News) -> Iterator[dict[str, Any]]:
        """Yields the chunks of new tokens. A chunk that shows nothing gives none."""
        if self._shows(one, news):
            yield self._chunk(one, {"text": news.text, "logprobs": self.scores(one, news)} | self._ends(one, news))

    def last(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        """Yields the chunk behind all choices: counts of tokens, where they were asked for."""
        if self.sampling.usage:
            yield self._envelope(self.chunk_kind, choices) | {"choices": [], "usage": usage(choices)}

    def choice(self, one: Choice) -> dict[str, Any]:
        """Returns a whole choice."""
        body = {"index": one.index, "text": one.text, "logprobs": self.scores(one, one.whole())}
        return body | self._ends(one, one.whole())

    def scores(self, one: Choice, news: News) -> dict[str, Any] | None:
        """Returns log-probs (nats) of the sampled tokens under the sampling law."""
        if not self.sampling.logprobs:
            return None
        return {"tokens": one.token_texts(news), "token_logprobs": list(news.logprobs), "top_logprobs": None}

    def _shows(self, one: Choice, news: News) -> bool:
        asks = self.sampling.logprobs or self.sampling.token_ids
        return bool(news.text or one.finish or (asks and news.tokens))

    def _chunk(self, one: Choice, body: dict[str, Any]) -> dict[str, Any]:
        return self._envelope(self.chunk_kind, [one]) | {"choices": [{"index": one.index} | body]}

    def _ends(self, one: Choice, news: News) -> dict[str, Any]:
        """Returns how a choice ended, and its tokens where they were asked for."""
        out: dict[str, Any] = {"finish_reason": one.finish}
        if one.finish:
            out |= {"stop_reason": one.reason, "weight_versions": one.weight_versions()}
        if self.sampling.token_ids:
            out |= _token_ids(one.prompt.tokens if news.first == 0 else None, list(news.tokens), list(news.versions))
        return out

    def _envelope(self, kind: str, choices: Sequence[Choice]) -> dict[str, Any]:
        versions = sorted({version for one in choices for version in one.versions})
        span = "-".join(dict.fromkeys(map(str, (versions[0], versions[-1])))) if versions else "none"
        return self._head | {
            "object": kind,
            "system_fingerprint": f"fp_{self._key}_{span}",
            "weight_versions": versions,
        }


class Chat(Completion):
    """Responses of /v1/chat/completions. Where there are tools, a turn is told once it is whole: a call may begin anywhere
    in its text."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _shows(self, one: Choice, news: News) -> bool:
        asks = self.sampling.logprobs or self.sampling.token_ids
        return bool((news.text and not self.sampling.tools) or one.finish or (asks and news.tokens))

    def begun(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        """Yields the role of each choice."""
        for one in choices:
            yield self._chunk(one, {"delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def chunks(self, one: Choice, news: News) -> Iterator[dict[str, Any]]:
        """Yields the chunks of new tokens."""
        if not self._shows(one, news):
            return
        if not self.sampling.tools:
            delta: dict[str, Any] = {"content": news.text} if news.text else {}
        elif one.finish:
            delta = self._message(one)
            del delta["role"]
            delta |= {"tool_calls": [{"index": i} | call for i, call in enumerate(delta.get("tool_calls", ()))]}
        else:
            delta = {}
        yield self._chunk(one, {"delta": delta, "logprobs": self.scores(one, news)} | self._ends(one, news))

    def choice(self, one: Choice) -> dict[str, Any]:
        """Returns a whole choice."""
        body = {"index": one.index, "message": self._message(one), "logprobs": self.scores(one, one.whole())}
        return body | self._ends(one, one.whole())

    def scores(self, one: Choice, news: News) -> dict[str, Any] | None:
        """Returns log-probs (nats) of the sampled tokens under the sampling law."""
        if not self.sampling.logprobs:
            return None
        return _chat_scores(one.token_texts(news), news.logprobs)

    def _message(self, one: Choice) -> dict[str, Any]:
        """Returns an assistant's message, with the calls in its text where there are tools."""
        if not self.sampling.tools:
            return {"role": "assistant", "content": one.text}
        return _written(tool_calls.message(one.text, self._parser, self.sampling.tools))

    def _ends(self, one: Choice, news: News) -> dict[str, Any]:
        out = super()._ends(one, news)
        if one.finish and self.sampling.tools and self._message(one).get("tool_calls"):
            out["finish_reason"] = "tool_calls"
        return out


class TurnForm:
    """A turn of a session's policy as a response of /v1/chat/completions. `session` in it has the number of the turn.

    Args:
      name: of the session. model: of the run, as clients call it.
      max_turns: that a conversation may have.
    """

    def __init__(
        self, spoken: Spoken, sampling: SamplingRequest, tokenizer: Tokenizer, *, name: str, model: str, max_turns: int
    ):
        self._spoken, self._sampling, self._tokenizer = spoken, sampling, tokenizer
        self._head = {
            "id": f"chatcmpl-{name}-{spoken.number}",
            "created": int(time.time()),
            "model": model,
            "weight_versions": sorted({int(version) for version in spoken.versions}),
            "session": {"id": name, "turn": spoken.number, "turns_left": max_turns - spoken.number},
        }

    def whole(self) -> dict[str, Any]:
        """Returns the response."""
        choice = {
            "index": 0,
            "message": _written(self._spoken.message),
            "finish_reason": self._finish(),
            "logprobs": self._scores(),
        }
        return self._head | {"object": "chat.completion", "choices": [choice | self._ids()], "usage": self._usage()}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Yields the chunks of a stream. A turn is there as a whole, so one chunk has all of it."""
        delta = _written(self._spoken.message)
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": place} | call for place, call in enumerate(delta["tool_calls"])]
        yield self._chunk({"delta": delta, "finish_reason": None, "logprobs": self._scores()} | self._ids())
        yield self._chunk({"delta": {}, "finish_reason": self._finish()})
        if self._sampling.usage:
            yield self._head | {"object": "chat.completion.chunk", "choices": [], "usage": self._usage()}

    def _chunk(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._head | {"object": "chat.completion.chunk", "choices": [{"index": 0} | body]}

    def _finish(self) -> str:
        if self._spoken.cut:
            return "length"
        return "tool_calls" if self._spoken.message.get("tool_calls") else "stop"

    def _scores(self) -> dict[str, Any] | None:
        """Returns log-probs (nats) of the sampled tokens under the sampling law of the run."""
        if not self._sampling.logprobs:
            return None
        spoken = self._spoken
        return _chat_scores(Pieces(self._tokenizer.decode, spoken.before).more(spoken.tokens), spoken.logprobs.tolist())

    def _ids(self) -> dict[str, Any]:
        spoken = self._spoken
        return (
            _token_ids(spoken.before, spoken.tokens.tolist(), spoken.versions.tolist())
            if self._sampling.token_ids
            else {}
        )

    def _usage(self) -> dict[str, int]:
        return _counted(self._spoken.before.size, self._spoken.tokens.size)


def _written(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message of the policy. Arguments of calls are texts of JSON, as OpenAI has them."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _token_ids(prompt: np.ndarray | None, tokens: list[int], versions: list[int]) -> dict[str, Any]:
    """Returns what return_token_ids adds to a choice. `prompt`: where its ids are sent, too."""
    ids = {} if prompt is None else {"prompt_token_ids": prompt.tolist()}
    return ids | {"token_ids": tokens, "token_versions": versions}


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    """Returns counts of tokens. A prompt counts once, however many samples it has."""
    prompts = {id(one.prompt): one.prompt.tokens.size for one in choices}
    read, written = sum(prompts.values()), sum(len(one.tokens) for one in choices)
    return _counted(read, written)


def _counted(read: int, written: int) -> dict[str, int]:
    """Returns counts of tokens of prompts and of rollouts, in the form of an API."""
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _chat_scores(texts: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    """Returns log-probs (nats) of tokens, by their texts, in the form of a chat."""
    content = [
        {"token": text, "logprob": logprob, "bytes": _utf8(text), "top_logprobs": []}
        for text, logprob in zip(texts, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _utf8(text: str) -> list[int] | None:
    """Returns the bytes of a token, or None where its text is a part of a character."""
    return None if "\ufffd" in text else list(text.encode())
