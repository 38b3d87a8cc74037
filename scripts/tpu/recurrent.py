"""The kernels of layers with a gated delta rule, against jnp: the engine's walk over slots, and the learner's packed rows."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from gpu import packed_rows
from gpu.part import Part

from jaxrl_post.engine.recurrent_rows import by_turns
from jaxrl_post.kernels import delta_rule_tpu, recurrent
from jaxrl_post.models import gated_delta
from jaxrl_post.models.gated_delta import Changes, Tokens

FAR = 1e-3  # 2-norm over 2-norm, in float32
HEADS = (16, 32, 128, 128)  # of Qwen3.5-9B: key heads, value heads, and numbers of a key and of a value
WALK = functools.partial(recurrent.walk, reference=by_turns)
SLOTS, ROWS, PENDING = 16, 4, 3  # of a step: slots, rows of each, and pending rows, of which some were accepted


def tokens(shape: tuple[int, ...], heads: tuple[int, int, int, int], seed: int = 0) -> Tokens:
    """Returns what the rule reads of tokens: keys and queries of length 1, logarithms of decays at most 0, rates below 1."""
    h, H, K, V = heads
    q, k, v, g, beta = jax.random.split(jax.random.key(seed), 5)

    def unit(key: jax.Array) -> jax.Array:
        x = jax.random.normal(key, (*shape, h, K), jnp.float32)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    decays = -jax.random.exponential(g, (*shape, H), jnp.float32) / 4
    rates = jax.random.uniform(beta, (*shape, H), jnp.float32)
    return Tokens(unit(q) * K**-0.5, unit(k), jax.random.normal(v, (*shape, H, V), jnp.float32), decays, rates)


def against_reference(
    part: Part,
    heads: tuple[int, int, int, int] = HEADS,
    length: int = 1024,
    walk: Callable = WALK,
    packed: Callable = delta_rule_tpu.packed,
) -> None:
    """Compares states, outputs and gradients, and the bits of a slot beside other ones."""
    if part.wants("recurrent.walk.bits_equal_beside_others", 20.0):
        _walked(part, heads, walk)
    if part.wants("recurrent.packed.bits_equal_again", 20.0):
        _packed(part, heads, length, packed)


def _walked(part: Part, heads: tuple[int, int, int, int], walk: Callable) -> None:
    _, H, K, V = heads
    state = jax.random.normal(jax.random.key(1), (SLOTS, H, K, V), jnp.float32)
    _, *pending = tokens((SLOTS, PENDING), heads, 2)
    new, each = tokens((SLOTS * ROWS,), heads, 3), np.arange(SLOTS, dtype=np.int32)
    plan = recurrent.Plan(
        *map(jnp.asarray, (ROWS * each, each % (PENDING + 1), 0 * each + ROWS, 1 + each % ROWS, 0 * each))
    )
    given = state, Changes(*pending), new, plan
    run = jax.jit(walk)
    found, right = run(*given), jax.jit(by_turns)(*given)
    for name, a, b in zip(("states", "outputs"), found, right, strict=True):
        part.figure(f"recurrent.walk.{name}_difference", packed_rows.distance(a, b), at_most=FAR)
    others = new._replace(v=new.v.at[ROWS:].multiply(-1.0))
    other = run(state, Changes(*pending), others, plan)
    same = packed_rows.same_bits((found[0][0], found[1][:ROWS]), (other[0][0], other[1][:ROWS]))
    part.figure("recurrent.walk.bits_equal_beside_others", same, equals=True)


def _packed(part: Part, heads: tuple[int, int, int, int], length: int, packed: Callable) -> None:
    given, ids = tokens((1, length), heads, 4), packed_rows.segments(1, length)

    def both(form: Callable) -> Callable:
        def run(x: Tokens) -> tuple:
            out, back = jax.vjp(form, x)
            return out, *back(jnp.cos(out))[0]

        return jax.jit(run)

    run = both(lambda x: packed(x, ids))
    found = run(given)
    right = both(lambda x: gated_delta.packed(gated_delta.per_value_head(x), ids))(given)
    for name, a, b in zip(("output", *(f"d{name}" for name in Tokens._fields)), found, right, strict=True):
        part.figure(f"recurrent.packed.{name}_difference", packed_rows.distance(a, b), at_most=FAR)
    part.figure("recurrent.packed.bits_equal_again", packed_rows.same_bits(found, run(given)), equals=True)
