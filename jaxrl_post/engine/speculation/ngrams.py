"""Hashed n-gram tables with back-off: the token that followed the last 6 to 1 tokens, in one uint32 for each context.

An entry is fingerprint (12 bits, never 0) | confidence (2 bits) | token (18 bits); 0 is empty. A context of `order`
tokens has a 32-bit key, hash(salt, order, tokens). Its bucket is offset + key % size, and the fingerprint separates it
from other contexts in the bucket. The hash is 32-bit arithmetic over numpy or jax.numpy (`xp`), so that host and device
agree on every bit.

Invariant: a table is a function of the rollouts it was built from and their order. A look-up finds the right token,
another context's token (once in 4096 look-ups of an occupied bucket), or nothing. As a source of drafts it may be
wrong, never harmful. It refuses a vocabulary above 2^18.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = Any

ORDERS = 6
LEVELS = 4  # of confidence
MOST_TOKENS = 1 << 18
ENTRIES_PER_TOKEN = 3  # 12 bytes
LIVE, OWN, ALL = 0x243F6A88, 0x85A308D3, 0x13198A2E  # salts of the three kinds of tables


class Texts(NamedTuple):
    """Rollouts of one prompt.

    - `end`: the end of the prompt, at least its last 6 tokens where it has as many.
    - `rollouts`: tokens of the rollouts, int32[T] each.
    - `argmax_tokens`: the continuation to learn at each token of `rollouts`, in the same shapes. None: the tokens
      themselves. At temperature 1 the likeliest token teaches more than the sampled one.
    """

    end: np.ndarray
    rollouts: Sequence[np.ndarray]
    argmax_tokens: Sequence[np.ndarray] | None = None

    @property
    def size(self) -> int:
        return sum(map(len, self.rollouts))


def check_vocab(size: int) -> int:
    """Returns the size of a vocabulary.

    Raises:
      ValueError: a token would not fit an entry.
    """
    if not 0 < size <= MOST_TOKENS:
        raise ValueError(
            f"drafting from n-grams: vocabulary of {size} ids, at most {MOST_TOKENS}; use the drafter histospec or off"
        )
    return size


def hashes(xp, newest: Sequence[Array]) -> list[Array]:
    """Returns hashes of the last 1, 2, .. tokens: uint32, each shaped like `newest`.

    `newest`: uint32 tokens, the latest first."""
    out, state = [], xp.uint32(0x9E3779B9)
    for order, token in enumerate(newest, 1):
        state = _stir(xp, state ^ ((token << xp.uint32(3)) | xp.uint32(order)))
        out.append(state)
    return out


def key(xp, hashed: Array, salt: int) -> Array:
    """Returns uint32: the keys of contexts in the tables of a salt."""
    return _stir(xp, hashed ^ xp.uint32(salt))


def _stir(xp, x: Array) -> Array:
    """Mixes the bits of x: the finaliser of MurmurHash3 with constants found by C. Wellons (bias 0.17)."""
    x = (x ^ (x >> xp.uint32(16))) * xp.uint32(0x7FEB352D)
    x = (x ^ (x >> xp.uint32(15))) * xp.uint32(0x846CA68B)
    return x ^ (x >> xp.uint32(16))


def fingerprint(xp, keys: Array) -> Array:
    """Returns uint32 in 1 .. 4095, from other bits than the bucket's."""
    return xp.maximum((keys * xp.uint32(0x9E3779B1)) >> xp.uint32(20), xp.uint32(1))


def bucket(xp, keys: Array, offset: Array, size: Array) -> Array:
    """Returns uint32: the place of each key's entry. For a table of size 0 it returns `offset`."""
    return offset + keys % xp.maximum(size, xp.uint32(1))


def pack(xp, fingerprints: Array, confidence: Array, tokens: Array) -> Array:
    return (fingerprints << xp.uint32(20)) | (confidence << xp.uint32(18)) | tokens


def unpack(xp, entries: Array) -> tuple[Array, Array, Array]:
    """Returns fingerprint (0: empty), confidence and token of entries."""
    return entries >> xp.uint32(20), (entries >> xp.uint32(18)) & xp.uint32(3), entries & xp.uint32(MOST_TOKENS - 1)


class Counted(NamedTuple):
    """The contexts of one order, by ascending key: uint32[n] each, `seen` int64[n]."""

    key: np.ndarray  # of the context
    parent: np.ndarray  # key of the context one token shorter
    token: np.ndarray  # the most frequent token after the context; with a tie, the lowest id
    confidence: np.ndarray  # of that token
    seen: np.ndarray  # occurrences of the context


