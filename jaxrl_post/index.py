"""What is drafted from: the arrays of the prompts in play, made from the history, and where they lie in one flat array.

Invariant: the arrays of a prompt are a function of what the history holds of it and of its tokens, so they are never saved:
a restored history gives the same ones. Host numpy only.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt32

from jaxrl_post import ngrams, suffixes
from jaxrl_post.history import History
from jaxrl_post.types import Prompt


def grams(history: History, prompt: Prompt) -> UInt32[np.ndarray, " size"]:
    """The n-gram table over all remembered epochs of a prompt, 3 entries a token; size 0 where nothing is known."""
    return ngrams.build([ngrams.Texts(prompt.tokens, past.answers) for past in reversed(history.of(prompt.id))])


def sorted_suffixes(history: History, prompt: Prompt, *, by_reward: bool) -> suffixes.Suffixes:
    """The suffix array over the last epoch of a prompt; `by_reward`: answers weigh by their rewards, else alike."""
    pasts = history.of(prompt.id)
    if not pasts:
        return suffixes.build([], prompt.tokens)
    last = pasts[0]
    weights = suffixes.priorities(last.rewards, last.scored) if by_reward else None
    return suffixes.build(last.answers, prompt.tokens, weights)


class Shelf:
    """Places in a flat array of `size`: a key's place is shared and counted, and free again when its last holder leaves.
    The lowest gap that is large enough is taken."""

    def __init__(self, size: int):
        self.size = size
        self._places: dict[object, list[int]] = {}  # key -> offset, length, holders; by offset

    def hold(self, key: object, length: int) -> tuple[int, bool] | None:
        """Where the key lies and whether it is new there, so that its array must be written; None where no gap is large
        enough, and nothing changed. A key that is here keeps its place and its length."""
        if key in self._places:
            self._places[key][2] += 1
            return self._places[key][0], False
        end = 0
        for offset, taken, _ in self._places.values():
            if offset - end >= length:
                break
            end = max(end, offset + taken)
        if self.size - end < length:
            return None
        self._places[key] = [end, length, 1]
        self._places = dict(sorted(self._places.items(), key=lambda item: item[1][0]))
        return end, True

    def leave(self, key: object) -> None:
        """One holder less."""
        self._places[key][2] -= 1
        if not self._places[key][2]:
            del self._places[key]
