"""Hashed n-gram tables with back-off: what followed the last 6 to 1 tokens, one uint32 for a context.

An entry is fingerprint (12 bits, never 0) | confidence (2 bits) | token (18 bits); 0 is empty. A context of `order` tokens has
a 32-bit key, hash(salt, order, tokens): its bucket is offset + key % size, and the fingerprint tells it from others there.
The hash is 32-bit arithmetic over numpy or jax.numpy (`xp`), so that host and device agree on every bit.

Invariant: a table is a function of the answers it was built from and their order. It answers with the right token, with
another context's (once in 4096 look-ups of an occupied bucket) or not at all: as a source of drafts it may be wrong, never
harmful. Refuses a vocabulary above 2^18.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = Any

ORDERS = 6
LEVELS = 4  # of confidence
MOST_TOKENS = 1 << 18
ENTRIES_PER_TOKEN = 3  # 12 bytes
LIVE, OWN, ALL = 0x243F6A88, 0x85A308D3, 0x13198A2E  # salts of the three kinds of tables
_SHARES = (0, 1, 3, 6, 9, 12, 16)  # sixteenths of a split table that lie before order 1, 2, ..


def check_vocab(size: int) -> int:
    """The size itself; ValueError where a token would not fit an entry."""
    if not 0 < size <= MOST_TOKENS:
        raise ValueError(f"drafting from n-grams: vocabulary of {size} ids, at most {MOST_TOKENS}; use the drafter histospec "
                         f"or off")
    return size


def hashes(xp, newest: Sequence[Array]) -> list[Array]:
    """Hashes of the last 1, 2, .. tokens: uint32, shaped like each of `newest` (uint32 tokens, the latest first)."""
    out, state = [], xp.uint32(0x9E3779B9)
    for order, token in enumerate(newest, 1):
        state = _stir(xp, state ^ ((token << xp.uint32(3)) | xp.uint32(order)))
        out.append(state)
    return out


def key(xp, hashed: Array, salt: int) -> Array:
    """uint32: the key of contexts in the tables of a salt."""
    return _stir(xp, hashed ^ xp.uint32(salt))


def _stir(xp, x: Array) -> Array:
    """The finaliser of MurmurHash3, with the constants of C. Wellons' search (bias 0.17)."""
    x = (x ^ (x >> xp.uint32(16))) * xp.uint32(0x7FEB352D)
    x = (x ^ (x >> xp.uint32(15))) * xp.uint32(0x846CA68B)
    return x ^ (x >> xp.uint32(16))


def fingerprint(xp, keys: Array) -> Array:
    """uint32 in 1 .. 4095, from other bits than the bucket's."""
    return xp.maximum((keys * xp.uint32(0x9E3779B1)) >> xp.uint32(20), xp.uint32(1))


def bucket(xp, keys: Array, offset: Array, size: Array) -> Array:
    """uint32: where the key's entry lies; a table of size 0 has none, and `offset` comes back."""
    return offset + keys % xp.maximum(size, xp.uint32(1))


