"""One n-gram table over past rollouts of all prompts: a sliding window over the last groups.

The table is rebuilt when new tokens amount to a share of the table. So early rollouts soon help the next prompts, and
a large window is not counted again for every group. `state_dict` keeps texts, not the table.

Invariant: the table, and the times of its changes, follow from the groups added and their order. The table takes at
most 12 bytes for each token that the window can hold.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import UInt32

from jaxrl_post.engine.speculation import ngrams, suffix_array
from jaxrl_post.engine.speculation.ngrams import Texts
from jaxrl_post.ring.history import Past
from jaxrl_post.ring.types import Prompt


def grams(pasts: Sequence[Past], prompt: Prompt) -> UInt32[np.ndarray, " size"]:
    """Returns the n-gram table uint32[size] over all remembered epochs of a prompt.

    `pasts`: epochs, newest first. The table has 3 entries a token; its size is 0 without a past."""
    return ngrams.build(
        [ngrams.Texts(prompt.tokens, past.token_lists, past.texts_to_learn) for past in reversed(pasts)]
    )


def sorted_suffixes(pasts: Sequence[Past], prompt: Prompt, *, by_reward: bool) -> suffix_array.Suffixes:
    """Returns the suffix array over the last epoch of a prompt.

    `by_reward`: rollouts weigh by their rewards. Otherwise all weigh the same.
    """
    if not pasts:
        return suffix_array.build([], prompt.tokens)
    last = pasts[0]
    weights = suffix_array.priorities(last.rewards, last.scored) if by_reward else None
    return suffix_array.build(last.token_lists, prompt.tokens, weights)


SHARE = 8  # a rebuild takes place after one new token for every 8 in the table


class Corpus:
    """An n-gram table of `size` entries over the last size // 3 tokens of rollouts.

    `version` counts the table's changes. The entries are built when they are read."""

    def __init__(self, size: int):
        if size < ngrams.ENTRIES_PER_TOKEN:
            raise ValueError(f"table over all prompts: {size} entries, at least {ngrams.ENTRIES_PER_TOKEN}")
        self.size, self.version = size, 0
        self._entries: np.ndarray | None = np.zeros(size, np.uint32)  # None: the window has changed
        self._window: deque[Texts] = deque()
        self._new: list[Texts] = []
        self._held = self._waiting = 0  # tokens of rollouts in each

    def add(self, texts: Texts) -> bool:
        """Adds the rollouts of a group. Returns whether the table changed."""
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
        if self._entries is None:
            self._entries = ngrams.build_all(self._window, self.size)
        return self._entries

    def state_dict(self) -> dict:
        """Returns the texts of all groups, for a checkpoint.

        The texts are concatenated: of each group the prompt's end, the rollouts and their argmax tokens. Their lengths,
        the numbers of texts of each kind, and the number of groups in the table are saved too."""
        groups = [*self._window, *self._new]
        texts = [text for g in groups for text in (g.end, *g.rollouts, *(g.argmax_tokens or ()))]
        return {
            "tokens": np.concatenate([np.zeros(0, np.int32), *texts]).astype(np.int32),
            "lengths": np.array([len(text) for text in texts], np.int64),
            "answers": np.array([len(g.rollouts) for g in groups], np.int64),
            "favourites": np.array([len(g.argmax_tokens or ()) for g in groups], np.int64),
            "built": len(self._window),
            "version": self.version,
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Restores the texts of a checkpoint; the table is built again."""
        texts = iter(np.split(np.array(state["tokens"], np.int32), np.cumsum(state["lengths"])[:-1]))
        groups = [
            Texts(
                next(texts), list(itertools.islice(texts, rollouts)), list(itertools.islice(texts, likeliest)) or None
            )
            for rollouts, likeliest in zip(state["answers"].tolist(), state["favourites"].tolist())
        ]
        self._window, self._new = deque(groups[: state["built"]]), groups[state["built"] :]
        self._held, self._waiting = (sum(texts.size for texts in some) for some in (self._window, self._new))
        self.version, self._entries = state["version"], None
