"""Answers without a model: which tokens a rollout has under which weights, known by their lengths and their differences.

An answer is a pure function of (seed, version), and a token is a small integer that names the version by which its piece
of text was drawn. From version v to v + 1 every token is another one with probability `tv` (the total variation of the
weights' step): the first such position is geometric, and behind it the answer is drawn anew, of the law given that it is
longer than that position. So the law of the length is the same under every version, exactly, and of two answers to one
request the first difference of their tokens is the first difference of the texts; behind it equal tokens mean nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_post.sim.laws import Law
from jaxrl_post.types import Prompt, RolloutId

Spans = tuple[tuple[int, int], ...]  # (position, version): from that position on tokens are sampled by that version


class Answer(NamedTuple):
    """`length` tokens: from each of `starts` on they are the integer in `names`."""

    length: int
    starts: tuple[int, ...]
    names: tuple[int, ...]

    def tokens(self, count: int) -> np.ndarray:
        """int32[count], the first ones."""
        return pieces(self.starts, self.names, count)


def pieces(starts: Sequence[int], values: Sequence[int], count: int) -> np.ndarray:
    """int32[count]: from each start on its value."""
    if len(starts) == 1:
        return np.full(count, values[0], np.int32)
    return np.repeat(np.array(values, np.int32), np.diff([*(min(start, count) for start in starts), count]))


class Answers:
    """`law` of a prompt gives its lengths, `cap` the most tokens of an answer.

    Raises:
      ValueError: `tv` is no probability.
    """

    def __init__(self, law: Callable[[Prompt], Law], *, cap: int, tv: float = 0.0):
        if not 0 <= tv < 1:
            raise ValueError(f"tv={tv}: the chance that a version changes a token must be at least 0 and below 1")
        self._law, self.cap, self._tv = law, cap, tv
        self._log_same = math.log1p(-tv)

    @property
    def frozen(self) -> bool:
        """Every version gives the same answers."""
        return self._tv == 0

    def length(self, rollout_id: RolloutId, prompt: Prompt, version: int) -> int:
        """Tokens of the answer that these weights give."""
        return self.path(rollout_id, prompt, ((0, version),)).length

    def path(self, rollout_id: RolloutId, prompt: Prompt, spans: Spans) -> Answer:
        """The answer whose tokens are sampled by the versions of `spans`, what is written being kept each time: of one
        span at position 0 it is what that version gives."""
        law, key = self._law(prompt), int.from_bytes(rollout_id.seed().tobytes(), "little")
        answer = self._drawn(law, key, 0, 0, Answer(0, (), ()))
        if not self.frozen:
            version = 0
            for kept, until in spans:
                while version < until:
                    version += 1
                    answer = self._changed(law, key, version, kept, answer)
        return answer

    def _changed(self, law: Law, key: int, version: int, kept: int, answer: Answer) -> Answer:
        """One version on: the same up to the first difference at or behind `kept`."""
        first = self._gap(noise(key, version, 0))
        if first < kept:
            first = kept + self._gap(noise(key, version, kept))
        return self._drawn(law, key, version, first, answer) if first < answer.length else answer

    def _gap(self, uniform: float) -> int:
        return int(math.log(uniform) / self._log_same)

    def _drawn(self, law: Law, key: int, version: int, first: int, before: Answer) -> Answer:
        length = math.ceil(law.draw(noise(key, version, -1), noise(key, version, -2), float(first)))
        kept = sum(start < first for start in before.starts)
        return Answer(
            min(max(length, first + 1), self.cap), (*before.starts[:kept], first), (*before.names[:kept], version)
        )


def agreement(tokens: np.ndarray, answer: Answer) -> int:
    """Tokens at the front that both have."""
    count = min(tokens.size, answer.length)
    different = tokens[:count] != answer.tokens(count)
    return int(different.argmax()) if different.any() else count


def spans_of(versions: np.ndarray) -> Spans:
    """Where the version changes, and to which: of int32[T]."""
    if versions.size == 0:
        return ()
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()]
    return tuple((start, int(versions[start])) for start in starts)


_WORD, _ODD = (1 << 64) - 1, 0x9E3779B97F4A7C15


def noise(key: int, version: int, place: int) -> float:
    """A number in (0, 1) that depends on nothing else: three rounds of splitmix64."""
    state = key
    for word in (version, place, 0):
        state = (state + (2 * word + 1) * _ODD) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return ((state >> 11) + 0.5) / (1 << 53)
