"""The whole numbers of a step: which rows run and from which tokens, and what the samples of its head rows settle.

Each is one function of small arrays, so that a GPU computes it by one kernel (kernels/small_arrays.py). Sums run over pairs,
as in row_plan.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxrl_post.engine import row_plan
from jaxrl_post.engine.host import wire as c
from jaxrl_post.engine.host.wire import EngineSettings
from jaxrl_post.kernels import pairs
from jaxrl_post.ring.types import MOST_ENDS


class Fixed(NamedTuple):
    """What the host says of each slot for one dispatch, int32[S]: columns of the packed matrix."""

    active: Array
    num_tokens: Array
    limit: Array
    mapped: Array
    order: Array
    watch: Array
    leader: Array

    def bound(self, emit: int) -> Array:
        """Returns the position below which a slot may have rows.

        The last token needs no row. Mapped pages and the window of `emit` new tokens are limited."""
        return jnp.minimum(jnp.minimum(self.limit - 1, self.mapped), self.num_tokens + emit - 1)


def fixed(packed: Array) -> Fixed:
    columns = c.ACTIVE, c.NUM_TOKENS, c.LIMIT, c.MAPPED, c.ORDER, c.WATCH, c.LEADER
    return Fixed(*(packed[..., column] for column in columns))


class Progress(NamedTuple):
    """How far each slot is, int32[S]."""

    num_tokens: Array
    num_computed: Array
    candidate_end: Array
    done: Array

    def going(self, of: Fixed) -> Array:
        return (of.active > 0) & (self.done == 0)


class Law(NamedTuple):
    """What each head row is sampled by, int32[places]; seeds [places, 2]. Temperature and top_p are bits of float32."""

    seeds: Array
    temperature: Array
    top_k: Array
    top_p: Array


class Rows(NamedTuple):
    """The rows of a step.

    - plan: the row plan
    - position, inputs: of each row, int32[R]
    - after, candidate: of each head row, the position that it samples and the candidate there, -1 without one, int32[places]
    - law: of each head row
    - forced: rows of each slot whose input token is settled, int32[S]
    - candidate_end: behind the drafts of a slot, where it has any, int32[S]
    """

    plan: row_plan.Plan
    position: Array
    inputs: Array
    after: Array
    candidate: Array
    law: Law
    forced: Array
    candidate_end: Array


class Settled(NamedTuple):
    """What the samples of a step settle. What goes on from step to step comes first, so that it is written in place.

    - progress: of each slot
    - uses: rows of the dispatch by use in the order of USES, int32[USED]
    - sampled: of each head row, the token to write, int32[places]
    - counts: whether it is kept, bool[places]
    - match: the sample equals its candidate and may be continued, bool[places]
    - place: the position at which a sample is written; max_length where it is not, int32[places]
    - begin, gained, first: of each slot, how many tokens of the dispatch it had, how many it gets, and its first head row, int32[S]
    """

    progress: Progress
    uses: Array
    sampled: Array
    counts: Array
    match: Array
    place: Array
    begin: Array
    gained: Array
    first: Array


USED = 8  # length of a vector of USES: a kernel's lengths are powers of 2


def rows_of(sizes: EngineSettings, rows: int, states: bool, given: tuple, token: Callable, number: Callable) -> Rows:
    """Returns the rows of a step.

    Args:
      states: layers have a recurrent state.
      given: (Fixed, Progress), and where slots may have drafts their worth f32[S, W] and their number int32[S].
      token: of (slot, position).
      number: of (slot, column) of the packed matrix.
    """
    of, progress, *drafts = given
    bound, going, most = of.bound(sizes.emit), progress.going(of), sizes.state_rows if states else rows
    num_tokens, num_computed, candidate_end, _ = progress
    forced = jnp.where(going & (num_tokens <= bound), num_tokens - num_computed, 0)
    worth = np.zeros((num_tokens.shape[0], 0), np.float32)
    if drafts:
        worth, offered = drafts
        candidate_end = jnp.where(offered > 0, num_tokens + offered, candidate_end)
    candidates = jnp.maximum(jnp.minimum(candidate_end, bound) - num_tokens, 0)
    candidates = jnp.where(offered > 0, 0, candidates) if drafts else candidates
    candidates = jnp.minimum(candidates, most) if most < rows else candidates
    heads = dict(heads=min(sizes.head_rows, rows), places=sizes.head_places(rows), most=None)
    if states:
        # Others copy the state that stands exactly behind the prompt that they wait for.
        left = of.watch - num_computed
        heads["most"] = jnp.where(left > 0, left, forced)
    plan = row_plan.plan(jnp, forced, candidates, worth, of.order, rows=rows, **heads)
    position = jnp.where(plan.real, pairs.taken(jnp, num_computed, plan.slot) + plan.offset, 0)
    inputs = jnp.where(plan.real, token(plan.slot, position), 0)
    after = pairs.taken(jnp, position, plan.head_row) + 1
    known = token(plan.head_slot, jnp.minimum(after, sizes.max_length - 1))
    candidate = jnp.where(after < pairs.taken(jnp, candidate_end, plan.head_slot), known, -1)
    law = Law(_row(plan.head_slot, c.SEED0, 2, number), *(_column(plan.head_slot, at, number) for at in c.LAW[2:]))
    return Rows(plan, position, inputs, after, candidate, law, forced, candidate_end)


def _column(slot: Array, column: int, number: Callable) -> Array:
    """Returns one column of the packed matrix for each of these slots."""
    return number(slot, jnp.full_like(slot, column))


def _row(slot: Array, column: int, many: int, number: Callable) -> Array:
    """Returns so many columns from one on, [slots, many]."""
    both = slot.shape[0], many
    return number(jnp.broadcast_to(slot[:, None], both), jnp.broadcast_to(column + jnp.arange(many), both))


def _of_slots(slots: Array, slot: Array, values: Array) -> Array:
    """Returns the sum of the values of each slot's head rows, int32[S]."""
    return pairs.sums(jnp, lambda mine, slot, value: jnp.where(slot == mine, value, 0), (slots,), (slot, values))


