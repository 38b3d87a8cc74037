"""The objects that responses are made of, in OpenAI's form: /v1/completions and /v1/chat/completions, whole and in chunks.

Fields of our own stand beside theirs. A response has `seed` and `weight_versions`. A choice has `weight_versions` and
`stop_reason`, and with return_token_ids `prompt_token_ids`, `token_ids` and `token_versions`.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl_post.data import tool_calls
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.serve.asked import Asked
from jaxrl_post.serve.choices import Choice, News, token_fields


class Completion:
    """Responses of /v1/completions.

    Args:
      key: the numerics key, which the fingerprint names.
    """

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, asked: Asked, *, model: str, key: str, seed: int, words: Tokenizer, parser: str):
        self.asked, self.words, self._parser, self._key = asked, words, parser, key
        self._head = {
            "id": f"{self.prefix}{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "seed": seed,
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Returns the response with every choice."""
        listed = [self.choice(one) for one in choices]
        return self._envelope(self.kind, choices) | {"choices": listed, "usage": usage(choices)}

    def begun(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        """Yields the chunks before the first token."""
        yield from ()

    def chunks(self, one: Choice, news: News) -> Iterator[dict[str, Any]]:
        """Yields the chunks of new tokens. A piece that shows nothing gives none."""
        if self._shows(one, news):
            yield self._chunk(one, {"text": news.text, "logprobs": self.scores(one, news)} | self._ends(one, news))

    def last(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        """Yields the chunk behind all choices: counts of tokens, where they were asked for."""
        if self.asked.usage:
            yield self._envelope(self.chunk_kind, choices) | {"choices": [], "usage": usage(choices)}

    def choice(self, one: Choice) -> dict[str, Any]:
        """Returns a whole choice."""
        body = {"index": one.index, "text": one.text, "logprobs": self.scores(one, one.whole())}
        return body | self._ends(one, one.whole())

    def scores(self, one: Choice, news: News) -> dict[str, Any] | None:
        """Returns log-probs (nats) of the sampled tokens under the sampling law."""
        if not self.asked.logprobs:
            return None
        return {"tokens": one.token_texts(news), "token_logprobs": list(news.logprobs), "top_logprobs": None}

    def _shows(self, one: Choice, news: News) -> bool:
        asks = self.asked.logprobs or self.asked.token_ids
        return bool(news.text or one.finish or (asks and news.tokens))

    def _chunk(self, one: Choice, body: dict[str, Any]) -> dict[str, Any]:
        return self._envelope(self.chunk_kind, [one]) | {"choices": [{"index": one.index} | body]}

    def _ends(self, one: Choice, news: News) -> dict[str, Any]:
        """Returns how a choice ended, and its tokens where they were asked for."""
        out: dict[str, Any] = {"finish_reason": one.finish}
        if one.finish:
            out |= {"stop_reason": one.reason, "weight_versions": one.told_versions()}
        if self.asked.token_ids:
            out |= token_fields(one.prompt if news.first == 0 else None, news)
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
        asks = self.asked.logprobs or self.asked.token_ids
        return bool((news.text and not self.asked.tools) or one.finish or (asks and news.tokens))

    def begun(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        """Yields the role of each choice."""
        for one in choices:
            yield self._chunk(one, {"delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def chunks(self, one: Choice, news: News) -> Iterator[dict[str, Any]]:
        """Yields the chunks of new tokens."""
        if not self._shows(one, news):
            return
        if not self.asked.tools:
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
        if not self.asked.logprobs:
            return None
        return chat_scores(one.token_texts(news), news.logprobs)

    def _message(self, one: Choice) -> dict[str, Any]:
        """Returns an assistant's message, with the calls in its text where there are tools."""
        if not self.asked.tools:
            return {"role": "assistant", "content": one.text}
        said = tool_calls.message(one.text, self._parser)
        for call in said.get("tool_calls", ()):
            call["function"] = call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}
        return said

    def _ends(self, one: Choice, news: News) -> dict[str, Any]:
        out = super()._ends(one, news)
        if one.finish and self.asked.tools and self._message(one).get("tool_calls"):
            out["finish_reason"] = "tool_calls"
        return out


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    """Returns counts of tokens. A prompt counts once, however many samples it has."""
    prompts = {id(one.prompt): one.prompt.tokens.size for one in choices}
    read, written = sum(prompts.values()), sum(len(one.tokens) for one in choices)
    return counted(read, written)


def counted(read: int, written: int) -> dict[str, int]:
    """Returns counts of tokens of prompts and of rollouts, in the form of an API."""
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def chat_scores(texts: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    """Returns log-probs (nats) of tokens, by their texts, in the form of a chat."""
    told = [
        {"token": text, "logprob": logprob, "bytes": _utf8(text), "top_logprobs": []}
        for text, logprob in zip(texts, logprobs, strict=True)
    ]
    return {"content": told, "refusal": None}


def _utf8(text: str) -> list[int] | None:
    """Returns the bytes of a token, or None where its text is a part of a character."""
    return None if "\ufffd" in text else list(text.encode())
