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
from jaxrl_post.serve.asked import Asked
from jaxrl_post.serve.refusal import Refusal, wrong
from jaxrl_post.types import Prompt

CHARACTERS = 64  # of a text, for each position of a slot: tokens of more are rare


class Reading:
    """Reads prompts. One request at a time: a chat template has one process.

    Args:
      chat: the template beside the tokenizer, or None.
      positions: of a slot, prompt and rollout together.
      tools: whether calls in the text of a turn are read (data/tool_calls.py).
    """

    def __init__(self, words: Tokenizer, chat: Chat | None, positions: int, *, tools: bool):
        self._words, self._chat, self._positions, self._tools = words, chat, positions, tools

    def prompts(self, asked: Asked) -> list[Prompt]:
        """Returns the prompts of a request.

        Raises:
          Refusal: a prompt that cannot be read, or leaves no room for a token.
        """
        if asked.chat:
            return [self._bounded("messages", self._conversation(asked))]
        many = len(asked.prompts) > 1
        return [self._bounded(f"prompt[{place}]" if many else "prompt", one) for place, one in enumerate(asked.prompts)]

    @property
    def longest(self) -> int:
        """Returns the most characters of a text."""
        return CHARACTERS * self._positions

    def tokens(self, asked: Asked) -> list[int]:
        """Returns the token ids of messages, or of the first prompt, whether they fit a slot or not.

        Raises:
          Refusal: the prompt cannot be read.
        """
        if asked.chat:
            return self._conversation(asked)
        return self._encoded("prompt", asked.prompts[0])

    def close(self) -> None:
        """Ends the process of the template."""
        if self._chat is not None:
            self._chat.close()

    def _conversation(self, asked: Asked) -> list[int]:
        if self._chat is None:
            raise Refusal(
                400, "messages: this policy has no chat template; send a prompt to /v1/completions", "messages"
            )
        if asked.tools and not self._tools:
            raise Refusal(
                400,
                "tools are not served: the server was started without --tool-calls=PARSER; leave tools out",
                "tools",
            )
        arguments = {**asked.arguments, TOOLS: list(asked.tools)}
        self._check_length("messages", json.dumps([asked.messages, arguments], ensure_ascii=False))
        try:
            text = self._chat.render(asked.messages, arguments=arguments, continues=asked.continues)
            self._check_length("messages", text)
            return self._words.encode(text, special=False)
        except ValueError as error:
            raise Refusal(400, f"messages: {error}", "messages") from error

    def _bounded(self, name: str, given: Any) -> Prompt:
        """Returns a prompt of a text or of token ids."""
        ids = self._encoded(name, given)
        if not ids:
            raise Refusal(400, f"{name} has no tokens: at least 1 is needed", name)
        most = self._positions - 1
        if len(ids) > most:
            raise Refusal(400, f"{name} has {len(ids)} tokens; at most {most} leave room for one more", name)
        last = self._words.vocab_size - 1
        for token in ids:
            if not 0 <= token <= last:
                raise wrong(name, token, f"token ids from 0 to {last}", str(min(max(token, 0), last)))
        return Prompt.of_tokens(np.array(ids, np.int32))

    def _check_length(self, name: str, text: str) -> None:
        """Refuses a text before a template or the tokenizer reads it."""
        if len(text) > self.longest:
            raise Refusal(400, f"{name} has {len(text)} characters; at most {self.longest} are read", name)

    def _encoded(self, name: str, given: Any) -> list[int]:
        """Returns the ids of a text, or token ids as they are."""
        if isinstance(given, str):
            self._check_length(name, given)
        try:
            return self._words.encode(given) if isinstance(given, str) else list(given)
        except ValueError as error:
            raise Refusal(400, f"{name}: {error}", name) from error
