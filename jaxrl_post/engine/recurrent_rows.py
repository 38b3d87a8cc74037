"""What a recurrent layer keeps of the slots, and how the rows of a step move it.

A state cannot be taken back, as pages can. So a slot keeps the state behind its settled rows, and beside it the drafted
rows of its last step, which may be rejected. The next step first repeats those that were accepted, in the loop that
computes its own rows. One compiled body makes every value. So it does not matter which rows were drafted, how many of
them stood, or in how many steps a prompt was computed.

Which pending rows were accepted follows from positions alone: those before the slot's first new row. A slot whose first
new row has position 0 begins with zeros, whatever another request left there.

No engine has such layers yet: models with a recurrent state are refused. The state kind of models/cache_kinds.py is to come.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post.models import gated_delta
from jaxrl_post.models.gated_delta import Tokens


class Recurrent(NamedTuple):
    """One layer's cache, of S slots. C: drafted rows that a slot may have in a step. W: width of the convolution.

    - state: behind `start` settled rows, float32
    - start: int32, the position of the first pending row
    - pending, inputs: of the rows from `start` on: what the rule reads, and what the convolution reads
    - tail: the inputs of the convolution at the W - 1 positions before `start`
    """

    state: Float[Array, "S H K V"]
    start: Int[Array, " S"]
    pending: Tokens
    inputs: Float[Array, "S C D"]
    tail: Float[Array, "S W-1 D"]


class SlotRows(NamedTuple):
    """The rows of a step by slot.

    - first, position: of the slot's first row, its place among R rows and its position in the text. The position is 0, or from
      the cache's `start` to C behind it: a state cannot go back to an earlier one
    - count: rows of the slot, one after another
    - settled: how many of them are settled, which come first. The others are drafted, at most C
    """

    first: Int[Array, " S"]
    position: Int[Array, " S"]
    count: Int[Array, " S"]
    settled: Int[Array, " S"]


def empty(
    slots: int, drafted: int, *, heads: int, key: int, value: int, inputs: int, width: int, dtype: jnp.dtype
) -> Recurrent:
    """Returns a cache of zeros. dtype: of the convolution's inputs. States and what the rule reads are float32."""
    S, C, H = slots, drafted, heads
    shapes = (S, C, H, key), (S, C, H, key), (S, C, H, value), (S, C, H), (S, C, H)
    return Recurrent(
        state=jnp.zeros((S, H, key, value), jnp.float32),
        start=jnp.zeros(S, jnp.int32),
        pending=Tokens(*(jnp.zeros(shape, jnp.float32) for shape in shapes)),
        inputs=jnp.zeros((S, C, inputs), dtype),
        tail=jnp.zeros((S, width - 1, inputs), dtype),
    )


def accepted(cache: Recurrent, rows: SlotRows) -> Int[Array, " S"]:
    """Returns how many pending rows of each slot were accepted. A slot that begins, or has no row, has none."""
    some = (rows.position > 0) & (rows.count > 0)
    return jnp.where(some, jnp.clip(rows.position - cache.start, 0, cache.inputs.shape[1]), 0)


def convolve(
    cache: Recurrent, rows: SlotRows, x: Float[Array, "R D"], slot: Int[Array, " R"], weights: Float[Array, "W D"]
) -> Float[Array, "R D"]:
    """Returns gated_delta.convolved at each row. slot: of each row. Earlier inputs are rows of this step or kept ones."""
    W, known = len(weights), _known(cache, rows)
    number = jnp.arange(len(x)) - rows.first[slot]  # of the row in its slot
    out = x * weights[-1]
    for back in range(1, W):
        kept = known[slot, W - 1 + accepted(cache, rows)[slot] + number - back]
        out = out + jnp.where((number >= back)[:, None], jnp.roll(x, back, axis=0), kept) * weights[-1 - back]
    return out


def advance(
    cache: Recurrent, rows: SlotRows, tokens: Tokens, x: Float[Array, "R D"]
) -> tuple[Float[Array, "R H V"], Recurrent]:
    """Returns what each row reads, and the cache behind the step's settled rows. tokens, x: of the R rows.

    The loop has as many turns as the slot with the most rows needs, accepted ones included. Of a slot without rows nothing
    changes.
    """
    S, C, _ = cache.inputs.shape
    again, R = accepted(cache, rows), len(x)
    begins = (rows.position == 0) & (rows.count > 0)
    start = jnp.where(begins[:, None, None, None], 0, cache.state)
    out = jnp.zeros((R, *tokens.v.shape[1:]), jnp.float32)

    def turn(at: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        state, base, out = carry
        number = at - again
        place = jnp.clip(rows.first + number, 0, R - 1)

        def chosen(pending: Array, new: Array) -> Array:
            old = pending[:, jnp.minimum(at, C - 1)] if C else new[place]
            return jnp.where((number < 0).reshape(S, *[1] * (old.ndim - 1)), old, new[place])

        after, read = gated_delta.step(state, jax.tree.map(chosen, cache.pending, tokens))
        live = (number < rows.count)[:, None, None, None]
        state = jnp.where(live, after, state)
        base = jnp.where(live & (number < rows.settled)[:, None, None, None], after, base)
        own = (number >= 0) & (number < rows.count)
        return state, base, out.at[jnp.where(own, place, R)].set(read, mode="drop")

    turns = jnp.max(jnp.where(rows.count > 0, again + rows.count, 0))
    _, base, out = jax.lax.fori_loop(0, turns, turn, (start, start, out))
    return out, _moved(cache, rows, tokens, x, base)


def _known(cache: Recurrent, rows: SlotRows) -> Array:
    """Returns the kept inputs of each slot, [S, W - 1 + C, D], and zeros of a slot that begins."""
    both = jnp.concatenate([cache.tail, cache.inputs], axis=1)
    return jnp.where((rows.position == 0)[:, None, None], 0, both)


def _moved(cache: Recurrent, rows: SlotRows, tokens: Tokens, x: Array, base: Array) -> Recurrent:
    """Returns the cache behind the step's settled rows. The drafted rows are pending."""
    known, back, drafted = _known(cache, rows), cache.tail.shape[1], cache.inputs.shape[1]
    again, changed = accepted(cache, rows), rows.count > 0

    def of_rows(values: Array, first: Array, size: int) -> Array:
        place = rows.first[:, None] + first[:, None] + jnp.arange(size)
        return values[jnp.clip(place, 0, len(values) - 1)]

    def kept(new: Array, old: Array) -> Array:
        return jnp.where(changed.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    number = (
        rows.settled[:, None] - back + jnp.arange(back)
    )  # of the row whose input is in the tail; earlier ones are known
    place = jnp.clip(back + again[:, None] + number, 0, known.shape[1] - 1)
    earlier = jnp.take_along_axis(known, place[..., None], axis=1)
    tail = jnp.where((number < 0)[..., None], earlier, of_rows(x, rows.settled - back, back))
    new = Recurrent(
        state=base,
        start=rows.position + rows.settled,
        pending=jax.tree.map(lambda values: of_rows(values, rows.settled, drafted), tokens),
        inputs=of_rows(x, rows.settled, drafted),
        tail=tail.astype(cache.tail.dtype),
    )
    return jax.tree.map(kept, new, cache)
