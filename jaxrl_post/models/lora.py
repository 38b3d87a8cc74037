"""LoRA (arXiv 2106.09685): a policy of frozen weights and of trained low-rank additions to matrices of its layers.

A layer has leaves NAME_a [inputs, r] and NAME_b [r, outputs] beside a matrix NAME [inputs, outputs]. Beside a stack of
experts [E, inputs, outputs] they are [E, inputs, r] and [E, r, outputs]. Matrices that a checkpoint has as one share an A.
The learner adds scale (x A) B to x W. The engine has one matrix, W + scale A B, which `merged` computes.

Invariant: a merged number is one rounded sum of W and of scale A B, each in float32 or wider. What else a program does
changes no bit of it. So a merge at a publish and a merge of an export agree bit for bit in one layout. In another layout
products of other shapes may be rounded otherwise.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.models import decoder, families
from jaxrl_post.models.layer import PRODUCTS, leading, low_rank, product, with_additions
from jaxrl_post.models.model_config import Lora, ModelConfig

# Names of the matrices in PEFT, in the order of a layer.
_OF_LINEAR_LAYERS = {
    "in_proj_qkv": "linear_qkv",
    "in_proj_qkvz": "linear_qkvz",
    "in_proj_z": "linear_z",
    "in_proj_b": "linear_rate",
    "in_proj_a": "linear_decay",
    "in_proj_ba": "linear_ba",
    "out_proj": "linear_o",
}
MODULES = {f"{name}_proj": name for name in ("q", "k", "v", "o", "gate", "up", "down")} | _OF_LINEAR_LAYERS
ALL = "all-linear"


@functools.partial(jax.tree_util.register_dataclass, data_fields=["base", "adapter"], meta_fields=["lora"])
@dataclass(frozen=True)
class Adapted:
    """A policy whose `adapter` is trained while its `base` is frozen.

    `base` is the tree of a model without lora. `adapter` is {"layers": {"0": {"q_a": ..., "q_b": ...}, ...}}.
    """

    base: Any
    adapter: Any
    lora: Lora


def targets(names: tuple[str, ...], model: ModelConfig) -> tuple[str, ...]:
    """Returns the matrices that names of PEFT's modules mean, in the order of a layer. `all-linear` means all of the model.

    Raises:
      ValueError: a name is of a layer with a gated delta rule, and the model has no such module.
    """
    there = families.modules(plain(model))
    every = [name for name in MODULES if name not in _OF_LINEAR_LAYERS or name in there]
    for name in names:
        if name != ALL and name not in every:
            raise ValueError(
                f"lora.targets: {name} is no module of this model; the nearest valid choice is of {', '.join(every)}"
            )
    return tuple(MODULES[name] for name in every if ALL in names or name in names)


def adapting(model: ModelConfig, lora: Lora) -> ModelConfig:
    return replace(model, lora=lora)


def plain(model: ModelConfig) -> ModelConfig:
    """Returns the model without additions: that of the base, and of a merged policy."""
    return replace(model, lora=None)


def divided(tree: Mapping, model: ModelConfig) -> Adapted:
    """Returns a tree like params of `model` as base and adapter."""
    names = {part for name in with_additions(model.lora) for part in low_rank(name, model.lora)}
    parts = (_chosen(tree, lambda name, kind=kind: (name in names) is kind) for kind in (False, True))
    return Adapted(*parts, model.lora)


def matrices(base: Mapping, lora: Lora) -> tuple[dict, dict]:
    """Returns the matrices of a base that have additions, and all its other leaves."""
    names = with_additions(lora)
    return _chosen(base, lambda name: name in names), _chosen(base, lambda name: name not in names)


def _chosen(tree: Mapping, belongs: Callable[[str], bool]) -> dict:
    """Returns the leaves whose own name belongs. A part of the tree without any is left out."""
    below = {name: _chosen(one, belongs) if isinstance(one, Mapping) else one for name, one in tree.items()}
    return {name: one for name, one in below.items() if (one if isinstance(tree[name], Mapping) else belongs(name))}


def joined(one: Mapping, other: Mapping) -> dict:
    """Returns the leaves of two trees that share none."""
    return {
        name: joined(one[name], other[name]) if name in one and name in other else (one | other)[name]
        for name in one | other
    }


def whole(policy: Any) -> Any:
    """Returns the params that a decoder runs with: base and adapter as one tree. Other policies stay as they are."""
    return joined(policy.base, policy.adapter) if isinstance(policy, Adapted) else policy


def trained(policy: Any) -> Any:
    """Returns the weights that an optimizer step changes."""
    return policy.adapter if isinstance(policy, Adapted) else policy


def with_trained(policy: Any, weights: Any) -> Any:
    """Returns the policy with other trained weights."""
    return replace(policy, adapter=weights) if isinstance(policy, Adapted) else weights


def axes(model: ModelConfig) -> Adapted:
    return divided(decoder.axes(model), model)


def abstract(model: ModelConfig) -> Adapted:
    return divided(decoder.abstract(model), model)


def init(model: ModelConfig, seed: int) -> dict:
    """Returns the adapter that a run begins with, float32 in host memory, the same on every process.

    As in PEFT, A is Kaiming-uniform with a = sqrt(5), which is uniform in +-1/sqrt(inputs), and B is 0. Inputs are those of
    one expert. The noise of a leaf is a function of (seed, its path).
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _drawn("/".join(key.key for key in path), leaf.shape, seed), abstract(model).adapter
    )


