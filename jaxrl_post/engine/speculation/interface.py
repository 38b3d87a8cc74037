"""The contract of a drafter, and functions that drafters share. Pure functions of S slots; nothing here knows a model.

Invariant: drafts are guesses. No token depends on a draft, so neither correctness nor the sampling law does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_post.engine.host.wire import Entry
from jaxrl_post.ring.history import Past
from jaxrl_post.ring.types import Prompt


class Drafts(NamedTuple):
    """Drafts of every slot.

    tokens: int32[S, W], drafts for the positions from the settled text on; -1 behind the last. count: int32[S], number
    of drafts. value: f32[S, W], estimated chance that all drafts up to this one are right. seen: int32[S, K], every
    candidate for the first position, or -1. kinds: int32[S, K], class of each candidate; column k has classes k *
    levels and up. chosen: int32[S], class of the first draft; -1 without a draft, or where `branch` passed over the
    best candidate."""

    tokens: Array
    count: Array
    value: Array
    seen: Array
    kinds: Array
    chosen: Array


class Context(NamedTuple):
    """What every slot continues: its first `num_tokens` tokens.

    `place` locates the slot's tables (host/wire.py). `branch` b asks for the b-th best first token; clones use it."""

    tokens: Int[Array, "S T"]
    num_tokens: Int[Array, " S"]
    place: Int[Array, "S places"]
    branch: Int[Array, " S"]


class Step(NamedTuple):
    """A step that settled tokens[s, before[s]:after[s]], at most W + 1 of them.

    `place`: as in Context. `given`: draft rows of each slot. Slots outside the mask `running` are ignored."""

    place: Int[Array, "S places"]
    tokens: Int[Array, "S T"]
    argmax_tokens: Int[Array, "S T"]
    before: Int[Array, " S"]
    after: Int[Array, " S"]
    given: Int[Array, " S"]
    running: Bool[Array, " S"]


class Counts(NamedTuple):
    """The memory of a drafter that only counts."""

    counts: Array


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """A frozen object with static settings, and by default one that never drafts. It keeps arrays of two kinds, both pytrees.

    `tables` are constant during a dispatch: flat arrays of `entries` entries, then `rates` f32[C]. `memory` passes
    from step to step; `memory.counts` int32[2, C] counts judged and right drafts of each class.

    A drafter learns argmax tokens: at each position the likeliest token by the model, or the sampled token where the
    likeliest is not at hand.

    - `width`: W, the most drafts a slot gets. 0: it never drafts.
    - `entries`: length of the flat arrays in the tables. 0: no such arrays.
    - `watches`: whether the engine must keep the argmax token at each position.
    """

    width: int = 0
    entries: int = 0
    watches: bool = False

    @property
    def priors(self) -> Float[np.ndarray, " C"]:
        """Returns the acceptance rate of each class of drafts before any count."""
        return np.zeros(0, np.float32)

    @property
    def classes(self) -> int:
        """Returns C, the number of classes of drafts. Acceptance is counted for each class."""
        return self.priors.size

    def empty(self, slots: int) -> tuple[Any, Any]:
        """Returns tables and memory without content, for `slots` slots."""
        return (), Counts(jnp.zeros((2, 0), jnp.int32))

    def enter(self, memory: Any, entry: Entry) -> Any:
        """Returns the memory after I texts entered slots. State per slot starts again; a slot >= S is ignored.

        Where `fresh`, the text's row of the live table is emptied and learns tokens[:num_tokens]. Elsewhere the row
        learns tokens[seen:num_tokens]."""
        return memory

    def index(self, past: Sequence[Past], prompt: Prompt) -> tuple[np.ndarray, ...]:
        """Returns flat host arrays of a prompt's tables, of one length, from its past epochs, newest first.

        Returns an empty tuple where the drafter has no table for a prompt."""
        return ()

    def propose(self, tables: Any, memory: Any, context: Context) -> Drafts:
        """Returns drafts for the positions from `num_tokens` on."""
        none = jnp.zeros((context.tokens.shape[0], 0), jnp.int32)
        zero = jnp.zeros(context.tokens.shape[0], jnp.int32)
        return Drafts(none, zero, none.astype(jnp.float32), none, none, zero - 1)

    def observe(self, memory: Any, drafts: Drafts, step: Step) -> Any:
        """Returns the memory after a step."""
        return memory


def nth_distinct(
    tokens: Int[Array, "S K"], rates: Float[Array, "S K"], branch: Int[Array, " S"]
) -> tuple[Int[Array, " S"], Int[Array, " S"]]:
    """Returns, for each slot, the `branch`-th distinct token by rate, and its column.

    Branch 0 is the best token. Ties go to the first column. Token -1 stands for none. Returns -1 and 0 for a slot with
    fewer distinct tokens."""
    real, column = tokens >= 0, jnp.arange(tokens.shape[1])
    ahead = (rates[:, None] > rates[:, :, None]) | ((rates[:, None] == rates[:, :, None]) & (column < column[:, None]))
    ahead &= real[:, None]  # [S, k, other]: `other` comes before k
    first = real & ~jnp.any(ahead & (tokens[:, None] == tokens[:, :, None]), axis=-1)
    place = jnp.sum(ahead & first[:, None], axis=-1)
    chosen = first & (place == branch[:, None])
    return (jnp.max(jnp.where(chosen, tokens, -1), axis=-1), jnp.max(jnp.where(chosen, column, 0), axis=-1))


def best(tokens: Int[Array, "S K"], rates: Float[Array, "S K"]) -> tuple[Int[Array, " S"], Int[Array, " S"]]:
    """Returns `nth_distinct` of branch 0."""
    width = tokens.shape[1]
    rates = jnp.where(tokens >= 0, rates, -1)
    highest = rates == jnp.max(rates, axis=-1, keepdims=True)
    column = jnp.min(jnp.where(highest, jnp.arange(width), width - 1), axis=-1)
    token = jnp.max(jnp.where(jnp.arange(width) == column[:, None], tokens, -1), axis=-1)
    return token, jnp.where(token >= 0, column, 0)


def tally(counts: Int[Array, "2 C"], drafts: Drafts, step: Step) -> Int[Array, "2 C"]:
    """Returns the counts after a step. Only the first position is judged.

    The first half of the classes judges every candidate, chosen or not: rates to choose by. The second half judges only
    the chosen candidate. A class is chosen where no better class was found, so its rate there is lower than overall."""
    columns, half = drafts.seen.shape[1], counts.shape[1] // 2
    levels = half // columns
    first = jnp.clip(step.before, 0, step.tokens.shape[1] - 1)
    settled = jnp.take_along_axis(step.tokens, first[:, None], axis=1)
    stepped = (step.running & (step.after > step.before))[:, None]
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
