"""What a recurrent layer keeps of the slots, and how the rows of a step move it.

A state cannot be taken back, as pages can. So a slot keeps the state behind its settled rows, and beside it the drafted
rows of its last step, which may be rejected. The next step first repeats those that were accepted, in the loop that
computes its own rows. One compiled body makes every value. So it does not matter which rows were drafted, how many of
them stood, or in how many steps a prompt was computed.

Which pending rows were accepted follows from positions alone: those before the slot's first new row. A slot whose first
new row has position 0 begins with zeros, whatever another request left there.

kernels/recurrent.py walks the rows where the platform has a kernel. Elsewhere the loop `by_turns` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post.kernels import hardware, recurrent
from jaxrl_post.models import gated_delta
from jaxrl_post.models.cache_kinds import RecurrentState
from jaxrl_post.models.gated_delta import Changes, Inputs, Tokens


class Recurrent(NamedTuple):
    """One layer's cache, of S slots. C: drafted rows that a slot may have in a step. W: width of the convolution.

    - state: behind `start` settled rows, float32
    - start: int32, the position of the first pending row
    - pending, inputs: of the rows from `start` on: what moves the state, and what the convolution reads, [S, C, heads, size]
    - tail: the inputs of the convolution at the W - 1 positions before `start`, [S, W - 1, heads, size]
    """

    state: Float[Array, "S H K V"]
    start: Int[Array, " S"]
    pending: Changes
    inputs: Inputs
    tail: Inputs


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


def empty(slots: int, drafted: int, kind: RecurrentState, dtype: Any) -> Recurrent:
    """Returns a cache of zeros. dtype: of the convolution's inputs. States and what the rule reads are float32."""
    S, C, H = slots, drafted, kind.value_heads
    values, shared = (H, kind.value_dim), (kind.key_heads, kind.key_dim)

    def inputs(rows: int) -> Inputs:
        return Inputs(*(jnp.zeros((S, rows, *each), dtype) for each in (shared, shared, values)))

    return Recurrent(
        state=jnp.zeros((S, H, kind.key_dim, kind.value_dim), jnp.float32),
        start=jnp.zeros(S, jnp.int32),
        pending=Changes(*(jnp.zeros((S, C, *each), jnp.float32) for each in (shared, values, (H,), (H,)))),
        inputs=inputs(C),
        tail=inputs(kind.width - 1),
    )


def divided(by_axis: Callable[[int | None], Any]) -> Recurrent:
    """Returns how the arrays of a cache are divided. by_axis: from the axis of an array's heads, or None."""
    return Recurrent(by_axis(1), by_axis(None), *(by_axis(2),) * 3)


def slot_rows(position: Int[Array, " S"], count: Int[Array, " S"], forced: Int[Array, " S"]) -> SlotRows:
    """Returns the rows of a step that lie slot by slot. forced: rows of each slot whose input token is settled."""
    return SlotRows(jnp.cumsum(count) - count, position, count, jnp.minimum(count, forced))


def accepted(cache: Recurrent, rows: SlotRows) -> Int[Array, " S"]:
    """Returns how many pending rows of each slot were accepted. A slot that begins, or has no row, has none."""
    some = (rows.position > 0) & (rows.count > 0)
    return jnp.where(some, jnp.clip(rows.position - cache.start, 0, cache.inputs.v.shape[1]), 0)


def read(
    cache: Recurrent,
    rows: SlotRows,
    slot: Int[Array, " R"],
    inputs: Inputs,
    g: Float[Array, "R H"],
    beta: Float[Array, "R H"],
    weights: Inputs,
    platforms: frozenset[str] = hardware.PLATFORMS,
) -> tuple[Float[Array, "R H V"], Recurrent]:
    """Returns what each row reads, in float32, and the cache behind the step's settled rows.

    Args:
      slot: of each row.
      inputs: of the rows, [R, heads, size], in the dtype of the cache's.
      weights: of the convolution, [W, heads, size], float32.
      platforms: those whose kernel may be used.
    """
    made = Inputs(*(convolve(cache, rows, name, getattr(inputs, name), slot, getattr(weights, name)) for name in "qkv"))
    return advance(cache, rows, gated_delta.keyed(made, g, beta), inputs, platforms)


def convolve(
    cache: Recurrent, rows: SlotRows, name: str, x: Float[Array, "R h D"], slot: Int[Array, " R"], weights: Array
) -> Float[Array, "R h D"]:
    """Returns gated_delta.convolved at each row, for q, k or v by name. Earlier inputs are rows of this step or kept ones."""
    W, known = len(weights), _known(rows, getattr(cache.tail, name), getattr(cache.inputs, name))
    number = jnp.arange(len(x)) - rows.first[slot]  # of the row in its slot
    out = x.astype(weights.dtype) * weights[-1]
    for back in range(1, W):
        kept = known[slot, W - 1 + accepted(cache, rows)[slot] + number - back]
        earlier = jnp.where((number >= back)[:, None, None], jnp.roll(x, back, axis=0), kept)
        out = out + earlier.astype(weights.dtype) * weights[-1 - back]
    return out


