"""Families with experts: which experts a checkpoint chooses, by how much, and its gradient beside that in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import parity_arms as arms
import plain_experts
from dense_attend import dense

from jaxrl_post.models import decoder, experts, hf
from jaxrl_post.models.model_config import ModelConfig

# Mistakes that leave the scores as they are: of a function of models/experts.py, what is no longer differentiated.
PLANTED = {
    "gates_without_gradient": ("gates", lambda right, *given, **more: jax.lax.stop_gradient(right(*given, **more))),
    "rows_without_gradient": (
        "mixed",
        lambda right, x, *given, **more: right(jax.lax.stop_gradient(x), *given, **more),
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
    decoder.hidden(params, config, jnp.asarray(tokens), positions, dense(positions), (), routing=routing)
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
    """Of each leaf the largest difference of our float32 gradient from the float64 one, over its largest number there.

    It is the gradient of the sum of log-probs of a golden checkpoint. The float64 one uses the experts that float32 chose.
    """
    tokens, _ = arms.golden(family)
    config, params = hf.load(arms.GOLDENS / family)
    chosen, _ = choices(config, params, tokens)

    def ours(params):
        return of_next(arms.ARMS[arm](config, params, jnp.asarray(tokens)), tokens).sum()

    with _planted(fault):
        found = jax.device_get(jax.jit(jax.grad(ours))(params))
    return {
        jax.tree_util.keystr(path): float(np.abs(leaf - exact).max() / np.abs(exact).max())
        for (path, leaf), exact in zip(
            jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(_exact(config, params, tokens, chosen)), strict=True
        )
    }  # fmt: skip


def _planted(fault: str):
    if not fault:
        return contextlib.nullcontext()
    name, wrong = PLANTED[fault]
    right = getattr(experts, name)
    return mock.patch.object(experts, name, lambda *given, **more: wrong(right, *given, **more))


def _exact(config: ModelConfig, params: dict, tokens: np.ndarray, chosen: Mapping[str, np.ndarray]) -> dict:
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        gradient = jax.grad(lambda params: plain_experts.log_probs(params, config, tokens, chosen).sum())
        return jax.device_get(jax.jit(gradient)(wide))