def split(xp, offset: Array, size: Array) -> tuple[Array, Array]:
    """Offsets and sizes uint32[..., ORDERS] of a table whose orders lie apart, so that rare long contexts, however many,
    cannot push out the short ones. `offset` and `size` are uint32[...]."""
    ends = [size // xp.uint32(16) * xp.uint32(part) for part in _SHARES]
    offsets = xp.stack([offset + end for end in ends[:-1]], axis=-1)
    return offsets, xp.stack([b - a for a, b in zip(ends, ends[1:])], axis=-1)


def pack(xp, fingerprints: Array, confidence: Array, tokens: Array) -> Array:
    """Entries, uint32, from uint32 parts."""
    return (fingerprints << xp.uint32(20)) | (confidence << xp.uint32(18)) | tokens


def unpack(xp, entries: Array) -> tuple[Array, Array, Array]:
    """Fingerprint (0: empty), confidence and token of entries."""
    return entries >> xp.uint32(20), (entries >> xp.uint32(18)) & xp.uint32(3), entries & xp.uint32(MOST_TOKENS - 1)


class Counted(NamedTuple):
    """The contexts of one order, by ascending key: the most frequent token after each (the lowest id of several), its
    confidence, how often the context was seen, and the key of the context one token shorter. uint32[n], `seen` int64[n]."""

    key: np.ndarray
    parent: np.ndarray
    token: np.ndarray
    confidence: np.ndarray
    seen: np.ndarray


def count(answers: Sequence[np.ndarray], context: np.ndarray, salt: int) -> list[Counted]:
    """The contexts of order 1 to 6 in `answers`, each read after the last tokens of `context`; none spans two answers."""
    context = np.asarray(context, np.int64)[-ORDERS:]
    sizes = np.array([len(answer) for answer in answers], np.int64)
    flat = np.concatenate([np.zeros(0, np.int64), *(part for answer in answers for part in (context, answer))])
    if flat.size and not 0 <= flat.min() <= flat.max() < MOST_TOKENS:
        raise ValueError(f"n-gram table: token {flat.min() if flat.min() < 0 else flat.max()}, ids go from 0 to "
                         f"{MOST_TOKENS - 1}")
    flat = flat.astype(np.uint32)
    before = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes) + context.size  # in the same text
    at = np.arange(sizes.sum()) + np.repeat(np.arange(1, sizes.size + 1), sizes) * context.size
    newest = [flat[np.maximum(at - back, 0)] for back in range(1, ORDERS + 1)]
    keys = [key(np, hashed, salt) for hashed in hashes(np, newest)]
    out = []
    for order in range(1, ORDERS + 1):
        real = before >= order
        out.append(_most_frequent(keys[order - 1][real], keys[max(order - 2, 0)][real], flat[at][real]))
    return out


def _most_frequent(keys: np.ndarray, parents: np.ndarray, tokens: np.ndarray) -> Counted:
    """One line a key, from one line an occurrence."""
    both = (keys.astype(np.uint64) << np.uint64(18)) | tokens
    order = np.argsort(both, kind="stable")
    pair, times = _runs(both[order])
    key_of_pair = (both[order][pair] >> np.uint64(18)).astype(np.uint32)
    first, pairs = _runs(key_of_pair)
    seen, most = (op.reduceat(times, first) if first.size else times for op in (np.add, np.maximum))
    best = np.flatnonzero(times == np.repeat(most, pairs))  # the first of a key has its lowest token
    best = best[_runs(key_of_pair[best])[0]]
    where = order[pair[best]]
    return Counted(keys[where], parents[where], tokens[where], _confidence(most, seen), seen)


