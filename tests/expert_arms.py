"""Families with experts: which experts a checkpoint chooses, by how much, and its gradient beside that in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import parity_arms as arms
import plain_decoder
from dense_attend import dense, in_order

from jaxrl_post.models import decoder, experts, hf
from jaxrl_post.models.model_config import ModelConfig

# Mistakes that leave the scores as they are: what is no longer differentiated.
PLANTED = {
    "gates_without_gradient": arms.Computed(
        experts, "gates", lambda right, *given, **more: jax.lax.stop_gradient(right(*given, **more))
    ),
    "rows_without_gradient": arms.Computed(
        experts, "mixed", lambda right, x, *given, **more: right(jax.lax.stop_gradient(x), *given, **more)
    ),
}


def choices(config: ModelConfig, params: dict, tokens: np.ndarray) -> tuple[dict[str, np.ndarray], float]:
    """Experts of each layer that has some, int[B, T, k], and the smallest margin of a chosen score over one that is not."""
    chosen, margins = {}, []

    def choose(layer, scores, per_token, cache):
        ids, cache = experts.highest(layer, scores, per_token, cache)
        chosen[str(layer)] = np.asarray(ids)
        ordered = -np.sort(-np.asarray(scores), axis=-1)
        margins.append((ordered[..., per_token - 1] - ordered[..., per_token]).min())
        return ids, cache

    routing = experts.Routing(choose, experts.ALONE.spread)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    decoder.hidden(
        params, config, jnp.asarray(tokens), positions, dense(positions), (), routing=routing, recur=in_order
    )
    return chosen, float(min(margins))


def of_next(scores, tokens):
    """Log-probs of each token but the first, [B, T-1], of scores [B, T, V]."""
    return jnp.take_along_axis(jax.nn.log_softmax(scores[:, :-1]), jnp.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]


def log_prob_gap(family: str, arm: str) -> float:
    """Largest absolute difference of our float32 log-probs from those of transformers' scores, in nats."""
    tokens, theirs = arms.golden(family)
    config, params = hf.load(arms.GOLDENS / family)
    ours = jax.jit(arms.ARMS[arm], static_argnums=0)(config, params, jnp.asarray(tokens))
    return float(jnp.abs(of_next(ours, tokens) - of_next(theirs, tokens)).max())


def gradients(family: str, arm: str = "packed", fault: str = "") -> dict[str, float]:
    """`by_leaf` of the gradient of the sum of log-probs of a golden checkpoint."""
    tokens, _ = arms.golden(family)
    config, params = hf.load(arms.GOLDENS / family)

    def ours(params):
        return of_next(arms.ARMS[arm](config, params, jnp.asarray(tokens)), tokens).sum()

    return by_leaf(ours, params, exact(config, params, tokens), PLANTED.get(fault))


def by_leaf(ours: Callable, params: dict, exact: dict, fault: arms.Computed | None = None) -> dict[str, float]:
    """Of each leaf the largest difference of our float32 gradient from the exact one, over its largest number there.

    Of a leaf whose gradient is 0 everywhere, the largest number of ours."""
    with arms.wronged(fault) if fault else contextlib.nullcontext():
        found = jax.device_get(jax.jit(jax.grad(ours))(params))
    return {
        jax.tree_util.keystr(path): float(np.abs(leaf - right).max() / (np.abs(right).max() or 1.0))
        for (path, leaf), right in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(exact), strict=True)
    }


def exact(config: ModelConfig, params: dict, tokens: np.ndarray, counted: np.ndarray | None = None) -> dict:
    """The gradient in float64, with the experts that float32 chooses. tokens: [B, T], texts or beginnings of texts.

    counted: 0 at each token but the first that does not count, [B, T-1]; None: all count."""
    chosen, _ = choices(config, params, tokens) if config.experts else ({}, 0.0)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        weights = 1.0 if counted is None else jnp.asarray(counted, np.float64)
        gradient = jax.grad(lambda params: (weights * plain_decoder.log_probs(params, config, tokens, chosen)).sum())
        return jax.device_get(jax.jit(gradient)(wide))
