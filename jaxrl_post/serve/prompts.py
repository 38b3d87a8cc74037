"""Prompts of requests: texts, token ids and messages as token ids, under the bounds of the engine.

Invariant: a prompt's id follows from its tokens alone, so equal prompts share their pages, and the noise of a request is
that of its prompt wherever it stands.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from jaxrl_post.data.chat import Chat
from jaxrl_post.data.messages import TOOLS
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.ring.types import Prompt, Request, RolloutId, Sampling, served_seed
from jaxrl_post.serve.request_bodies import SamplingRequest
from jaxrl_post.serve.schema import Refusal, check_ids

CHARACTERS = 64  # of a text, for each position of a slot: tokens of more are rare


class Reading:
    """Reads prompts. One request at a time: a chat template has one process.

    Args:
      chat: the template beside the tokenizer, or None.
      positions: of a slot, prompt and rollout together.
      tools: whether calls in the text of a turn are read (data/tool_calls.py).
    """

    def __init__(self, tokenizer: Tokenizer, chat: Chat | None, positions: int, *, tools: bool):
        self._tokenizer, self._chat, self._positions, self._tools = tokenizer, chat, positions, tools

    def prompts(self, sampling: SamplingRequest) -> list[Prompt]:
        """Returns the prompts of a request. Refused: one that cannot be read, or leaves no room for a token."""
        if sampling.chat:
            return [self._bounded("messages", self._conversation(sampling))]
        many = len(sampling.prompts) > 1
        return [
            self._bounded(f"prompt[{place}]" if many else "prompt", one) for place, one in enumerate(sampling.prompts)
        ]

    @property
    def longest(self) -> int:
        """Returns the most characters of a text."""
        return CHARACTERS * self._positions

    def tokens(self, sampling: SamplingRequest) -> list[int]:
        """Returns the token ids of messages, or of the first prompt, whether they fit a slot or not."""
        if sampling.chat:
            return self._conversation(sampling)
        return self._encoded("prompt", sampling.prompts[0])

    def close(self) -> None:
        """Ends the process of the template."""
        if self._chat is not None:
            self._chat.close()

    def _conversation(self, sampling: SamplingRequest) -> list[int]:
        if self._chat is None:
            raise Refusal("messages: this policy has no chat template; send a prompt to /v1/completions", "messages")
        if sampling.tools and not self._tools:
            raise Refusal(
                "tools are not served: the server was started without --tool-calls=PARSER; leave tools out", "tools"
            )
        arguments = {**sampling.arguments, TOOLS: list(sampling.tools)}
        self._check_length("messages", json.dumps([sampling.messages, arguments], ensure_ascii=False))
        try:
            text = self._chat.render(sampling.messages, arguments=arguments, continues=sampling.continues)
            self._check_length("messages", text)
            return self._tokenizer.encode(text, special=False)
        except ValueError as error:
            raise Refusal(f"messages: {error}", "messages") from error

    def _bounded(self, name: str, given: Any) -> Prompt:
        """Returns a prompt of a text or of token ids."""
        ids = self._encoded(name, given)
        if not ids:
            raise Refusal(f"{name} has no tokens: at least 1 is needed", name)
        most = self._positions - 1
        if len(ids) > most:
            raise Refusal(f"{name} has {len(ids)} tokens; at most {most} leave room for one more", name)
        check_ids(name, ids, self._tokenizer.vocab_size)
        return Prompt.of_tokens(np.array(ids, np.int32))

    def _check_length(self, name: str, text: str) -> None:
        """Refuses a text before a template or the tokenizer reads it."""
        if len(text) > self.longest:
            raise Refusal(f"{name} has {len(text)} characters; at most {self.longest} are read", name)

    def _encoded(self, name: str, given: Any) -> list[int]:
        """Returns the ids of a text, or token ids as they are."""
        if isinstance(given, str):
            self._check_length(name, given)
        try:
            return self._tokenizer.encode(given) if isinstance(given, str) else list(given)
        except ValueError as error:
            raise Refusal(f"{name}: {error}", name) from error


def engine_requests(
    prompt: Prompt, sampling: SamplingRequest, *, serial: int, max_tokens: int, sampling_params: Sampling, replica: int
) -> list[Request]:
    """Returns a request of the engine for each sample of a prompt, all of them on one replica.

    `serial`: tells requests of one prompt apart. Their noise does not depend on it, nor on who else asks.
    """
    return [
        Request(
            rollout_id=RolloutId(serial, "eval", 0, prompt.id, sample),
            prompt=prompt,
            seed=served_seed(sampling.seed, prompt.id, sample),
            max_tokens=max_tokens,
            sampling=sampling_params,
            replica=replica,
        )
        for sample in range(sampling.n)
    ]
