"""The answers to all prompts as one n-gram table: a window over the last groups, rebuilt as it moves.

A rebuild comes when what is new amounts to a share of what the table holds, so early answers soon help the next prompts and
a large window is not counted again for every group. Invariant: the table, and when it changes, are a function of the groups
added and their order; at most 12 bytes for each token the window has room for. `state_dict` keeps texts, not the table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from jaxrl_post import ngrams

SHARE = 8  # a rebuild when a new token has come for every 8 of the table


class Corpus:
    """`entries` uint32[size] over the last size // 3 tokens of answers; `version` counts the rebuilds."""

    def __init__(self, size: int):
        if size < ngrams.ENTRIES_PER_TOKEN:
            raise ValueError(f"table over all prompts: {size} entries, at least {ngrams.ENTRIES_PER_TOKEN}")
        self.entries, self.version = np.zeros(size, np.uint32), 0
        self._window: deque[tuple[np.ndarray, list[np.ndarray]]] = deque()
        self._new: list[tuple[np.ndarray, list[np.ndarray]]] = []
        self._held = self._waiting = 0  # tokens of answers in each

    def add(self, answers: ngrams.Answers, end: np.ndarray) -> bool:
        """Takes the answers of a group and the end of its prompt; whether the table changed."""
        self._new.append((np.asarray(end, np.int32)[-ngrams.ORDERS:], [np.asarray(answer, np.int32) for answer in answers]))
        self._waiting += _tokens(answers)
        if SHARE * self._waiting < self._held:
            return False
        self._window.extend(self._new)
        self._held += self._waiting
        self._new, self._waiting = [], 0
        while self._held > self.entries.size // ngrams.ENTRIES_PER_TOKEN:
            self._held -= _tokens(self._window.popleft()[1])
        self._build()
        self.version += 1
        return True

    def _build(self) -> None:
        self.entries = ngrams.build_all(self._window, self.entries.size)

    def state_dict(self) -> dict:
        """The texts, prompt ends and answers end to end, and how many groups the table is built from."""
        groups = [*self._window, *self._new]
        texts = [text for end, answers in groups for text in (end, *answers)]
        return {"tokens": np.concatenate([np.zeros(0, np.int32), *texts]),
                "lengths": np.array([len(text) for text in texts], np.int64),
                "answers": np.array([len(answers) for _, answers in groups], np.int64),
                "built": len(self._window), "version": self.version}

    def load_state_dict(self, state: Mapping) -> None:
        """Takes the place of what is here and builds the table again."""
        texts = iter(np.split(np.array(state["tokens"], np.int32), np.cumsum(state["lengths"])[:-1]))
        groups = [(next(texts), [next(texts) for _ in range(count)]) for count in state["answers"]]
        self._window, self._new = deque(groups[:state["built"]]), groups[state["built"]:]
        self._held, self._waiting = (sum(_tokens(answers) for _, answers in some) for some in (self._window, self._new))
        self.version = state["version"]
        self._build()


def _tokens(answers: ngrams.Answers) -> int:
    return sum(map(len, answers))
