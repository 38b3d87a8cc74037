"""Weight sync: from the learner's layout to the engine's.

The arrays decide between three cases:
- `shared`: same dtype and layout. The engine uses the learner's buffers.
- `cast`: another dtype, same layout. One compiled program writes into the buffers of the old weights.
- `relayout`: another sharding or other devices. Leaf by leaf, each old leaf is freed before the new one is made.

In the last two cases the engine owns its copy. At most one leaf exists at any time besides the weights of learner and
engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding


class Torn(RuntimeError):
    """A swap failed after its checks. The old weights may be used up, so the engine cannot continue."""


class NotFinite(ValueError):
    """New weights hold a number that is not finite."""


def check_finite(params: Any) -> None:
    """Reads one scalar from the device.

    Raises:
      NotFinite: a weight is not finite.
    """
    if not bool(_finite(params)):
        raise NotFinite("swap: the new weights are not finite")


@jax.jit
def _finite(tree: Any) -> Any:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


class WeightLayout:
    """The engine's placement of weights: `shardings`, a tree like the weights, and `dtype`."""

    def __init__(self, shardings: Any, dtype: Any):
        self.shardings, self.dtype = shardings, dtype
        self._first = jax.jit(self._cast, out_shardings=shardings)
        self._into = jax.jit(
            lambda old, new: self._cast(new), out_shardings=shardings, donate_argnums=0, keep_unused=True
        )
        self._narrow = jax.jit(self._cast)
        self._copy = jax.jit(jnp.copy)

    def _cast(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(self.dtype), tree)

    def case(self, params: Any) -> str:
        """Returns "shared", "cast" or "relayout"."""
        pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(self.shardings), strict=True))
        if not all(x.sharding.is_equivalent_to(want, x.ndim) for x, want in pairs):
            return "relayout"
        return "shared" if all(x.dtype == self.dtype for x, _ in pairs) else "cast"

    def check(self, old: Any, new: Any) -> None:
        """Checks new weights before a swap.

        Raises:
          ValueError: trees or shapes differ.
          NotFinite: a value is not finite.
        """
        was, now = jax.tree.structure(old), jax.tree.structure(new)
        if was != now:
            raise ValueError(
                f"swap: the new weights have {now.num_leaves} leaves in another tree than the {was.num_leaves} in use"
            )
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True):
            if a.shape != b.shape:
                raise ValueError(f"swap: {jax.tree_util.keystr(path)} has shape {b.shape}, in use is {a.shape}")
        check_finite(new)

    def place(self, params: Any) -> Any:
        """Returns the first weights: the engine's own copy, unless shared."""
        if self._apart(params):
            return jax.tree.map(self._sent, params, self.shardings)
        return params if self.case(params) == "shared" else self._first(params)

    def _apart(self, params: Any) -> bool:
        """Returns whether the weights are on other devices than this layout's."""
        return jax.tree.leaves(params)[0].sharding.device_set != jax.tree.leaves(self.shardings)[0].device_set

    def memory(self, old: Any, new: Any) -> Any:
        """Returns the compiler's `memory_analysis()` of the program that `replace` runs in case `cast`."""
        return self._into.lower(old, new).compile().memory_analysis()

    def replace(self, old: Any, new: Any, owned: bool = True) -> Any:
        """Returns the next weights. `old` is used up, unless shared or not `owned` (others use its buffers too).

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
        """Returns the weights in this layout, of the same dtype, and whether the engine alone uses them.

        Where `owned`, each old leaf is freed once the new one exists. If the old and new devices differ but overlap,
        new leaves share the pieces that stay in place. Then old leaves are only dropped, and a result of weights that
        were not `owned` is not owned either.
        """
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
        """Returns the successor of one leaf. Frees the old leaf first where `owned`."""
        if owned:
            old.delete()
        return self._sent(new, sharding)

    def _sent(self, new: jax.Array, sharding: Any) -> jax.Array:
        """Returns one leaf in another sharding.

        `device_put` copies between devices directly. A compiled program would use collectives, which are slower on CPU
        (scripts/results/swap-live.json holds the times). Between processes `device_put` cannot copy.
        """
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
    """Returns whether `device_put` between two shardings reuses pieces on common devices.

    It does so whatever may_alias says (jax 0.10).
    """
    return one.device_set != other.device_set and not one.device_set.isdisjoint(other.device_set)


def brought_to(leaf: jax.Array, sharding: Any) -> jax.Array:
    """Returns `leaf` in `sharding`. If the device sets differ but overlap, pieces that stay in place are reused."""
    if jax.process_count() == 1 or leaf.sharding.device_set == sharding.device_set:
        return jax.device_put(leaf, sharding, may_alias=False)
    return within_processes(leaf, sharding)


def within_processes(leaf: jax.Array, sharding: Any) -> jax.Array:
    """Does the same as `brought_to` between processes, where jax.device_put cannot.

    Each device gets its piece from a device of its own process, preferably from itself.
    """
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
    """Returns `new` in the sharding `home`, on equally many other devices. `new` stays in place.

    Each learner device is paired with an engine device of the same process, which gets a copy of its piece. Then a
    program over the engine's devices, which every process enters, assembles the pieces of each replica. Between
    processes jax.device_put cannot do this. A program over both kinds of devices would make each wait for the other.
    Bits arrive unchanged: they are copied, never added.
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
