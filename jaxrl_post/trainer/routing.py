"""How a micro-batch's tokens come to their experts: the learner's own choice, or the one that the engine recorded.

Invariant: gates always come from the live scores. A recorded route decides only which experts they belong to (R3,
arXiv 2510.11370). A token without a record is routed by its own scores.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_post.config import AlgorithmConfig
from jaxrl_post.kernels import choice
from jaxrl_post.models import experts
from jaxrl_post.models.model_config import ModelConfig
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel import row_pieces


class Routed(NamedTuple):
    """What the layers found at each token, summed over the layers with experts, [B*T] each.

    - balance: E / k times the sum over experts of the share of the sequence's choices that fell on each, times its
      probability at this token. The mean over a sequence is the load-balance loss of Switch (arXiv 2101.03961 eq. 4) of
      that sequence. Even loads give 1.
    - z: the squared logsumexp of the scores (ST-MoE, arXiv 2202.08906 eq. 5)
    - imbalance: the same as `balance`, with the token's own choices for the probabilities
    - drift: 1 where the scores would choose another set than the recorded one
    - other: 1 where another set than the recorded one is used
    - recorded: 1 where there is a recorded one
    """

    balance: Array
    z: Array
    imbalance: Array
    drift: Array
    other: Array
    recorded: Array

    @classmethod
    def zeros(cls, tokens: int, dtype: jnp.dtype) -> Routed:
        return cls(*(jnp.zeros(tokens, dtype) for _ in cls._fields))


def of_batch(
    model: ModelConfig,
    rows: row_pieces.RowPieces,
    segment_ids: Int[Array, "B T"],
    words: Int[Array, "b t words"] | None,
    replay: bool,
) -> experts.Routing:
    """Returns the routing of a micro-batch, whose cache is a `Routed`. Tokens are those of pieces of rows.

    Args:
      segment_ids: of whole rows.
      words: the route of each token's next one, which is that of the row at this token. None: nothing is recorded.
      replay: recorded routes are used, not only compared with.
    """
    assert model.experts is not None
    place = np.zeros(model.layers, np.int32)  # of a layer's routes among those that are recorded
    place[list(model.expert_layers)] = np.arange(len(model.expert_layers))
    flat = None if words is None else words.reshape(segment_ids.size, -1)
    routes = None if flat is None else experts.unpacked(flat, model)

    def choose(layer, scores: Float[Array, "BT E"], per_token: int, routed: Routed) -> tuple[Array, Routed]:
        ids, _ = experts.highest(layer, scores, per_token, None)
        drift = other = recorded = jnp.zeros(len(scores), scores.dtype)
        if routes is not None:
            theirs = routes[jnp.asarray(place)[layer]]
            there = theirs[:, 0] >= 0
            used = jnp.where(there[:, None], theirs, ids) if replay else ids
            drift, other = (there & _differ(theirs, one) for one in (ids, used))
            drift, other, recorded = (x.astype(scores.dtype) for x in (drift, other, there))
            ids = used
        chosen = jnp.sum(jax.nn.one_hot(ids, scores.shape[-1], dtype=scores.dtype), axis=-2)
        shares = _shares(chosen, segment_ids, rows)
        even = scores.shape[-1] / per_token
        added = Routed(
            even * jnp.sum(shares * jax.nn.softmax(scores, axis=-1), axis=-1),
            jax.nn.logsumexp(scores, axis=-1) ** 2,
            even / per_token * jnp.sum(shares * chosen, axis=-1),
            drift,
            other,
            recorded,
        )
        return ids, jax.tree.map(jnp.add, routed, added)

    spread = functools.partial(meshes.by_experts, rows.mesh, rows=meshes.ROWS)
    return experts.Routing(choose, spread, choice.of_experts(rows.mesh.devices.flat[0]))


def _differ(one: Int[Array, "BT k"], other: Int[Array, "BT k"]) -> Array:
    """Returns whether two choices of experts differ as sets, bool[BT]."""
    return jnp.any(jnp.sort(one, axis=-1) != jnp.sort(other, axis=-1), axis=-1)


def metrics(routed: Routed, model: ModelConfig) -> dict[str, Array]:
    """Returns metrics of each token by name, each a mean over the layers with experts."""
    means = {
        "router_imbalance": routed.imbalance,
        "router_drift": routed.drift,
        "router_mismatch": routed.other,
        "recorded_routes": routed.recorded,
    }
    return {f"training/{name}": jax.lax.stop_gradient(x) / len(model.expert_layers) for name, x in means.items()}


def losses(routed: Routed, model: ModelConfig, algorithm: AlgorithmConfig) -> dict[str, tuple[float, Array]]:
    """Returns the weight and the values by token of each term of the loss about routers, by metric name."""
    named = {
        "actor/router_aux_loss": (algorithm.router_aux_loss_coef, routed.balance),
        "actor/router_z_loss": (algorithm.router_z_loss_coef, routed.z),
    }
    return {name: (coef, x / len(model.expert_layers)) for name, (coef, x) in named.items()}


def _shares(
    chosen: Float[Array, "BT E"], segment_ids: Int[Array, "B T"], pieces: row_pieces.RowPieces
) -> Float[Array, "BT E"]:
    """Returns, at each token, how often its segment chose each expert, divided by the segment's tokens."""
    B, T = segment_ids.shape

    def of_row(chosen: Array, ids: Array) -> Array:
        totals = jax.ops.segment_sum(chosen, ids, T + 1)
        counts = jax.ops.segment_sum(jnp.ones_like(ids, chosen.dtype), ids, T + 1)
        return totals[ids] / counts[ids][:, None]

    cut = jax.lax.stop_gradient(chosen).reshape(B * pieces.context, T // pieces.context, -1)
    rows = jax.vmap(of_row)(pieces.joined(cut), segment_ids)
    return pieces.cut(rows).reshape(B * T, -1)