def _drawn(path: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    if path.endswith("_b"):
        return np.zeros(shape, np.float32)
    noise = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(path.encode())]))
    inputs = shape[leading(path.rpartition("/")[2]) : -1]
    bound = np.float32(np.prod(inputs) ** -0.5)
    return (2 * noise.random(shape, np.float32) - 1) * bound


# ---- merging


def merged(matrices: Any, adapter: Any, lora: Lora, dtype: Any) -> Any:
    """Returns W + scale A B in `dtype`, a tree like `matrices`. To be traced: one program for all of them."""

    def one(path: tuple, leaf: jax.Array) -> jax.Array:
        *parents, name = (key.key for key in path)
        layer = functools.reduce(lambda tree, parent: tree[parent], parents, adapter)
        return sum_of(leaf, *(layer[part] for part in low_rank(name, lora)), name, lora).astype(dtype)

    return jax.tree_util.tree_map_with_path(one, matrices)


def sum_of(matrix: jax.Array, a: jax.Array, b: jax.Array, name: str, lora: Lora) -> jax.Array:
    """Returns W + scale A B of one matrix, in float32 or wider. To be traced."""
    inputs, outputs = PRODUCTS[product(name)]
    each = "e" * leading(name)
    wide = jnp.promote_types(jnp.promote_types(matrix.dtype, a.dtype), jnp.float32)
    scaled = jax.lax.optimization_barrier(b.astype(wide) * jnp.asarray(lora.scale, wide))
    form = f"{each}{inputs}r,{each}r{outputs}->{each}{inputs}{outputs}"
    addition = jnp.einsum(form, a.astype(wide), scaled, precision=jax.lax.Precision.HIGHEST)
    # The barriers keep products and sums apart: what is fused with them would decide how they are rounded.
    return matrix.astype(wide) + jax.lax.optimization_barrier(addition)


def merge(policy: Adapted) -> dict:
    """Returns the params of the merged policy, float32 or wider, sharded like the base. Its matrices are used up."""
    own, others = matrices(policy.base, policy.lora)
    homes = jax.tree.map(lambda leaf: leaf.sharding, own)
    dtype = jnp.promote_types(jax.tree.leaves(policy.adapter)[0].dtype, jnp.float32)
    run = jax.jit(
        lambda base, adapter: merged(base, adapter, policy.lora, dtype), out_shardings=homes, donate_argnums=0
    )
    return joined(run(own, policy.adapter), jax.tree.map(lambda leaf: leaf.astype(dtype), others))


class Merged(Mapping):
    """The params of a merged policy, float32 or wider. Each leaf is computed when it is asked for, and not kept.

    So an export takes the memory of one matrix, or of a layer's experts. With several processes all of them ask for the same
    leaves, in order.
    """

    def __init__(self, policy: Adapted):
        self._base, self._adapter, self._lora = policy.base, policy.adapter, policy.lora

    def __getitem__(self, name: str) -> Any:
        found = self._base[name]
        if isinstance(found, Mapping):
            return Merged(Adapted(found, self._adapter.get(name, {}), self._lora))
        if f"{name}_b" not in self._adapter:
            return found
        return _one(found, *(self._adapter[part] for part in low_rank(name, self._lora)), name, self._lora)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _one(matrix: jax.Array, a: jax.Array, b: jax.Array, name: str, lora: Lora) -> jax.Array:
    return sum_of(matrix, a, b, name, lora)


def exported(policy: Any) -> Any:
    """Returns the params of a policy without additions: those of `policy`, merged where it has some."""
    return Merged(policy) if isinstance(policy, Adapted) else policy


# ---- which base it is


def digest(base: Any) -> jax.Array:
    """Returns uint32[2], which tells a base from one of other bits. It does not depend on the sharding.

    Every number is mixed with its place by whole-number arithmetic, and the results are added modulo 2**32.
    """
    total = jnp.zeros(2, jnp.uint32)
    for path, leaf in jax.tree_util.tree_leaves_with_path(base):
        name = zlib.crc32("/".join(key.key for key in path).encode())
        total += _mixed(leaf) * np.uint32(name | 1)
    return total


def check_base(mine: Any, theirs: Any, whose: str) -> None:
    """Refuses additions to another base. `mine`, `theirs`: digests, or None for weights without a base."""
    if mine is not None and not np.array_equal(np.asarray(mine), np.asarray(theirs)):
        raise ValueError(
            f"{whose} holds additions to another base than the one here: its weights, or lora.base_dtype, have changed; "
            "put the base back, or begin a new run"
        )


def _mixed(leaf: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(leaf, jnp.uint16 if leaf.dtype.itemsize == 2 else jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):
        place = place * np.uint32(0x9E3779B1) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) + np.uint32(1)

    def added(first: int, second: int) -> jax.Array:
        mixed = bits.astype(jnp.uint32) * np.uint32(first) ^ place * np.uint32(second)
        mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0x2C1B3C6D)
        return jnp.sum(mixed ^ (mixed >> np.uint32(12)), dtype=jnp.uint32)

    return jnp.stack([added(0x85EBCA77, 0xC2B2AE3D), added(0x27D4EB2F, 0x165667B1)])
