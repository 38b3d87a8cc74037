"""A vector of ids for each token of a rollout: how the engine's choices beside the token itself are kept.

Invariant: a value is frozen and its arrays are read-only numpy. The vectors lie one after another, so that a token whose
vector is short, or empty, takes no more bytes than it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """T vectors of ids, one for each token.

    - `ids` int32[N]: of all tokens, one after another.
    - `ends` int64[T]: where the vector of each token ends in `ids`.

    Raises:
      ValueError: `ends` falls, or does not end where `ids` does.
    """

    ids: np.ndarray
    ends: np.ndarray

    def __post_init__(self):
        for name, kind in (("ids", np.int32), ("ends", np.int64)):
            array = np.asarray(getattr(self, name), kind)
            if array.flags.writeable:
                array = array.copy()
                array.setflags(write=False)
            object.__setattr__(self, name, array)
        last = int(self.ends[-1]) if self.ends.size else 0
        if last != self.ids.size or np.any(np.diff(self.ends, prepend=0) < 0):
            raise ValueError(f"ends of vectors must rise from 0 to the {self.ids.size} ids, got {self.ends.tolist()}")

    @classmethod
    def empty(cls, tokens: int) -> Ragged:
        """Returns an empty vector for each token."""
        return cls(np.zeros(0, np.int32), np.zeros(tokens, np.int64))

    @classmethod
    def of_rows(cls, rows: Int[np.ndarray, "T K"], words: int = 0) -> Ragged:
        """Returns the ids of each row that are not negative, in their order.

        Args:
          words: the last columns, whose values may be negative. A row has all of them, or none where all are -1.
        """
        there = rows >= 0
        if words:
            there[:, -words:] = (rows[:, -words:] != -1).any(axis=1, keepdims=True)
        return cls(rows[there], np.cumsum(there.sum(axis=-1)))

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """Returns the vectors of all parts, one part after another."""
        parts = [part for part in parts if part.size] or [cls.empty(0)]
        if len(parts) == 1:
            return parts[0]
        begins = np.cumsum([0, *(part.ids.size for part in parts[:-1])])
        ends = [part.ends + begin for part, begin in zip(parts, begins, strict=True)]
        return cls(np.concatenate([part.ids for part in parts]), np.concatenate(ends))

    @property
    def size(self) -> int:
        """Returns the number of tokens."""
        return self.ends.size

    @property
    def counts(self) -> Int[np.ndarray, " T"]:
        """Returns the number of ids of each token."""
        return np.diff(self.ends, prepend=0)

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.ends.nbytes

    def __getitem__(self, tokens: slice) -> Ragged:
        """Returns the vectors of a slice of tokens without a step."""
        begin, end, step = tokens.indices(self.size)
        assert step == 1, tokens
        first, last = (int(self.ends[i - 1]) if i > 0 else 0 for i in (begin, max(begin, end)))
        return Ragged(self.ids[first:last], self.ends[begin : max(begin, end)] - first)

    def apart(self) -> Ragged:
        """Returns the same vectors in memory of their own, so that those around a slice may be freed."""
        return Ragged(self.ids.copy(), self.ends.copy())

    def split(self, words: int) -> tuple[Ragged, Int[np.ndarray, "T words"]]:
        """Returns each vector without its last `words` ids, and these as rows. A row of an empty vector is -1."""
        counts = self.counts
        there = np.repeat(counts[:, None] > 0, words, axis=1)
        last = np.full((self.size, words), -1, np.int32)
        tails = (self.ends[:, None] - words + np.arange(words))[counts > 0]
        last[there] = self.ids[tails].reshape(-1)
        first = np.ones(self.ids.size, bool)
        first[tails.reshape(-1)] = False
        return Ragged(self.ids[first], np.cumsum(np.maximum(counts - words, 0))), last

    def rows(self, width: int) -> Int[np.ndarray, "T width"]:
        """Returns the vectors as rows of `width` ids, -1 behind the last one.

        Raises:
          ValueError: a vector is longer.
        """
        counts = self.counts
        if counts.max(initial=0) > width:
            raise ValueError(f"a token has {counts.max()} ids, more than {width}")
        out = np.full((self.size, width), -1, np.int32)
        out[np.arange(width) < counts[:, None]] = self.ids
        return out

    def different(self, other: Ragged) -> int:
        """Returns at how many tokens the vectors differ, or the difference of the numbers of tokens."""
        if self.size != other.size:
            return abs(self.size - other.size)
        width = int(max(self.counts.max(initial=0), other.counts.max(initial=0)))
        return int((self.rows(width) != other.rows(width)).any(axis=1).sum())

    def state(self, name: str) -> dict[str, np.ndarray]:
        """Returns the arrays of a saved state by `name`, or none where no token has ids."""
        return {f"{name}_ids": self.ids, f"{name}_ends": self.ends} if self.ids.size else {}

    @classmethod
    def restored(cls, state: Mapping[str, Any], name: str) -> Ragged | None:
        """Returns what a saved state holds by `name`, or None where it has no such arrays."""
        return cls(state[f"{name}_ids"], state[f"{name}_ends"]) if f"{name}_ids" in state else None

    def tobytes(self) -> bytes:
        """Returns bytes that are equal where all vectors are."""
        return self.ends.tobytes() + self.ids.tobytes()
