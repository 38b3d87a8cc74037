"""Conversations as tokens: what the policy sampled stays as ids, and only what is observed is tokenised.

The chat template renders the conversation with a mark in place of the last turn. The text behind the mark is what follows
the turn. It is tokenised alone and appended.

Invariant: sampled ids are never decoded and tokenised again. Where a template separates turns by special tokens, the
result equals the whole conversation tokenised once. A policy may sample other ids than the tokenizer gives for the same
text. Then its own ids stay, and the two differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxrl_post.data.chat import Chat, text_of
from jaxrl_post.data.tokenizer import Tokenizer

_MARK = "\ue000turn\ue001"  # of the private use area, so that no conversation has it


@dataclass(frozen=True)
class Wording:
    """The template and the tokenizer of a conversation."""

    chat: Chat
    words: Tokenizer

    def said(self, tokens: np.ndarray, before: Sequence[int] = ()) -> str:
        """Returns the text of a turn, without the token that ends it. Other special tokens stay in the text.

        `before`: the ids that stand before the turn.
        """
        ids = tokens.tolist()
        ended = bool(ids) and ids[-1] in self.words.eos_ids
        return self.words.decode(ids[:-1] if ended else ids, skip_special=False, before=before)

    def observed(
        self,
        before: Sequence[Mapping],
        messages: Sequence[Mapping],
        last: int,
        *,
        begun: bool = False,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Returns the ids of what follows a turn, with the head of the next one.

        Args:
          before: the messages before the turn.
          messages: those that follow it.
          last: the id that ended the turn. If the template writes it behind the turn, it is not repeated.
          begun: whether the last message before the turn is the beginning of it.
          arguments: of Chat.render.

        Raises:
          ValueError: the template refuses the messages or leaves the turn out, or nothing follows.
        """
        talk = [*spoken(before, _MARK, begun), *messages]
        text = self.chat.render(talk, arguments=arguments, continues=bool(messages))
        _, mark, rest = text.rpartition(_MARK)
        if not mark:
            raise ValueError("the chat template leaves out what the assistant said before a tool or a user answers")
        end = self.words.decode([last], skip_special=False)
        ids = self.words.encode(rest.removeprefix(end), special=False)
        if not ids:
            raise ValueError("nothing follows the turn: neither messages nor the head of another turn")
        return ids

    def whole(self, messages: Sequence[Mapping]) -> list[int]:
        """Returns the ids of a conversation tokenised once, with all that the template writes behind its last message."""
        return self.words.encode(self.chat.render(messages, generation=False), special=False)


def spoken(before: Sequence[Mapping], text: str, begun: bool) -> list[Mapping]:
    """Returns messages with what the policy said behind them. `begun`: the last of them is the beginning of that turn."""
    if not begun:
        return [*before, {"role": "assistant", "content": text}]
    return [*before[:-1], before[-1] | {"content": text_of(before[-1].get("content")) + text}]
