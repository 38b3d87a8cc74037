"""Learner layout to engine layout.

Three cases, told apart by looking at the arrays: `shared` (same dtype and layout: the engine uses the learner's buffers),
`cast` (another dtype, same layout: one compiled program writes into the buffers of the old weights) and `relayout` (another
sharding, or devices of its own: leaf by leaf, each old leaf given up before its successor is made). In the last two the
engine owns its copy, and at no time does more than one leaf exist beside the learner's weights and the engine's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding


class Torn(RuntimeError):
    """A swap failed when its checks were behind it: the old weights may be used up, so there is nothing to go on with."""


class Layout:
    """Where and as what the engine wants its weights: `shardings`, a tree like the weights, and `dtype`."""

    def __init__(self, shardings: Any, dtype: Any):
        self.shardings, self.dtype = shardings, dtype
        self._finite = jax.jit(
            lambda tree: jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))
        )
        self._first = jax.jit(self._cast, out_shardings=shardings)
        self._into = jax.jit(
            lambda old, new: self._cast(new), out_shardings=shardings, donate_argnums=0, keep_unused=True
        )
        self._narrow = jax.jit(self._cast)
        self._copy = jax.jit(jnp.copy)

    def _cast(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(self.dtype), tree)

    def case(self, params: Any) -> str:
        """shared, cast or relayout."""
        pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(self.shardings), strict=True))
        if not all(x.sharding.is_equivalent_to(want, x.ndim) for x, want in pairs):
            return "relayout"
        return "shared" if all(x.dtype == self.dtype for x, _ in pairs) else "cast"

    def check(self, old: Any, new: Any) -> None:
        """ValueError when trees or shapes differ or a value is not finite."""
        was, now = jax.tree.structure(old), jax.tree.structure(new)
        if was != now:
            raise ValueError(
                f"swap: the new weights have {now.num_leaves} leaves in another tree than the {was.num_leaves} in use"
            )
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True):
            if a.shape != b.shape:
                raise ValueError(f"swap: {jax.tree_util.keystr(path)} has shape {b.shape}, in use is {a.shape}")
        if not bool(self._finite(new)):
            raise ValueError("swap: the new weights are not finite")

    def place(self, params: Any) -> Any:
        """The first weights; the engine's own copy unless shared."""
        if self._apart(params):
            return jax.tree.map(self._sent, params, self.shardings)
        return params if self.case(params) == "shared" else self._first(params)

    def _apart(self, params: Any) -> bool:
        """Whether they lie on other devices."""
        return jax.tree.leaves(params)[0].sharding.device_set != jax.tree.leaves(self.shardings)[0].device_set

    def memory(self, old: Any, new: Any) -> Any:
        """What the compiler says of the program that `replace` runs in case `cast` (`memory_analysis()`)."""
        return self._into.lower(old, new).compile().memory_analysis()

    def replace(self, old: Any, new: Any, owned: bool = True) -> Any:
        """The next weights; `old` is used up unless shared, or not `owned`: others use its buffers too.

        Raises:
          Torn: the device or its runtime failed.
        """
        try:
            return self._replaced(old, new, owned)
        except jax.errors.JaxRuntimeError as error:
            raise Torn(
                f"the swap to new weights failed after its checks, and the old ones may be used up: {error}"
            ) from error

    def _replaced(self, old: Any, new: Any, owned: bool) -> Any:
        case = self.case(new)
        if case == "shared":
            return new
        if case == "cast":
            return self._into(old, new)
        return jax.tree.map(lambda old, new, sharding: self._move(old, new, sharding, owned), old, new, self.shardings)

    def bring(self, held: Any, owned: bool) -> tuple[Any, bool]:
        """Weights that lie as another layout wants them, of the same dtype, and whether nobody but the engine uses them. Where
        `owned`, each leaf is given up once its successor is there. On fewer devices or on more, the two share what stays where it
        is, so old leaves are only let go of, and weights that were not the engine's own are not now."""
        if not owned and self.case(held) == "shared":
            return held, False
        shares = _shares(jax.tree.leaves(held)[0].sharding, jax.tree.leaves(self.shardings)[0])
        give_up = owned and not shares
        return jax.tree.map(
            lambda leaf, sharding: self._bring(leaf, sharding, give_up), held, self.shardings
        ), owned or not shares

    @staticmethod
    def _bring(leaf: jax.Array, sharding: Any, give_up: bool) -> jax.Array:
        brought = jax.block_until_ready(brought_to(leaf, sharding))
        if give_up:
            leaf.delete()
        return brought

    def _move(self, old: jax.Array, new: jax.Array, sharding: Any, owned: bool) -> jax.Array:
        """The successor of one leaf."""
        if owned:
            old.delete()
        return self._sent(new, sharding)

    def _sent(self, new: jax.Array, sharding: Any) -> jax.Array:
        """One leaf onto another sharding. `device_put` copies between devices directly, where a compiled program would use
        collectives, which on CPU is slower (scripts/results/swap-live.json holds the times); between processes it cannot."""
        narrow = (
            self._narrow(new)
            if new.dtype != self.dtype
            else self._copy(new)
            if _shares(new.sharding, sharding)
            else new
        )
        apart = new.sharding.device_set.isdisjoint(sharding.device_set)
        return handed_over(narrow, sharding) if apart and jax.process_count() > 1 else brought_to(narrow, sharding)


