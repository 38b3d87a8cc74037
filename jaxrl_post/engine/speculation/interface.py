"""What a drafter gives to a step, and the rules all drafters share. Pure functions of S slots; nothing here knows a model.

A drafter is a frozen object of static settings with these members; `tables` stay as they are during a dispatch, `memory`
goes from step to step, both are pytrees of arrays:
  entries                         length of the flat arrays in its tables, 0: it has none
  watches                         whether the engine is to keep the token held most likely at each position
  width, classes, priors          W; number C of classes whose hits are counted; f32[C], their rates before any count
  empty(slots)                    (tables, memory) with nothing in them
  enter(memory, slot[I], row[I], fresh[I], prompt[I], tokens[I, T], favourites[I, T], known[I])  -> memory
                                  requests take their slots (slot >= S: none): per-slot state starts anew; where `fresh` the
                                  live row is emptied and learns tokens[:known], else it learns tokens[prompt:known]
  index(past, prompt)             flat host arrays of a prompt's own part of the tables, none where it has no such part
  propose(tables, memory, tokens[S, T], known[S], place[S, PLACE], branch[S])  -> Drafts
  observe(memory, drafts, place, tokens[S, T], favourites[S, T], before[S], after[S], given[S], live[S])  -> memory
                                  tokens before[s] .. after[s]-1, at most W+1 of them, became settled; given[s] rows held
                                  drafts; slots outside the mask `live` are passed over
`favourites` is what to learn at each position: the token the model held most likely, where it is at hand, else the token.
`memory.counts` is int32[2, C]: drafts of a class that could be judged, and those that were right.

Invariant: drafts are guesses. No token depends on them, so neither correctness nor the law of sampling does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_post.engine.host.wire import ALL_OFFSET, ALL_SIZE, OFFSET, PLACE, ROW, SIZE  # noqa: F401  `place` is a drafter's


class Drafts(NamedTuple):
    """Candidates for the tokens from `known` on: tokens int32[S, W] (-1 behind the last), count int32[S], value f32[S, W],
    the estimated chance that all up to this one prove right. What could have come first: seen int32[S, K], a token or -1,
    and the class of each, kinds int32[S, K], class k * levels .. in column k; chosen int32[S], the class of what does come
    first, -1 where nothing does or `branch` passed by the best."""

    tokens: Array
    count: Array
    value: Array
    seen: Array
    kinds: Array
    chosen: Array


def nth_distinct(
    tokens: Int[Array, "S K"], rates: Float[Array, "S K"], branch: Int[Array, " S"]
) -> tuple[Int[Array, " S"], Int[Array, " S"]]:
    """Per slot the token that is `branch`-th among the distinct ones by rate (0 the best; ties to the first column), and its
    column; -1 and 0 where there are fewer. Token -1 is none."""
    real, column = tokens >= 0, jnp.arange(tokens.shape[1])
    ahead = (rates[:, None] > rates[:, :, None]) | ((rates[:, None] == rates[:, :, None]) & (column < column[:, None]))
    ahead &= real[:, None]  # [S, k, other]: the other one comes before k
    first = real & ~jnp.any(ahead & (tokens[:, None] == tokens[:, :, None]), axis=-1)
    place = jnp.sum(ahead & first[:, None], axis=-1)
    chosen = first & (place == branch[:, None])
    return (jnp.max(jnp.where(chosen, tokens, -1), axis=-1), jnp.max(jnp.where(chosen, column, 0), axis=-1))


def best(tokens: Int[Array, "S K"], rates: Float[Array, "S K"]) -> tuple[Int[Array, " S"], Int[Array, " S"]]:
    """`nth_distinct` for branch 0."""
    width = tokens.shape[1]
    rates = jnp.where(tokens >= 0, rates, -1)
    highest = rates == jnp.max(rates, axis=-1, keepdims=True)
    column = jnp.min(jnp.where(highest, jnp.arange(width), width - 1), axis=-1)
    token = jnp.max(jnp.where(jnp.arange(width) == column[:, None], tokens, -1), axis=-1)
    return token, jnp.where(token >= 0, column, 0)


def tally(
    counts: Int[Array, "2 C"],
    drafts: Drafts,
    tokens: Int[Array, "S T"],
    before: Int[Array, " S"],
    after: Int[Array, " S"],
    live: Bool[Array, " S"],
) -> Int[Array, "2 C"]:
    """The counts after a step. In the first half of the classes every candidate for the first position is judged, chosen or
    not: what to choose by. In the second half only what was chosen: a class wins where no better one was found, so what it
    is worth then is less than what it is worth on the whole."""
    columns, half = drafts.seen.shape[1], counts.shape[1] // 2
    levels = half // columns
    settled = jnp.take_along_axis(tokens, jnp.clip(before, 0, tokens.shape[1] - 1)[:, None], axis=1)
    stepped = (live & (after > before))[:, None]
    level = drafts.kinds - levels * jnp.arange(columns, dtype=jnp.int32)
    judged = ((drafts.seen >= 0) & stepped)[..., None] & (level[..., None] == jnp.arange(levels))
    right = judged & (drafts.seen == settled)[..., None]
    chosen = stepped & (drafts.chosen[:, None] == jnp.arange(half))
    hit = chosen & (drafts.tokens[:, :1] == settled)
    each = [
        jnp.concatenate([jnp.sum(a, axis=0, dtype=jnp.int32).reshape(-1), jnp.sum(b, axis=0, dtype=jnp.int32)])
        for a, b in ((judged, chosen), (right, hit))
    ]
    return counts + jnp.stack(each)


class Counts(NamedTuple):
    """The memory of a drafter that remembers nothing else."""

    counts: Array


@dataclass(frozen=True)
class Off:
    """Drafts nothing."""

    width: int = 0
    classes: int = 0
    entries: int = 0
    watches: bool = False

    @property
    def priors(self) -> Float[np.ndarray, " C"]:
        return np.zeros(0, np.float32)

    def empty(self, slots: int) -> tuple[tuple, Counts]:
        return (), Counts(jnp.zeros((2, 0), jnp.int32))

    def enter(self, memory, slot, row, fresh, prompt, tokens, favourites, known) -> Counts:
        return memory

    def index(self, past, prompt) -> tuple:
        return ()

    def propose(self, tables, memory, tokens, known, place, branch) -> Drafts:
        none, zero = jnp.zeros((tokens.shape[0], 0), jnp.int32), jnp.zeros(tokens.shape[0], jnp.int32)
        return Drafts(none, zero, none.astype(jnp.float32), none, none, zero - 1)

    def observe(self, memory, drafts, place, tokens, favourites, before, after, given, live) -> Counts:
        return memory