def count(groups: Sequence[Texts], salt: int) -> list[Counted]:
    """Returns the contexts of order 1 to 6 in the rollouts of several prompts, counted together.

    Each rollout is read behind the end of its prompt. No context spans two rollouts."""
    pairs = [(np.asarray(group.end)[-ORDERS:], answer) for group in groups for answer in group.rollouts]
    flat = _tokens([part for pair in pairs for part in pair])
    learned = _tokens([text for group in groups for text in group.argmax_tokens or group.rollouts])
    ends, sizes = (np.array([len(pair[i]) for pair in pairs], np.int64) for i in (0, 1))
    index = np.arange(sizes.sum())
    at = index + np.repeat(np.cumsum(ends), sizes)
    before = index - np.repeat(np.cumsum(sizes) - sizes - ends, sizes)  # tokens before it in its text
    newest = [flat[np.maximum(at - back, 0)] for back in range(1, ORDERS + 1)]
    keys = [key(np, hashed, salt) for hashed in hashes(np, newest)]
    out = []
    for order in range(1, ORDERS + 1):
        real = before >= order
        out.append(_most_frequent(keys[order - 1][real], keys[max(order - 2, 0)][real], learned[real]))
    return out


def _tokens(texts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns texts end to end, uint32[sum of T]."""
    flat = np.concatenate([np.zeros(0, np.int64), *texts])
    if flat.size and not 0 <= flat.min() <= flat.max() < MOST_TOKENS:
        raise ValueError(
            f"n-gram table: token {int(flat.min() if flat.min() < 0 else flat.max())}, ids go from 0 to "
            f"{MOST_TOKENS - 1}"
        )
    return flat.astype(np.uint32)


def _most_frequent(keys: np.ndarray, parents: np.ndarray, tokens: np.ndarray) -> Counted:
    """Returns one line for each key, from one line for each occurrence."""
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
    """Returns start and length of each run of equal values."""
    start = np.flatnonzero(np.concatenate([np.ones(min(x.size, 1), bool), x[1:] != x[:-1]]))
    return start, np.diff(start, append=x.size)


def _confidence(times: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Returns uint32 by times / (seen + 1): 0 below 2/5, 1 below 3/5, 2 below 4/5, else 3.

    The 1 keeps a single sighting from being sure.
    """
    return sum((5 * times >= part * (seen + 1)).astype(np.uint32) for part in (2, 3, 4))


def _newest(epochs: Sequence[Counted]) -> Counted:
    """Returns, for each key, the line of the newest epoch that has it. `epochs`: oldest first."""
    joined = Counted(*(np.concatenate(columns) for columns in zip(*reversed(epochs))))
    where = np.unique(joined.key, return_index=True)[1]
    return Counted(*(column[where] for column in joined))


def _needed(counted: Counted, shorter: Counted) -> np.ndarray:
    """Returns bool[n]: False where the shorter context has the same token with at least the same confidence, so
    back-off suffices."""
    at = np.searchsorted(shorter.key, counted.parent)
    return (counted.token != shorter.token[at]) | (counted.confidence > shorter.confidence[at])


def build(epochs: Sequence[Texts], size: int | None = None) -> np.ndarray:
    """Returns uint32[size]: the table of one prompt over its epochs, oldest first.

    A context gets the most frequent token of the newest epoch that has it. `size` None: 3 entries a token."""
    size = room(sum(texts.size for texts in epochs)) if size is None else size
    return _table([_newest(lines) for lines in zip(*(count([texts], OWN) for texts in epochs))], size)


def build_all(groups: Sequence[Texts], size: int) -> np.ndarray:
    """Returns uint32[size]: the table of all prompts. A context gets its most frequent token."""
    return _table(count(groups, ALL), size)


def room(tokens: int) -> int:
    return ENTRIES_PER_TOKEN * tokens


def _table(orders: Sequence[Counted], size: int) -> np.ndarray:
    """Returns a table without the contexts that back-off replaces. In a bucket the shortest context wins, then the most
    frequent."""
    table = np.zeros(size, np.uint32)
    if not size or not orders:
        return table
    kept = [orders[0]] + [
        Counted(*(column[_needed(long, short)] for column in long)) for short, long in itertools.pairwise(orders)
    ]
    every = Counted(*(np.concatenate(columns) for columns in zip(*kept)))
    order = np.repeat(np.arange(1, ORDERS + 1), [lines.key.size for lines in kept])
    rank = (ORDERS - order).astype(np.uint64) << np.uint64(58) | every.key
    rank |= np.minimum(every.seen, (1 << 26) - 1).astype(np.uint64) << np.uint64(32)
    best_last = np.argsort(rank)
    where = bucket(np, every.key, np.uint32(0), np.uint32(size))
    entries = pack(np, fingerprint(np, every.key), every.confidence, every.token)
    table[where[best_last]] = entries[best_last]  # of equal places numpy keeps the last
    return table