def _shares(one: Any, other: Any) -> bool:
    """Whether `device_put` from one sharding to the other takes pieces over that lie on devices of both, whatever may_alias says
    (jax 0.10)."""
    return one.device_set != other.device_set and not one.device_set.isdisjoint(other.device_set)


def brought_to(leaf: jax.Array, sharding: Any) -> jax.Array:
    """`leaf` as `sharding` wants it. On other devices, some of them the same, it takes over pieces that stay where they are."""
    if jax.process_count() == 1 or leaf.sharding.device_set == sharding.device_set:
        return jax.device_put(leaf, sharding, may_alias=False)
    return within_processes(leaf, sharding)


def within_processes(leaf: jax.Array, sharding: Any) -> jax.Array:
    """As `brought_to` between processes, where jax.device_put cannot: each device gets its piece from one of its own process that
    has it, itself first."""
    there = {shard.device: shard.data for shard in leaf.addressable_shards}
    having = {_bounds(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
    before = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    pieces = []
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        same = device in there and _bounds(before[device], leaf.shape) == _bounds(index, leaf.shape)
        pieces.append(
            there[device] if same else jax.device_put(having[_bounds(index, leaf.shape)], device, may_alias=False)
        )
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, pieces)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple:
    return tuple(piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True))


def handed_over(new: jax.Array, home: NamedSharding) -> jax.Array:
    """`new`, which stays where it is, as `home` on other devices, of which there are equally many, wants it.

    Each learning device is paired with a generating one of the same process, which gets a copy of its piece; then a program
    over the generating devices, which every process enters, puts the pieces of a replica together. Between processes
    jax.device_put cannot do that, and a program over both kinds would make each wait for the other. Bits arrive as they were:
    they are copied, never added.
    """
    learner = new.sharding.mesh
    twin = dict(zip(learner.devices.flat, home.mesh.devices.flat, strict=True))
    pieces = [jax.device_put(shard.data, twin[shard.device], may_alias=False) for shard in new.addressable_shards]
    there = jax.sharding.Mesh(
        home.mesh.devices.reshape(learner.devices.shape), learner.axis_names, axis_types=learner.axis_types
    )
    arrived = jax.make_array_from_single_device_arrays(new.shape, NamedSharding(there, new.sharding.spec), pieces)
    return jax.block_until_ready(_joining(home)(arrived))


@functools.cache
def _joining(home: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda leaf: leaf, out_shardings=home)
