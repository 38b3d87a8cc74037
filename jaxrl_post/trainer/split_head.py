"""Log-probs and entropies from a head that stays split over the vocabulary, on all chips of fsdp x tensor.

The matrix moves once per micro-batch, before the loop over chunks of tokens. In the loop activations travel: [tokens, D]
to every chip, a few sums per token back, and the gradient of the activations. The gradient of the matrix is added up
where its part lies, in float32 or wider, and moves once after the loop.

Invariant: inside the loop no collective has an axis of the vocabulary. Values are those of algorithms/logprobs.py, up
to the order of sums. At most `chunk` tokens, over all rows, have their logits in memory at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl_post.algorithms import logprobs
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes


def serves(mesh: Mesh) -> bool:
    """Returns whether `mesh` has more than one part for the head. Otherwise there is nothing to split."""
    return meshes.vocab_shards(mesh) > 1


@dataclass(frozen=True, kw_only=True)
class _Head:
    """What is fixed in a run.

    - axis: of the vocabulary in the matrix: 0 for a tied embedding [V, D], 1 for a head [D, V]
    - width: tokens of each row in a chunk
    - dtype: in which activations and matrix are multiplied
    - exchange: how the chips along fsdp exchange parts of the matrix, `_at_once` or `_by_parts`
    """

    mesh: Mesh
    axis: int
    vocab: int
    used: int
    cap: float | None
    temperature: float
    width: int
    dtype: Any
    exchange: Callable[[Array, int], Array]

    @property
    def wide(self) -> Any:
        return jnp.promote_types(self.dtype, jnp.float32)

    def on_shards(self, run: Callable, given: str, made: str) -> Callable:
        return meshes.by_vocab_shards(self.mesh, functools.partial(run, self), self.axis, given, made)

    def ids(self, matrix: Array) -> Array:
        size = matrix.shape[self.axis]
        return jax.lax.axis_index(meshes.VOCAB_SHARDS) * size + jnp.arange(size)

    def scores(self, rows: Array, matrix: Array, ids: Array, kept: Array) -> tuple[Array, Array]:
        """Returns scores [n, v] after soft cap, mask and temperature, and their slope by the logits.

        `kept`: the ids that each row may draw, [n, K] (logprobs.members); with K = 0 all."""
        form = "nd,dv->nv" if self.axis else "nd,vd->nv"
        out = jnp.einsum(form, rows, matrix, preferred_element_type=self.wide)
        slope = jnp.ones_like(out)
        if self.cap is not None:
            bent = jnp.tanh(out / self.cap)
            out, slope = self.cap * bent, 1 - bent * bent
        meant = ids < (self.used or self.vocab)
        if kept.shape[-1]:
            meant = meant & logprobs.members(kept.reshape(-1, kept.shape[-1]), ids.size, ids[0])
        out, slope = out / self.temperature, slope / self.temperature
        return jnp.where(meant, out, decoder.NOT_ALLOWED), jnp.where(meant, slope, 0)


def chosen(
    policy: Any,
    model: decoder.ModelConfig,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    *,
    temperature: float,
    chunk: int,
    mesh: Mesh,
    kept: Int[Array, "B T K"] | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Returns the log-prob of targets[b, t] given hidden[b, t], and the entropy, as algorithms.logprobs.chosen does.

    Args:
      policy: the tree of params. Its head, or its tied embedding, is differentiated.
      hidden: rows over data x expert x fsdp, whole along tensor.
      chunk: tokens, over all rows, whose logits may exist at once.
      kept: as in algorithms.logprobs.chosen.
    """
    matrix, axis = (policy["embed"], 0) if model.tied else (policy["head"], 1)
    head = _Head(
        mesh=mesh,
        axis=axis,
        vocab=model.vocab_size,
        used=model.used_vocab,
        cap=model.final_soft_cap,
        temperature=temperature,
        width=min(max(1, chunk // hidden.shape[0]), hidden.shape[1]),
        dtype=hidden.dtype,
        exchange=_by_parts if mesh.devices.flat[0].platform == "tpu" else _at_once,
    )
    with jax.named_scope("split_head"):
        missing = -model.vocab_size % meshes.vocab_shards(mesh)
        padding = [(0, missing if side == axis else 0) for side in range(2)]
        padded = jnp.pad(matrix, padding) if missing else matrix
        return _log_laws(head, hidden, padded, targets, kept if kept is not None else targets[..., None][..., :0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_laws(head: _Head, hidden: Array, matrix: Array, targets: Array, kept: Array) -> tuple[Array, Array]:
    return _forward(head, hidden, matrix, targets, kept)[0]


def _forward(
    head: _Head, hidden: Array, matrix: Array, targets: Array, kept: Array
) -> tuple[tuple[Array, Array], tuple]:
    run = head.on_shards(_laws_of_shard, "rhrr", "rrrm")
    logps, entropies, totals, parts = run(hidden, matrix.astype(head.dtype), targets, kept)
    # An empty array carries the matrix's dtype: residuals are arrays.
    return (logps, entropies), (hidden, parts, targets, kept, entropies, totals, jnp.empty((0,), matrix.dtype))


def _backward(head: _Head, saved: tuple, slopes: tuple[Array, Array]) -> tuple[Array, Array, None, None]:
    hidden, parts, targets, kept, entropies, totals, stored = saved
    of_hidden, of_matrix = head.on_shards(_slopes_of_shard, "rmrrrrrr", "rh")(
        hidden, parts, kept, targets, entropies, totals, *slopes
    )
    return of_hidden, of_matrix.astype(stored.dtype), None, None


_log_laws.defvjp(_forward, _backward)


def _laws_of_shard(
    head: _Head, hidden: Array, matrix: Array, targets: Array, kept: Array
) -> tuple[Array, Array, Array, Array]:
    """Returns log-probs, entropies and the logarithm of the normaliser, [b, T] each, of this chip's rows.

    The fourth result is the matrix for this chip's part of the vocabulary.

    `matrix`: what this chip holds of the learner's weights: a part of D, for the vocabulary of all chips along fsdp.
    """
    matrix = head.exchange(matrix, head.axis)
    ids, targets, kept = head.ids(matrix), _gathered(targets), _gathered(kept)

    def one(_, piece):
        rows, goals = _gathered(piece[0]), piece[1]
        scores, _ = head.scores(rows.reshape(-1, rows.shape[-1]), matrix, ids, piece[2])
        top = jax.lax.pmax(jnp.max(scores, axis=-1, keepdims=True), meshes.VOCAB_SHARDS)
        shifted = scores - top
        weights = jnp.exp(shifted)
        mine = jnp.where(ids == goals.reshape(-1, 1), shifted, 0)
        sums = jnp.stack([jnp.sum(x, axis=-1) for x in (weights, weights * shifted, mine)])
        total, moment, picked = jax.lax.psum(sums, meshes.VOCAB_SHARDS)
        log_total = jnp.log(total)
        found = picked - log_total, log_total - moment / total, top[:, 0] + log_total
        return None, tuple(_own(x.reshape(goals.shape), piece[0].shape[0]) for x in found)

    _, parts = jax.lax.scan(one, None, (_cut(head, hidden), _cut(head, targets), _cut(head, kept)))
    return *(_joined(part, hidden.shape[1]) for part in parts), matrix


def _slopes_of_shard(
    head: _Head, hidden: Array, matrix: Array, kept: Array, targets: Array, *per_token: Array
) -> tuple[Array, Array]:
    """Returns the gradients of this chip's rows of `hidden`, and of what it holds of the learner's weights.

    Args:
      matrix: for this chip's part of the vocabulary.
      per_token: entropies, totals, and the gradients by log-prob and by entropy, [b, T] each.
    """
    ids = head.ids(matrix)
    forms = ("nv,dv->nd", "nd,nv->dv") if head.axis else ("nv,vd->nd", "nd,nv->vd")

    def one(of_matrix, piece):
        rows, (goals, entropy, total, by_logp, by_entropy) = _gathered(piece[0]), (x.reshape(-1, 1) for x in piece[1])
        shape = rows.shape
        rows = rows.reshape(-1, shape[-1])
        scores, slope = head.scores(rows, matrix, ids, piece[2])
        logs = scores - total
        probs = jnp.exp(logs)
        by_score = by_logp * ((ids == goals) - probs) - by_entropy * probs * (logs + entropy)
        by_logit = (by_score * slope).astype(head.dtype)
        of_rows = jnp.einsum(forms[0], by_logit, matrix, preferred_element_type=head.wide).reshape(shape)
        of_rows = jax.lax.psum_scatter(of_rows, meshes.FSDP, scatter_dimension=0, tiled=True)
        of_rows = jax.lax.psum(of_rows, meshes.TENSOR).astype(head.dtype)
        return of_matrix + jnp.einsum(forms[1], rows, by_logit, preferred_element_type=head.wide), of_rows

    pieces = _cut(head, hidden), tuple(_cut(head, _gathered(x)) for x in (targets, *per_token))
    pieces = (*pieces, _cut(head, _gathered(kept)))
    of_matrix, parts = jax.lax.scan(one, jnp.zeros(matrix.shape, head.wide), pieces)
    return _joined(parts, hidden.shape[1]), head.exchange(jax.lax.psum(of_matrix, meshes.COPIES), 1 - head.axis)


def _at_once(matrix: Array, cut: int) -> Array:
    """Returns this chip's matrix after an exchange along fsdp.

    Every chip cuts its matrix along the axis `cut` and sends one part to each chip. It joins the parts that it receives along
    the other axis.
    """
    return jax.lax.all_to_all(matrix, meshes.FSDP, cut, 1 - cut, tiled=True)


def _by_parts(matrix: Array, cut: int) -> Array:
    """Does the same as `_at_once`. Columns are copied part by part.

    A part's columns need not begin where a tile does. XLA:TPU writes much code to shift all parts together.
    """
    count = jax.lax.axis_size(meshes.FSDP)
    size, width = matrix.shape[cut] // count, matrix.shape[1]
    if cut == 1:
        parts = jax.lax.map(lambda i: jax.lax.dynamic_slice_in_dim(matrix, i * size, size, 1), jnp.arange(count))
        return jax.lax.all_to_all(parts, meshes.FSDP, 0, 0).reshape(-1, size)
    parts = jax.lax.all_to_all(matrix.reshape(count, size, width), meshes.FSDP, 0, 0)

    # No loop: XLA:TPU would hold the arrays twice. It makes one code for all parts because their places are read at run time.
    places = jax.lax.optimization_barrier(jnp.arange(count) * width)
    whole = jax.lax.empty((size, count * width), matrix.dtype)
    for part in range(count):
        whole = jax.lax.dynamic_update_slice_in_dim(whole, parts[part], places[part], 1)
    return whole


def _gathered(x: Array) -> Array:
    return jax.lax.all_gather(x, meshes.FSDP, tiled=True) if x.size else _repeated(x)


def _repeated(x: Array) -> Array:
    """Returns an array without values in the shape that gathering gives it. It needs no exchange."""
    return jnp.zeros((x.shape[0] * jax.lax.axis_size(meshes.FSDP), *x.shape[1:]), x.dtype)


def _own(x: Array, rows: int) -> Array:
    """Returns this chip's rows of what is the same on all chips along fsdp."""
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(meshes.FSDP) * rows, rows)


def _cut(head: _Head, x: Array) -> Array:
    """Returns [B, T, ...] as chunks [count, B, width, ...]. Zeros fill the last one."""
    count = -(-x.shape[1] // head.width)
    x = jnp.pad(x, ((0, 0), (0, count * head.width - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], count, head.width, *x.shape[2:]), 1, 0)


def _joined(parts: Array, tokens: int) -> Array:
    """Returns chunks [count, B, width, ...] as [B, tokens, ...]."""
    whole = jnp.moveaxis(parts, 0, 1)
    return whole.reshape(whole.shape[0], -1, *whole.shape[3:])[:, :tokens]
