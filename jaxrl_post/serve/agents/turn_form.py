"""A turn of the policy as a response of /v1/chat/completions, whole or as a stream.

Fields of our own stand beside OpenAI's: `weight_versions`, and `session` with the number of the turn. With
return_token_ids a choice has `prompt_token_ids`, `token_ids` and `token_versions`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from jaxrl_post.data.continuations import Pieces
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.rewards.environments.session import Spoken
from jaxrl_post.serve.asked import Asked
from jaxrl_post.serve.forms import chat_scores, counted


class TurnForm:
    """The response to one request.

    Args:
      name: of the session. model: of the run, as clients call it.
      max_turns: that a conversation may have.
    """

    def __init__(self, spoken: Spoken, asked: Asked, words: Tokenizer, *, name: str, model: str, max_turns: int):
        self._spoken, self._asked, self._words = spoken, asked, words
        self._head = {
            "id": f"chatcmpl-{name}-{spoken.number}",
            "created": int(time.time()),
            "model": model,
            "weight_versions": sorted({int(version) for version in spoken.versions}),
            "session": {"id": name, "turn": spoken.number, "turns_left": max_turns - spoken.number},
        }

    def whole(self) -> dict[str, Any]:
        """Returns the response."""
        choice = {"index": 0, "message": self._message(), "finish_reason": self._finish(), "logprobs": self._scores()}
        return self._head | {"object": "chat.completion", "choices": [choice | self._ids()], "usage": self._usage()}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Yields the chunks of a stream. A turn is there as a whole, so one chunk has all of it."""
        delta = self._message()
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": place} | call for place, call in enumerate(delta["tool_calls"])]
        yield self._chunk({"delta": delta, "finish_reason": None, "logprobs": self._scores()} | self._ids())
        yield self._chunk({"delta": {}, "finish_reason": self._finish()})
        if self._asked.usage:
            yield self._head | {"object": "chat.completion.chunk", "choices": [], "usage": self._usage()}

    def _chunk(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._head | {"object": "chat.completion.chunk", "choices": [{"index": 0} | body]}

    def _message(self) -> dict[str, Any]:
        """Returns what the policy said. Arguments of calls are texts of JSON, as OpenAI has them."""
        said = dict(self._spoken.message)
        if "tool_calls" in said:
            said["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in said["tool_calls"]
            ]
        return said

    def _finish(self) -> str:
        if self._spoken.cut:
            return "length"
        return "tool_calls" if self._spoken.message.get("tool_calls") else "stop"

    def _scores(self) -> dict[str, Any] | None:
        """Returns log-probs (nats) of the sampled tokens under the sampling law of the run."""
        if not self._asked.logprobs:
            return None
        spoken = self._spoken
        return chat_scores(Pieces(self._words.decode, spoken.before).more(spoken.tokens), spoken.logprobs.tolist())

    def _ids(self) -> dict[str, Any]:
        if not self._asked.token_ids:
            return {}
        return {
            "prompt_token_ids": self._spoken.before.tolist(),
            "token_ids": self._spoken.tokens.tolist(),
            "token_versions": self._spoken.versions.tolist(),
        }

    def _usage(self) -> dict[str, int]:
        return counted(self._spoken.before.size, self._spoken.tokens.size)