def accept(plan: row_plan.Plan, candidate: Array, sampled: Array, ended: Array) -> tuple[Array, Array, Array]:
    """Returns, for each head row: the token to write, whether it is kept, and whether it equals its candidate and may be
    continued."""
    slot, at = plan.head_slot, jnp.arange(sampled.shape[0])
    match = (sampled == candidate) & ~ended & plan.head_real

    def missed(mine: Array, place: Array, slot: Array, at: Array, miss: Array) -> Array:
        return jnp.where((slot == mine) & (at < place), miss, 0)

    before = pairs.sums(jnp, missed, (slot, at), (slot, at, (~match).astype(jnp.int32)))
    return sampled, plan.head_real & (before == 0), match


def settled(sizes: EngineSettings, given: tuple, number: Callable[[Array, Array], Array]) -> Settled:
    """Returns what the samples of a step settle.

    A sample that equals its candidate may be continued: the next head row of its slot counts. The first one that does not
    is kept, and those behind it are dropped.

    Args:
      given: (Progress, uses of the steps before, Fixed, Rows, sampled int32[places]).
      number: of (slot, column) of the packed matrix.
    """
    progress, uses, of, rows, sampled = given
    plan, slots = rows.plan, jnp.arange(of.order.shape[0])
    slot, at = plan.head_slot, jnp.arange(plan.head_slot.shape[0])
    ended = jnp.sum(sampled[:, None] == _row(slot, c.FIRST_END, MOST_ENDS, number), axis=1, dtype=jnp.int32) > 0
    sampled, counts, match = accept(plan, rows.candidate, sampled, ended)

    def heads_of_slot(which: Array) -> Array:
        return _of_slots(slots, slot, (counts & which).astype(jnp.int32))

    gained = heads_of_slot(counts)
    num_tokens = progress.num_tokens + gained
    candidate_end = jnp.where(heads_of_slot(~match) > 0, num_tokens, jnp.maximum(rows.candidate_end, num_tokens))
    over = (heads_of_slot(ended) > 0) | (num_tokens >= of.limit)
    return Settled(
        Progress(
            num_tokens,
            jnp.where(gained > 0, num_tokens - 1, progress.num_computed + plan.count),
            candidate_end,
            jnp.where(progress.going(of) & over, 1, progress.done),
        ),
        uses + _uses(plan, counts, number),
        sampled,
        counts,
        match,
        jnp.where(counts, rows.after, sizes.max_length),
        progress.num_tokens - of.num_tokens,
        gained,
        _of_slots(slots, slot, jnp.where(counts & (plan.head_rank == 0), at, 0)),
    )


def _uses(plan: row_plan.Plan, counts: Array, number: Callable) -> Array:
    """Counts the rows of a step by use, in the order of USES."""

    def led(slot: Array) -> Array:
        return _column(slot, c.LEADER, number) == slot

    def many(which: Array) -> Array:
        return jnp.sum(which, dtype=jnp.int32)

    mine, sampling = plan.real & led(plan.slot), plan.head_real & led(plan.head_slot)
    drafted, heads, rows = sampling & (plan.head_rank > 0), many(sampling), many(plan.real)
    uses = (
        many(mine) - heads,
        heads - many(drafted),
        many(drafted & counts),
        many(drafted & ~counts),
        plan.real.shape[0] - rows,
        rows - many(mine),
    )
    at = jnp.arange(USED)
    return sum(jnp.where(at == place, one, 0) for place, one in enumerate(uses))


MOVED = len(Progress._fields) + 1  # leaves of Settled that are written in place
