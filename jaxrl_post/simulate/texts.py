"""Simulated rollouts: which tokens a rollout has under which weights, without a model.

The text of a rollout is a pure function of (seed, version). Each token is a small integer: the version that drew its
part of the text. From version v to v + 1 each token changes with probability `tv`, the total variation between the two
policies. So the position of the first change is geometric. From this position on the text is drawn again. Its length
then follows the distribution of lengths above this position. Two facts follow:

- The length has exactly the same distribution under every version.
- Two texts of one request agree up to the first position where their tokens differ. Equal tokens after that position
  mean nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_post.ring.types import Prompt, RolloutId
from jaxrl_post.simulate.length_distributions import LengthDistribution

Spans = tuple[tuple[int, int], ...]  # (position, version): this version samples the tokens from this position on


class SimText(NamedTuple):
    """A rollout's text of `length` tokens. Part i begins at position `starts[i]`, and its tokens equal `names[i]`."""

    length: int
    starts: tuple[int, ...]
    names: tuple[int, ...]

    def tokens(self, count: int) -> np.ndarray:
        """Returns the first `count` tokens, int32[count]."""
        return pieces(self.starts, self.names, count)


def pieces(starts: Sequence[int], values: Sequence[int], count: int) -> np.ndarray:
    """Returns int32[count], in which each value is repeated from its start to the next start."""
    if len(starts) == 1:
        return np.full(count, values[0], np.int32)
    return np.repeat(np.array(values, np.int32), np.diff([*(min(start, count) for start in starts), count]))


class SimTexts:
    """Draws the texts of rollouts.

    Args:
      distribution: maps a prompt to the distribution of its rollouts' lengths.
      cap: the largest length, in tokens.
      tv: probability that a new version changes a token.

    Raises:
      ValueError: `tv` is not in [0, 1).
    """

    def __init__(self, distribution: Callable[[Prompt], LengthDistribution], *, cap: int, tv: float = 0.0):
        if not 0 <= tv < 1:
            raise ValueError(f"tv={tv}: the chance that a version changes a token must be at least 0 and below 1")
        self._distribution, self.cap, self._tv = distribution, cap, tv
        self._log_same = math.log1p(-tv)

    @property
    def frozen(self) -> bool:
        """Returns whether all versions give the same texts."""
        return self._tv == 0

    def length(self, rollout_id: RolloutId, prompt: Prompt, version: int) -> int:
        """Returns the number of tokens of the text that the weights of `version` give."""
        return self.path(rollout_id, prompt, ((0, version),)).length

    def path(self, rollout_id: RolloutId, prompt: Prompt, spans: Spans) -> SimText:
        """Returns the text whose tokens are sampled by the versions in `spans`.

        A change of version keeps all tokens that are already written. One span at position 0 gives the text of its
        version.
        """
        distribution, key = self._distribution(prompt), int.from_bytes(rollout_id.seed().tobytes(), "little")
        text = self._drawn(distribution, key, 0, 0, SimText(0, (), ()))
        if not self.frozen:
            version = 0
            for kept, until in spans:
                while version < until:
                    version += 1
                    text = self._changed(distribution, key, version, kept, text)
        return text

    def _changed(self, distribution: LengthDistribution, key: int, version: int, kept: int, text: SimText) -> SimText:
        """Returns the text of the next version, which first differs at or beyond `kept`."""
        first = self._gap(noise(key, version, 0))
        if first < kept:
            first = kept + self._gap(noise(key, version, kept))
        return self._drawn(distribution, key, version, first, text) if first < text.length else text

    def _gap(self, uniform: float) -> int:
        return int(math.log(uniform) / self._log_same)

    def _drawn(self, distribution: LengthDistribution, key: int, version: int, first: int, before: SimText) -> SimText:
        length = math.ceil(distribution.draw(noise(key, version, -1), noise(key, version, -2), float(first)))
        kept = sum(start < first for start in before.starts)
        return SimText(
            min(max(length, first + 1), self.cap), (*before.starts[:kept], first), (*before.names[:kept], version)
        )


def agreement(tokens: np.ndarray, text: SimText) -> int:
    """Returns the length of the common prefix of `tokens` and the text."""
    count = min(tokens.size, text.length)
    different = tokens[:count] != text.tokens(count)
    return int(different.argmax()) if different.any() else count


def spans_of(versions: np.ndarray) -> Spans:
    """Returns the spans of a rollout from the version of each token, int32[T]."""
    if versions.size == 0:
        return ()
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()]
    return tuple((start, int(versions[start])) for start in starts)


_WORD, _ODD = (1 << 64) - 1, 0x9E3779B97F4A7C15


def noise(key: int, version: int, place: int) -> float:
    """Returns a number in (0, 1) that depends only on the arguments: three rounds of splitmix64."""
    state = key
    for word in (version, place, 0):
        state = (state + (2 * word + 1) * _ODD) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return ((state >> 11) + 0.5) / (1 << 53)
