"""Log-probs of given tokens, and entropies, without the logits of a whole batch in memory.

Invariant: at most `chunk` tokens have their [V] logits in memory at once, in the forward and the backward pass. The
backward pass recomputes them. When the whole batch fits in one chunk, nothing is recomputed. Chunks are cut along
time, so rows stay on their devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

NOT_KEPT = -1e30  # score of an id that cannot be drawn: its probability is exactly 0, and no 0 * inf arises
LOG_RATIO_BOUND = 20.0  # log-ratios are clamped to +-20 before exp, as verl does


def of_logits(
    logits: Float[Array, "*rows V"], targets: Int[Array, "*rows"], temperature: float = 1.0
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Returns log softmax(logits / temperature) at `targets`, and the entropy of that distribution, in nats.

    The chosen logit is found by comparing ids, not by indexing:
    - The comparison fuses into the sums over V that are computed anyway.
    - It is local when V is split over devices.
    - Its gradient is no scatter.

    On CPU comparing is faster at every vocabulary tried (scripts/results/choices.json, by scripts/bench.py choices).
    """
    assert logits.ndim == targets.ndim + 1 and logits.shape[:-1] == targets.shape, (logits.shape, targets.shape)
    assert jnp.issubdtype(logits.dtype, jnp.floating) and jnp.issubdtype(targets.dtype, jnp.integer), (
        logits.dtype,
        targets.dtype,
    )
    scores = logits / temperature
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    shifted = scores - top
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=-1)
    chosen = jnp.sum(jnp.where(jnp.arange(scores.shape[-1]) == targets[..., None], shifted, 0.0), axis=-1)
    log_total = jnp.log(total)
    return chosen - log_total, log_total - jnp.sum(weights * shifted, axis=-1) / total


def score_norms(
    logits: Float[Array, "*rows V"], targets: Int[Array, "*rows"], temperature: float = 1.0
) -> tuple[Float[Array, "*rows"]]:
    """Returns 1 - 2 p + sum p_v^2, the squared norm of the slope of the target's log-prob by the scores.

    p is softmax(logits / temperature), at the target and at every id v.
    """
    probs = jax.nn.softmax(logits / temperature, axis=-1)
    own = jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], probs, 0.0), axis=-1)
    return (1.0 - 2.0 * own + jnp.sum(probs * probs, axis=-1),)


def members(kept: Int[Array, "*rows K"], size: int, first: int | Array = 0) -> Bool[Array, "*rows size"]:
    """Returns which of the ids first .. first + size - 1 each row keeps. A row without ids keeps all of them.

    `kept`: the ids of a row, -1 behind the last one."""

    def of_row(ids):
        places = jnp.where((ids >= first) & (ids < first + size), ids - first, size)
        return jnp.zeros(size, bool).at[places].set(True, mode="drop") | (ids[0] < 0)

    for _ in range(kept.ndim - 1):
        of_row = jax.vmap(of_row)
    return of_row(kept)


def chosen(
    head: Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    *,
    temperature: float,
    chunk: int,
    statistics: Callable[..., tuple[jax.Array, ...]] = of_logits,
    kept: Int[Array, "B T K"] | None = None,
) -> tuple[Float[Array, "B T"], ...]:
    """Returns the log-prob of targets[b, t] given hidden[b, t], and the entropy, both in the dtype of the logits.

    Args:
      head: hidden -> logits. It may close over weights that are differentiated.
      temperature: divides the logits. For sampling temperature 0 pass 1, because the engine's log-probs are then of 1.
      chunk: tokens, over all rows, whose logits may exist at once.
      statistics: what is computed of logits and targets, in place of log-prob and entropy.
      kept: the ids that each target was drawn from (`members`). The law is then of these ids alone: z_y - logsumexp of z
        over them (DeepSeek-V3.2, arXiv 2512.02556, section 3.1). None: all ids.
    """
    assert hidden.ndim == 3 and targets.shape == hidden.shape[:2], (hidden.shape, targets.shape)

    def run(h, ids, *among):
        logits = head(h)
        if not among:
            return statistics(logits, ids, temperature)
        scores = jnp.where(members(among[0], logits.shape[-1]), logits / temperature, NOT_KEPT)
        return statistics(scores, ids, 1.0)

    return by_chunks(run, (hidden, targets) if kept is None else (hidden, targets, kept), chunk)


def by_chunks(run: Callable[..., tuple], arrays: Sequence[Array], chunk: int) -> tuple:
    """Returns run(*arrays), computed for pieces [B, C, ...] that are cut along time and computed again in the backward pass.

    Args:
      run: a function of the tokens one by one. Its results are [B, C].
      arrays: [B, T, ...] each.
      chunk: the most tokens of a piece, over all rows.
    """
    B, T = arrays[0].shape[:2]
    width = max(1, chunk // B)
    if width >= T:
        return run(*arrays)
    count = -(-T // width)
    pad = count * width - T

    def cut(x):  # [B, T, ...] -> [count, B, width, ...]
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, count, width, *x.shape[2:]), 1, 0)

    parts = jax.lax.map(jax.checkpoint(lambda pieces: run(*pieces)), tuple(map(cut, arrays)))
    return tuple(jnp.moveaxis(part, 0, 1).reshape(B, count * width)[:, :T] for part in parts)


def log_ratio(logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.clip(logprobs - old_logprobs, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def sequence_mean(
    values: Float[Array, "B T"], mask: Bool[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Returns, at each token, the mean of the masked values of its segment of the row, or 0 without masked values.

    All pairs of tokens are compared. The comparison fuses into reductions, where a segment sum would be a scatter.
    """
    same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & mask[:, None, :]
    total = jnp.sum(jnp.where(same, values[:, None, :], 0.0), axis=-1)
    return total / jnp.maximum(jnp.sum(same, axis=-1, dtype=jnp.int32), 1).astype(values.dtype)


def sequence_length(mask: Bool[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns, at each token, the number of masked tokens of its segment of the row."""
    return jnp.sum((segment_ids[:, :, None] == segment_ids[:, None, :]) & mask[:, None, :], axis=-1, dtype=jnp.int32)


def assert_alike(*arrays: jax.Array) -> None:
    """Asserts one shape [B, T] and one floating dtype."""
    for array in arrays:
        assert array.ndim == 2 and array.shape == arrays[0].shape, [a.shape for a in arrays]
        assert array.dtype == arrays[0].dtype and jnp.issubdtype(array.dtype, jnp.floating), [a.dtype for a in arrays]