def _runs(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and length of each run of equal values."""
    start = np.flatnonzero(np.concatenate([np.ones(min(x.size, 1), bool), x[1:] != x[:-1]]))
    return start, np.diff(start, append=x.size)


def _confidence(times: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """uint32 0 to 3: times / (seen + 1) below 2/5, below 3/5, below 4/5, above. The 1 keeps one sighting from being sure."""
    return sum((5 * times >= part * (seen + 1)).astype(np.uint32) for part in (2, 3, 4))


def _newest(epochs: Sequence[Counted]) -> Counted:
    """Oldest first in; of a key seen in several epochs the newest line stays."""
    joined = Counted(*(np.concatenate(columns) for columns in zip(*reversed(epochs))))
    where = np.unique(joined.key, return_index=True)[1]
    return Counted(*(column[where] for column in joined))


def _needed(counted: Counted, shorter: Counted) -> np.ndarray:
    """bool[n]: False where the shorter context says the same at least as surely, so that backing off to it is enough."""
    at = np.searchsorted(shorter.key, counted.parent)
    return (counted.token != shorter.token[at]) | (counted.confidence > shorter.confidence[at])


def build(epochs: Sequence[Sequence[np.ndarray]], context: np.ndarray, size: int | None = None, salt: int = OWN
          ) -> np.ndarray:
    """uint32[size], the table of a prompt: `epochs`, oldest first, hold the answers int32[T] of each; `context` is the end
    of the prompt (at least its last 6 tokens, where it has so many).

    A context takes the most frequent token of the newest epoch that has it; one that its shorter context answers for is
    left out. Of several contexts in one bucket the shortest wins, then the most frequent. `size` None: 3 entries a token."""
    size = room(sum(len(answer) for answers in epochs for answer in answers)) if size is None else size
    table = np.zeros(size, np.uint32)
    if not size or not epochs:
        return table
    orders = [_newest(lines) for lines in zip(*(count(answers, context, salt) for answers in epochs))]
    kept = [orders[0]] + [Counted(*(column[_needed(long, short)] for column in long))
                          for short, long in zip(orders, orders[1:])]
    every = Counted(*(np.concatenate(columns) for columns in zip(*kept)))
    order = np.repeat(np.arange(1, ORDERS + 1), [lines.key.size for lines in kept])
    rank = (ORDERS - order).astype(np.uint64) << np.uint64(58) | every.key
    rank |= np.minimum(every.seen, (1 << 26) - 1).astype(np.uint64) << np.uint64(32)
    best_last = np.argsort(rank)
    where = bucket(np, every.key, np.uint32(0), np.uint32(size))
    entries = pack(np, fingerprint(np, every.key), every.confidence, every.token)
    table[where[best_last]] = entries[best_last]  # of equal places numpy keeps the last
    return table


def room(tokens: int) -> int:
    """Entries of a table over so many tokens of answers."""
    return ENTRIES_PER_TOKEN * tokens


class Corpus:
    """One table over the answers to all prompts: `entries` uint32[size], its orders apart (see `split`).

    A group votes once on each context it has seen: its most frequent token strengthens an entry that says the same and
    weakens what else is in the bucket, until the bucket is free for it. So what is repeated stays, what no group repeats
    goes, and the table never grows. It is a function of the groups added and their order, and `state_dict` is all of it."""

    def __init__(self, size: int):
        if size < 16:
            raise ValueError(f"table over all prompts: {size} entries, at least 16")
        self.entries = np.zeros(size, np.uint32)
        self._offsets, self._sizes = split(np, np.uint32(0), np.uint32(size))

    def add(self, answers: Sequence[np.ndarray], context: np.ndarray) -> None:
        """Takes the answers of a group; `context` as in `build`."""
        shorter, told = None, None
        for order, counted in enumerate(count(answers, context, ALL)):
            above = None if shorter is None else np.searchsorted(shorter, counted.parent)
            told = self._vote(order, counted, None if above is None else told[:, above])
            shorter = counted.key

    def _vote(self, order: int, counted: Counted, shorter: np.ndarray | None) -> np.ndarray:
        """uint32[2, n], token (2^18: none) and confidence that a look-up of each context now gives, itself or by backing
        off to `shorter`, which is the same for the contexts one token shorter."""
        where = bucket(np, counted.key, self._offsets[order], self._sizes[order])
        mark, old = fingerprint(np, counted.key), self.entries[where]
        owner, sure, token = unpack(np, old)
        agree = (owner == mark) & (token == counted.token)
        weaken = ~agree & (sure > 0)
        fresh = pack(np, mark, np.minimum(counted.confidence, 1), counted.token)
        new = np.where(agree, pack(np, mark, np.minimum(sure + 1, LEVELS - 1), token),
                       np.where(weaken, old - np.uint32(1 << 18), fresh))
        votes = owner == mark
        if shorter is not None:
            votes |= (shorter[0] != counted.token) | (shorter[1] < np.minimum(counted.confidence, 1))
        best_last = np.flatnonzero(votes)[np.argsort(counted.seen[votes], kind="stable")]
        self.entries[where[best_last]] = new[best_last]
        owner, sure, token = unpack(np, self.entries[where])
        none = np.array([[MOST_TOKENS], [0]], np.uint32)
        return np.where(owner == mark, np.stack([token, sure]), none if shorter is None else shorter)

    def state_dict(self) -> dict:
        return {"entries": self.entries.copy()}

    def load_state_dict(self, state: Mapping) -> None:
        """ValueError where the saved table has another size."""
        if state["entries"].shape != self.entries.shape:
            raise ValueError(f"table over all prompts: the saved one has {state['entries'].size} entries, this one "
                             f"{self.entries.size}; set the size it was saved with")
        self.entries = np.array(state["entries"], np.uint32)
