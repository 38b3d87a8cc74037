"""The answers to all prompts as one n-gram table: a window over the last groups, rebuilt as it moves.

A rebuild comes when what is new amounts to a share of what the table holds, so early answers soon help the next prompts and
a large window is not counted again for every group. Invariant: the table, and when it changes, are a function of the groups
added and their order; at most 12 bytes for each token the window has room for. `state_dict` keeps texts, not the table.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import UInt32

from jaxrl_post.engine.speculation import ngrams, suffix_array
from jaxrl_post.engine.speculation.ngrams import Texts
from jaxrl_post.history import Past
from jaxrl_post.types import Prompt


def grams(pasts: Sequence[Past], prompt: Prompt) -> UInt32[np.ndarray, " size"]:
    """The n-gram table over all remembered epochs of a prompt (`pasts`, newest first), 3 entries a token; size 0 where nothing
    is known."""
    return ngrams.build([ngrams.Texts(prompt.tokens, past.answers, past.texts_to_learn) for past in reversed(pasts)])


def sorted_suffixes(pasts: Sequence[Past], prompt: Prompt, *, by_reward: bool) -> suffix_array.Suffixes:
    """The suffix array over the last epoch of a prompt; `by_reward`: answers weigh by their rewards, else alike."""
    if not pasts:
        return suffix_array.build([], prompt.tokens)
    last = pasts[0]
    weights = suffix_array.priorities(last.rewards, last.scored) if by_reward else None
    return suffix_array.build(last.answers, prompt.tokens, weights)


SHARE = 8  # a rebuild when a new token has come for every 8 of the table


class Corpus:
    """`entries` uint32[size] over the last size // 3 tokens of answers; `version` counts how often they changed. They are
    built when they are asked for."""

    def __init__(self, size: int):
        if size < ngrams.ENTRIES_PER_TOKEN:
            raise ValueError(f"table over all prompts: {size} entries, at least {ngrams.ENTRIES_PER_TOKEN}")
        self.size, self.version = size, 0
        self._entries: np.ndarray | None = np.zeros(size, np.uint32)  # None: no longer those of the window
        self._window: deque[Texts] = deque()
        self._new: list[Texts] = []
        self._held = self._waiting = 0  # tokens of answers in each

    def add(self, texts: Texts) -> bool:
        """Takes the answers of a group; whether the table changed."""
        texts = texts._replace(end=texts.end[-ngrams.ORDERS :])
        self._new.append(texts)
        self._waiting += texts.size
        if SHARE * self._waiting < self._held:
            return False
        self._window.extend(self._new)
        self._held += self._waiting
        self._new, self._waiting = [], 0
        while self._held > self.size // ngrams.ENTRIES_PER_TOKEN:
            self._held -= self._window.popleft().size
        self._entries = None
        self.version += 1
        return True

    @property
    def entries(self) -> np.ndarray:
        """uint32[size]."""
        if self._entries is None:
            self._entries = ngrams.build_all(self._window, self.size)
        return self._entries

    def state_dict(self) -> dict:
        """The texts end to end (of each group its prompt's end, answers and favourites), how many answers and how many
        favourites each has, and how many groups the table is built from."""
        groups = [*self._window, *self._new]
        texts = [text for g in groups for text in (g.end, *g.answers, *(g.argmax_tokens or ()))]
        return {
            "tokens": np.concatenate([np.zeros(0, np.int32), *texts]).astype(np.int32),
            "lengths": np.array([len(text) for text in texts], np.int64),
            "answers": np.array([len(g.answers) for g in groups], np.int64),
            "favourites": np.array([len(g.argmax_tokens or ()) for g in groups], np.int64),
            "built": len(self._window),
            "version": self.version,
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Takes the place of what is here and builds the table again."""
        texts = iter(np.split(np.array(state["tokens"], np.int32), np.cumsum(state["lengths"])[:-1]))
        groups = [
            Texts(next(texts), list(itertools.islice(texts, answers)), list(itertools.islice(texts, likeliest)) or None)
            for answers, likeliest in zip(state["answers"].tolist(), state["favourites"].tolist())
        ]
        self._window, self._new = deque(groups[: state["built"]]), groups[state["built"] :]
        self._held, self._waiting = (sum(texts.size for texts in some) for some in (self._window, self._new))
        self.version, self._entries = state["version"], None