def advance(
    cache: Recurrent, rows: SlotRows, tokens: Tokens, inputs: Inputs, platforms: frozenset[str] = hardware.PLATFORMS
) -> tuple[Float[Array, "R H V"], Recurrent]:
    """Returns what each row reads, and the cache behind the step's settled rows. Rows of no slot read zeros.

    Args:
      tokens, inputs: of the R rows. Queries and keys are those of the key heads.
      platforms: those whose kernel may be used.
    """
    begins = ((rows.position == 0) & (rows.count > 0)).astype(jnp.int32)
    plan = recurrent.Plan(rows.first, accepted(cache, rows), rows.count, rows.settled, begins)
    base, out = recurrent.walk(cache.state, cache.pending, tokens, plan, by_turns, platforms)
    at = jnp.arange(len(out))[:, None]
    real = jnp.any((at >= rows.first) & (at < rows.first + rows.count), axis=1)
    return jnp.where(real[:, None, None], out, 0), _moved(cache, rows, tokens, inputs, base)


def by_turns(
    state: Float[Array, "S H K V"], pending: Changes, tokens: Tokens, plan: recurrent.Plan
) -> tuple[Float[Array, "S H K V"], Float[Array, "R H V"]]:
    """Returns recurrent.walk by a loop in which every turn moves all states by one row.

    It has as many turns as the slot with the most rows needs, accepted ones included. Of a slot without rows nothing changes.
    """
    S, C, R = len(state), pending.v.shape[1], len(tokens.v)
    start = jnp.where((plan.begins > 0)[:, None, None, None], 0, state)
    out = jnp.zeros((R, *tokens.v.shape[1:]), jnp.float32)

    def turn(at: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        state, base, out = carry
        number = at - plan.again
        place = jnp.clip(plan.first + number, 0, R - 1)

        def chosen(pending: Array, new: Array) -> Array:
            old = pending[:, jnp.minimum(at, C - 1)] if C else new[place]
            return jnp.where((number < 0).reshape(S, *[1] * (old.ndim - 1)), old, new[place])

        moves = jax.tree.map(chosen, pending, Changes(*tokens[1:]))
        after, read = gated_delta.step(state, gated_delta.per_value_head(Tokens(tokens.q[place], *moves)))
        live = (number < plan.count)[:, None, None, None]
        state = jnp.where(live, after, state)
        base = jnp.where(live & (number < plan.settled)[:, None, None, None], after, base)
        own = (number >= 0) & (number < plan.count)
        return state, base, out.at[jnp.where(own, place, R)].set(read, mode="drop")

    turns = jnp.max(jnp.where(plan.count > 0, plan.again + plan.count, 0))
    _, base, out = jax.lax.fori_loop(0, turns, turn, (start, start, out))
    return base, out


def _known(rows: SlotRows, tail: Array, inputs: Array) -> Array:
    """Returns the kept inputs of each slot, [S, W - 1 + C, heads, size], and zeros of a slot that begins."""
    both = jnp.concatenate([tail, inputs], axis=1)
    return jnp.where((rows.position == 0)[:, None, None, None], 0, both)


def _moved(cache: Recurrent, rows: SlotRows, tokens: Tokens, inputs: Inputs, base: Array) -> Recurrent:
    """Returns the cache behind the step's settled rows. The drafted rows are pending."""
    again, changed = accepted(cache, rows), rows.count > 0
    back, drafted = cache.tail.v.shape[1], cache.inputs.v.shape[1]
    # Number of the row whose input is in the tail. Those below 0 are known from before.
    number = rows.settled[:, None] - back + jnp.arange(back)

    def of_rows(values: Array, first: Array, size: int) -> Array:
        place = rows.first[:, None] + first[:, None] + jnp.arange(size)
        return values[jnp.clip(place, 0, len(values) - 1)]

    def ended(tail: Array, kept: Array, new: Array) -> Array:
        known = _known(rows, tail, kept)
        place = jnp.clip(back + again[:, None] + number, 0, known.shape[1] - 1)
        earlier = jnp.take_along_axis(known, place[..., None, None], axis=1)
        return jnp.where((number < 0)[..., None, None], earlier, of_rows(new, rows.settled - back, back))

    def stays(new: Array, old: Array) -> Array:
        return jnp.where(changed.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    new = cache._replace(
        start=rows.position + rows.settled,
        pending=jax.tree.map(lambda values: of_rows(values, rows.settled, drafted), Changes(*tokens[1:])),
        inputs=jax.tree.map(lambda values: of_rows(values, rows.settled, drafted), inputs),
        tail=jax.tree.map(ended, cache.tail, cache.inputs, inputs),
    )
    return jax.tree.map(stays, new, cache)._replace(state=base)


def copy(cache: Recurrent, source: Int[Array, " I"], target: Int[Array, " I"]) -> Recurrent:
    """Returns the cache in which slots `target` have the states that slots `source` had. A target >= S is dropped."""
    return jax.tree.map(lambda x: x.at[target].set(x[source], mode="drop"), cache)


def copied(caches: tuple, source: Int[Array, " S"]) -> tuple:
    """Returns the caches of all layers, in which each slot has the state that slot `source` had. Pages stay as they are."""
    return tuple(
        jax.tree.map(lambda x: x[source], cache) if isinstance(cache, Recurrent) else cache for cache in caches
    )
