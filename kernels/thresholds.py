"""Top-k and top-p as one number a row: ids whose logit is below it are not allowed.

The cuts are those of vLLM: temperature first, then the k highest ids. Of those, the shortest prefix in falling order
that holds at least the share p remains. Ids that tie with the last kept id are all kept.

The number is found by bisection over the sorted bit patterns of float32: 32 counts for k, 32 masses for p, each in one
pass over the row. So no row is sorted, a vocabulary split over devices needs only sums, and the result is a logit of
the row itself. On TPUs a kernel makes these passes in the chip's own memory (thresholds_tpu.py). On GPUs fewer passes do
(thresholds_gpu.py).

Invariant: a row's threshold depends on that row's inputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

SIGN = np.uint32(1 << 31)
GROUP = 16  # neighbouring ids of which `highest` looks at the peak first


def find(
    logits: Float[Array, "R V"],
    temperatures: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    by_platform: Mapping[str, Callable] | None = None,
) -> Float[Array, " R"]:
    """Returns the lowest allowed logit, float32; -inf where nothing is cut.

    Nothing is cut with top_k 0 and top_p >= 1, nor at temperature 0, whose argmax no cut can change. Logits are
    float32; -inf marks an id that is not allowed.

    Args:
      by_platform: what takes the place of the bisection there. It has the signature of `bisected` (choice.of_thresholds)."""
    numbers = (logits, temperatures, top_k, top_p)
    found = jax.lax.platform_dependent(*numbers, default=bisected, **(by_platform or {}))
    cut = (temperatures > 0) & ((top_k > 0) | (top_p < 1))
    return jnp.where(cut, values_of(found), -jnp.inf)


def bisected(
    logits: Float[Array, "R V"], temperatures: Float[Array, " R"], top_k: Int[Array, " R"], top_p: Float[Array, " R"]
) -> UInt32[Array, " R"]:
    """Returns the key of the lowest allowed logit: that of top-k where top_p >= 1, and 0 where neither cuts."""
    vocab = logits.shape[-1]
    keys = keys_of(logits)
    with jax.named_scope("top_k"):
        fewest = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
        highest = _largest(keys, lambda seen: jnp.sum(seen, axis=-1, dtype=jnp.int32) >= fewest)
        kept = jnp.where(top_k > 0, highest, jnp.uint32(0))
    with jax.named_scope("top_p"):
        scaled = logits / jnp.where(temperatures == 0, 1.0, temperatures)[:, None]
        weight = jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True))
        weight = jnp.where(keys >= kept[:, None], weight, 0.0)
        enough = top_p * jnp.sum(weight, axis=-1)
        highest = _largest(keys, lambda seen: jnp.sum(jnp.where(seen, weight, 0.0), axis=-1) >= enough)
        return jnp.where(top_p < 1, jnp.maximum(kept, highest), kept)


def of_all_rows(run: Callable) -> Callable:
    """Returns `run` with the signature of `bisected`. Mapped over replicas, it is one call with the rows of all.

    Rows are independent. A condition or a kernel that is mapped would run for each replica, or run always."""
    whole = jax.custom_batching.custom_vmap(run)

    @whole.def_vmap
    def mapped(size, batched, *numbers):
        rows = [x if own else jnp.broadcast_to(x, (size, *x.shape)) for x, own in zip(numbers, batched, strict=True)]
        return run(*(x.reshape(-1, *x.shape[2:]) for x in rows)).reshape(size, -1), True

    return whole


def kept(logits: Float[Array, "R V"], lowest: Float[Array, " R"], most: int, parts: int = 1) -> Int[Array, "R most"]:
    """Returns the ids that each row's threshold leaves, the likeliest first and -1 behind the last one.

    A row without a threshold has none. Nor has one that leaves more than `most` ids: it has no top-k, or ids tie.

    Args:
      lowest: of `find`.
      parts: the devices that the vocabulary is split over. Each sorts its own ids first."""
    vocab = logits.shape[-1]
    with jax.named_scope("kept"):
        allowed = logits >= lowest[:, None]
        values, ids = _highest(jnp.where(allowed, logits, -jnp.inf), min(most, vocab), parts)
        recorded = (lowest > -jnp.inf) & (jnp.sum(allowed, axis=-1, dtype=jnp.int32) <= most)
        ids = jnp.where(recorded[:, None] & (values > -jnp.inf), ids, -1)
        return jnp.pad(ids, ((0, 0), (0, most - ids.shape[-1])), constant_values=-1)


def _highest(
    logits: Float[Array, "R V"], count: int, parts: int
) -> tuple[Float[Array, "R count"], Int[Array, "R count"]]:
    """Returns the highest logits of each row and their ids; of equal ones the lowest ids come first."""
    rows, vocab = logits.shape
    if parts == 1 or vocab % parts or vocab // parts < count:
        return highest(logits, count)
    values, ids = jax.lax.top_k(logits.reshape(rows, parts, -1), count)
    ids = ids + (jnp.arange(parts, dtype=jnp.int32) * (vocab // parts))[:, None]
    values, order = jax.lax.top_k(values.reshape(rows, -1), count)
    return values, jnp.take_along_axis(ids.reshape(rows, -1), order, axis=-1)


def highest(logits: Float[Array, "R V"], count: int) -> tuple[Float[Array, "R count"], Int[Array, "R count"]]:
    """Returns jax.lax.top_k. Rows are read once, and only groups with the highest peaks are sorted.

    Before an id among the `count` highest come fewer than `count` others. So fewer groups come before its own: each of them has
    a higher peak, or an equal one at a lower id."""
    rows, vocab = logits.shape
    groups = -(-vocab // GROUP)
    if groups <= 2 * count:
        return tuple(jax.lax.top_k(logits, count))
    grouped = jnp.pad(logits, ((0, 0), (0, groups * GROUP - vocab)), constant_values=-jnp.inf).reshape(rows, groups, -1)
    # In the order of ids, for those that tie.
    first = jnp.sort(jax.lax.top_k(jnp.max(grouped, axis=-1), count)[1], axis=-1)
    values, at = jax.lax.top_k(jnp.take_along_axis(grouped, first[..., None], axis=1).reshape(rows, -1), count)
    return values, jnp.take_along_axis(first, at // GROUP, axis=-1) * GROUP + at % GROUP


def keys_of(values: Float[Array, ...]) -> UInt32[Array, ...]:
    """Returns unsigned integers in the order of the floats. Zeros of both signs have one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    return jnp.where(bits >= SIGN, ~bits, bits | SIGN)


def values_of(keys: UInt32[Array, ...]) -> Float[Array, ...]:
    """Returns the floats of `keys_of`."""
    bits = jnp.where(keys >= SIGN, keys ^ SIGN, ~keys)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _largest(
    keys: UInt32[Array, "R V"], enough: Callable[[Bool[Array, "R V"]], Bool[Array, " R"]]
) -> UInt32[Array, " R"]:
    """Returns the largest key of each row for which the ids at or above it are enough."""

    def bit(number, found):
        higher = found | (SIGN >> jnp.uint32(number))
        return jnp.where(enough(keys >= higher[:, None]), higher, found)

    return jax.lax.fori_loop(0, 32, bit, jnp.zeros(keys.shape[0], jnp.uint32))
