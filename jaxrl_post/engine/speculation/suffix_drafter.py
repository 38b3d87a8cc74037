"""The drafter of RhymeRL (arXiv 2508.18588, HistoSpec) on the device: the suffix array of the prompt's last epoch.

The drafter searches for the last 7 tokens, then for the last 6, and so on down to 3. The longest match with a
continuation gives the draft. The matching suffixes form an interval of the array. The draft is read from the suffix in
the interval's weighted middle.

The window (the longest draft) starts at 2. It grows by 2, up to 32, when a draft of a whole window was accepted. It
falls back to 2 at a rejection. An accepted draft that was shorter, or got fewer rows, does not change the window.

The priorities of the arrays (`suffix_array`) decide which branch has the middle: the most frequent one, or the one of
the highest rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_post.engine.host.wire import OFFSET, SIZE, Entry
from jaxrl_post.engine.speculation import corpus, suffix_array
from jaxrl_post.engine.speculation.interface import Context, Drafter, Drafts, Step, nth_distinct, tally
from jaxrl_post.ring.history import Past
from jaxrl_post.ring.types import Prompt

LONGEST, SHORTEST = suffix_array.TAIL, 3
LENGTHS = tuple(range(LONGEST, SHORTEST - 1, -1))
FIRST_WINDOW, STEP = 2, 2


class Tables(NamedTuple):
    """The suffix arrays of prompts end to end, [N] each; `order` counts from the start of its array. rates f32[C]."""

    pool: Array
    order: Array
    priority: Array
    rates: Array


class Memory(NamedTuple):
    """`window` int32[S]; `counts` int32[2, C]."""

    window: Array
    counts: Array


@dataclass(frozen=True, kw_only=True)
class Histospec(Drafter):
    """A Drafter on suffix arrays.

    Column and class k of 5 stand for a match of 7 - k tokens. 5 more classes count only chosen drafts.

    - `entries`: pool tokens of all prompts.
    - `width`: largest window.
    - `reward_aware`: of several branches, the one of the highest rewards is chosen. Otherwise the most frequent one.
    """

    reward_aware: bool = False

    def __post_init__(self):
        if self.width < FIRST_WINDOW or self.entries < 1:
            raise ValueError(
                f"drafter histospec: width {self.width}, at least {FIRST_WINDOW}, and {self.entries} entries, at "
                f"least 1"
            )

    @property
    def priors(self) -> Float[np.ndarray, " C"]:
        """Returns rates that are higher for a longer match."""
        return np.array([0.4 + 0.05 * length for length in 2 * LENGTHS], np.float32)

    def empty(self, slots: int) -> tuple[Tables, Memory]:
        none = jnp.zeros(self.entries, jnp.int32)
        tables = Tables(none + suffix_array.SEPARATOR, none, none, jnp.asarray(self.priors))
        return tables, Memory(jnp.full(slots, FIRST_WINDOW, jnp.int32), jnp.zeros((2, self.classes), jnp.int32))

    def enter(self, memory: Memory, entry: Entry) -> Memory:
        return memory._replace(window=memory.window.at[entry.slot].set(FIRST_WINDOW, mode="drop"))

    def index(self, past: Sequence[Past], prompt: Prompt) -> tuple[np.ndarray, ...]:
        return tuple(corpus.sorted_suffixes(past, prompt, by_reward=self.reward_aware))

    def propose(self, tables: Tables, memory: Memory, context: Context) -> Drafts:
        """Returns drafts. Each further token has the chance of the first one."""
        tokens, num_tokens, place, branch = context
        T = tokens.shape[1]
        back = num_tokens[:, None] - LONGEST + jnp.arange(LONGEST)
        newest = jnp.take_along_axis(tokens, jnp.clip(back, 0, T - 1), axis=1)
        low, high = _interval(tables, place, newest)
        middle = _middle(tables, place, low, high)
        found = (high > low) & (num_tokens[:, None] >= jnp.array(LENGTHS)) & (num_tokens[:, None] < T)
        start = _get(tables.order, place, middle) + jnp.array(LENGTHS)
        first = jnp.where(found, _text(tables, place, start), suffix_array.SEPARATOR)
        longest_first = jnp.broadcast_to(-jnp.arange(len(LENGTHS), dtype=jnp.float32), first.shape)
        token, column = nth_distinct(first, longest_first, branch)
        start = jnp.take_along_axis(start, column[:, None], axis=1)
        ahead = jnp.arange(self.width)
        chain = _text(tables, place, start + ahead)
        wanted = (token >= 0)[:, None] & (ahead < memory.window[:, None]) & (num_tokens[:, None] + ahead < T)
        chain = jnp.where(wanted & (jnp.cumsum(chain < 0, axis=1) == 0), chain, -1)
        value = jnp.where(chain >= 0, tables.rates[column + len(LENGTHS)][:, None] ** (ahead + 1), 0.0)
        kinds = jnp.broadcast_to(jnp.arange(len(LENGTHS), dtype=jnp.int32), first.shape)
        return Drafts(
            chain,
            jnp.sum(chain >= 0, axis=1, dtype=jnp.int32),
            value,
            first,
            kinds,
            jnp.where((token >= 0) & (branch == 0), column, -1),
        )

    def observe(self, memory: Memory, drafts: Drafts, step: Step) -> Memory:
        tried = step.running & (step.after > step.before) & (step.given > 0)
        right = step.after - step.before - 1 >= step.given
        grown = jnp.where(step.given >= memory.window, jnp.minimum(memory.window + STEP, self.width), memory.window)
        window = jnp.where(tried, jnp.where(right, grown, FIRST_WINDOW), memory.window)
        return Memory(window, tally(memory.counts, drafts, step))


def _get(array: Array, place: Array, index: Array) -> Array:
    """Returns array[offset + index], clipped into the array. index: [S, ..]."""
    at = place[:, OFFSET].reshape(-1, *[1] * (index.ndim - 1)) + index
    return array[jnp.clip(at, 0, array.shape[0] - 1)]


def _text(tables: Tables, place: Array, index: Array) -> Array:
    """Returns the pool's tokens, -1 outside the slot's own part."""
    size = place[:, SIZE].reshape(-1, *[1] * (index.ndim - 1))
    return jnp.where((index >= 0) & (index < size), _get(tables.pool, place, index), suffix_array.SEPARATOR)


def _interval(tables: Tables, place: Array, context: Array) -> tuple[Array, Array]:
    """Returns the interval low .. high-1 of suffixes that start with the last m tokens of the context; [S, 5] each.

    context: [S, 7]. m in the order of LENGTHS. One binary search finds both ends."""
    S, longest = context.shape
    spread = jnp.arange(longest)
    start = longest - jnp.array(LENGTHS)  # of the last m tokens in the context
    pattern = context[:, jnp.minimum(start[:, None] + spread, longest - 1)][:, :, None]  # [S, 5, 1, 7]
    inside = (spread < jnp.array(LENGTHS)[:, None])[:, None]  # [5, 1, 7]
    after = jnp.array([False, True])  # the second search skips equal suffixes

    def halve(_, ends):
        low, high = ends
        middle = (low + high) // 2
        suffix = _get(tables.order, place, middle)
        text = _text(tables, place, suffix[..., None] + spread)  # [S, 5, 2, 7]
        differs = inside & (text != pattern)
        before = jnp.cumsum(differs, axis=-1) == 0
        less = jnp.any(differs & (text < pattern) & (jnp.cumsum(differs, axis=-1) == 1), axis=-1)
        equal = jnp.all(before, axis=-1)
        right = (less | (equal & after)) & (low < high)
        return jnp.where(right, middle + 1, low), jnp.where(right | (low >= high), high, middle)

    low = jnp.zeros((S, len(LENGTHS), 2), jnp.int32)
    high = jnp.broadcast_to(place[:, SIZE, None, None], low.shape).astype(jnp.int32)
    low, _ = jax.lax.fori_loop(0, tables.pool.shape[0].bit_length(), halve, (low, high))
    return low[..., 0], low[..., 1]


def _middle(tables: Tables, place: Array, low: Array, high: Array) -> Array:
    """Returns [S, 5]: the first suffix of low .. high-1 at which half of the interval's priority is reached."""
    before = jnp.where(low > 0, _get(tables.priority, place, low - 1), 0)
    twice = before + _get(tables.priority, place, jnp.maximum(high - 1, 0))

    def halve(_, ends):
        low, high = ends
        middle = (low + high) // 2
        short = 2 * _get(tables.priority, place, middle) < twice
        return (jnp.where(short & (low < high), middle + 1, low), jnp.where(short | (low >= high), high, middle))

    last = jnp.maximum(high - 1, low)
    return jax.lax.fori_loop(0, tables.pool.shape[0].bit_length(), halve, (low, last))[0]
