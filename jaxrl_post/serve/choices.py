"""One rollout of a response: its text, tokens, log-probs and versions, as they come and at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_post.data.continuations import Pieces
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.serve.engine_thread import Piece
from jaxrl_post.serve.running_text import RunningText
from jaxrl_post.types import Finish, Prompt, Sampling

_REASONS = {Finish.EOS: "stop", Finish.STOP: "stop", Finish.LENGTH: "length"}


@dataclass(frozen=True, kw_only=True)
class News:
    """What a piece added to a choice. `first`: the place of its first token in the rollout."""

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
    """

    def __init__(self, index: int, prompt: Prompt, law: Sampling, words: Tokenizer):
        self.index, self.prompt = index, prompt
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish: str | None = None
        self.reason: str | int | None = None
        self._running = RunningText(words.decode, law, prompt.tokens, words.settled)
        self._pieces = Pieces(words.decode, prompt.tokens)
        self._token_texts: list[str] = []

    def add(self, piece: Piece) -> News:
        """Adds new tokens, and returns what is new."""
        first = len(self.tokens)
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.versions += piece.versions
        if piece.finish is None:
            text = self._running.more(self.tokens)
        else:
            self.finish = _REASONS[piece.finish]
            text, self.reason = self._running.rest(self.tokens, piece.finish)
        self.text += text
        return News(text=text, first=first, tokens=piece.tokens, logprobs=piece.logprobs, versions=piece.versions)

    def token_texts(self, news: News) -> list[str]:
        """Returns the texts of the tokens of a piece, special tokens included. Joined they are the text of all."""
        told = len(self._token_texts)
        self._token_texts += self._pieces.more(self.tokens[told:], last=self.finish is not None)
        return self._token_texts[news.first : news.first + len(news.tokens)]

    def told_versions(self) -> list[int]:
        """Returns the versions of the weights that sampled it, each once, in order."""
        return sorted(set(self.versions))

    def whole(self) -> News:
        """Returns all of it as one piece."""
        return News(text=self.text, first=0, tokens=self.tokens, logprobs=self.logprobs, versions=self.versions)


def token_fields(prompt: Prompt | None, news: News) -> dict[str, Any]:
    """Returns what return_token_ids adds to a choice. `prompt`: where its ids are told, too."""
    ids = {} if prompt is None else {"prompt_token_ids": prompt.tokens.tolist()}
    return ids | {"token_ids": list(news.tokens), "token_versions": list(news.versions)}
