"""Weight sync: from the learner's layout to the engine's.

The arrays decide between three cases:
- `shared`: same dtype and layout. The engine uses the learner's buffers.
- `cast`: another dtype, same layout. One compiled program writes into the buffers of the old weights.
- `relayout`: another sharding or other devices. Leaves move in groups of bounded bytes (relayout.py), and the old
  leaves of a group are freed before the new ones are made.

Where the engine's devices are those of other processes, a relayout is a crossing (relayout.crossed).

In every case new weights are checked first. They are read for that only where the caller cannot say that they are finite.

In the last two cases the engine owns its copy. At most one group exists at any time besides the weights of learner and
engine. No weight passes the memory of a host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel import relayout
from jaxrl_post.parallel.exchange import Relays


class Torn(RuntimeError):
    """A swap failed after its checks. The old weights may be used up, so the engine cannot continue."""


@contextlib.contextmanager
def torn_if_it_fails() -> Iterator[None]:
    """Raises Torn where the device or its runtime fails within."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise Torn(
            f"the swap to new weights failed after its checks, and the old ones may be used up: {error}"
        ) from error


class NotFinite(ValueError):
    """New weights hold a number that is not finite."""


def check_finite(params: Any, finite: Any = None) -> None:
    """Reads one scalar from the device.

    Args:
      finite: device bool that says whether all weights are finite. None: they are read.

    Raises:
      NotFinite: a weight is not finite.
    """
    _refuse_not_finite(bool(_finite(params) if finite is None else finite))


def _refuse_not_finite(finite: bool) -> None:
    if not finite:
        raise NotFinite("swap: the new weights are not finite")


def all_finite(tree: Any) -> jax.Array:
    """Returns whether every element of every leaf is finite.

    The elements that are not finite are counted. The count is 0 exactly where there is none, whatever it rounds to.
    It is in float32, as compilers for GPUs and TPUs add that up in the kernel that writes the leaf. Bools cost a TPU
    another pass.
    """
    counts = [jnp.sum(~jnp.isfinite(x), dtype=jnp.float32) for x in jax.tree.leaves(tree)]
    return jnp.sum(jnp.stack(counts)) == 0


_finite = jax.jit(all_finite)


class WeightLayout:
    """The engine's placement of weights: `shardings`, a tree like the weights, and `dtype`. None: that of each leaf."""

    def __init__(self, shardings: Any, dtype: Any):
        self.shardings, self.dtype = shardings, dtype
        self._first = jax.jit(self._cast, out_shardings=shardings)
        self._into = jax.jit(
            lambda old, new: self._cast(new), out_shardings=shardings, donate_argnums=0, keep_unused=True
        )
        self._copied = jax.jit(lambda leaves: [jnp.array(x, dtype=self.dtype, copy=True) for x in leaves])

    def _cast(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(self._dtype_of(x)), tree)

    def _dtype_of(self, leaf: Any) -> Any:
        return leaf.dtype if self.dtype is None else self.dtype

    def case(self, params: Any) -> str:
        """Returns "shared", "cast" or "relayout"."""
        pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(self.shardings), strict=True))
        if not all(x.sharding.is_equivalent_to(want, x.ndim) for x, want in pairs):
            return "relayout"
        return "shared" if all(x.dtype == self._dtype_of(x) for x, _ in pairs) else "cast"

    def check(self, old: Any, new: Any, finite: Any = None) -> None:
        """Checks new weights before a swap.

        Args:
          finite: device bool that says whether all new weights are finite. None: they are read.

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
        self._check_finite(new, finite)

    def _check_finite(self, params: Any, finite: Any) -> None:
        check_finite(params, finite)

    def place(self, params: Any) -> Any:
        """Returns the first weights: the engine's own copy, unless shared."""
        case = self.case(params)
        if case == "relayout":
            return self._moved(params)
        return params if case == "shared" else self._first(params)

    def memory(self, old: Any, new: Any) -> Any:
        """Returns the compiler's `memory_analysis()` of the program that `replace` runs in case `cast`."""
        return self._into.lower(old, new).compile().memory_analysis()

    def replace(self, old: Any, new: Any, owned: bool = True) -> Any:
        """Returns the next weights. `old` is used up, unless shared or not `owned` (others use its buffers too).

        Raises:
          Torn: the device or its runtime failed.
        """
        with torn_if_it_fails():
            return self._replaced(old, new, owned)

    def _replaced(self, old: Any, new: Any, owned: bool) -> Any:
        case = self.case(new)
        if case == "shared":
            return new
        if case == "cast":
            return self._into(old, new)
        return self._moved(new, jax.tree.leaves(old) if owned else None)

    def _moved(self, new: Any, old: Sequence[jax.Array] | None = None) -> Any:
        """Returns `new` in this layout. Frees the old leaves of each group, if given, before it is made."""
        leaves, tree = jax.tree.flatten(new)
        homes, out = jax.tree.leaves(self.shardings), list(leaves)
        for group in relayout.groups(leaves, homes):
            for at in group if old is not None else ():
                old[at].delete()
            for at, leaf in zip(group, self._sent([leaves[at] for at in group], [homes[at] for at in group])):
                out[at] = leaf
        return jax.tree.unflatten(tree, out)

    def free(self, held: Any, owned: bool) -> None:
        """Frees weights that the engine alone uses."""
        for leaf in jax.tree.leaves(held) if owned else ():
            leaf.delete()

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
        brought = jax.block_until_ready(relayout.brought_to(leaf, sharding))
        if give_up:
            leaf.delete()
        return brought

    def _sent(self, leaves: Sequence[jax.Array], homes: Sequence[NamedSharding]) -> list[jax.Array]:
        """Returns a group of leaves in this layout, as copies."""
        if leaves[0].sharding.device_set == homes[0].device_set:
            return relayout.relaid(leaves, homes, self.dtype)
        keep = all(leaf.dtype == self._dtype_of(leaf) for leaf in leaves) and not _shares(leaves[0].sharding, homes[0])
        # Waits, because copies of later groups would take memory beside this one.
        return jax.block_until_ready(relayout.handed_over(leaves if keep else self._copied(leaves), homes))

    def links(self, params: Any) -> Mapping[str, int]:
        """Returns how many bytes a swap to these weights moves, by link. Nothing moves where they are shared."""
        return self.nothing_moves() if self.case(params) == "shared" else self.moved_by_link(params)

    def moved_by_link(self, params: Any, homes: Any = None) -> dict[str, int]:
        """Returns the bytes that reach devices of the engine where nothing is shared, by link.

        Args:
          params: arrays, or shapes with places.
          homes: a tree like `params`. None: that of all weights.
        """
        found = self.nothing_moves()
        homes = self.shardings if homes is None else homes
        leaves = list(zip(jax.tree.leaves(params), jax.tree.leaves(homes), strict=True))
        for dtype in {self._dtype_of(leaf) for leaf, _ in leaves}:
            some = [one for one in leaves if self._dtype_of(one[0]) == dtype]
            for link, size in relayout.links(*zip(*some, strict=True), dtype).items():
                found[link] += size
        return found

    @staticmethod
    def nothing_moves() -> dict[str, int]:
        """Returns no bytes for each link."""
        return dict.fromkeys(relayout.LINKS, 0)


class CrossingLayout(WeightLayout):
    """The engine's placement of weights on devices of other processes than the learner's (relayout.crossed).

    A process without a device of weights has their ShapeDtypeStructs. Processes agree on every check before they move any.

    Args:
      relays: of the run. All processes meet at a swap.
      learner: a process with a device of the learner.
    """

    def __init__(self, shardings: Any, dtype: Any, relays: Relays, learner: int):
        super().__init__(shardings, dtype)
        self._relays, self._finite = relays, relays.open("finite", learner)

    def _check_finite(self, params: Any, finite: Any) -> None:
        here = meshes.is_here(jax.tree.leaves(params)[0].sharding.mesh)
        own = bool(_finite(params) if finite is None else finite) if here else True
        _refuse_not_finite(self._finite.broadcast(bytes([own])) == bytes([True]))

    def _replaced(self, old: Any, new: Any, owned: bool) -> Any:
        self._relays.release_received()  # all meet: a device that waits for another process has a short limit of its own
        here = meshes.is_here(jax.tree.leaves(self.shardings)[0].mesh)
        return self._moved(new, jax.tree.leaves(old) if owned and here else None)

    def _sent(self, leaves: Sequence[Any], homes: Sequence[NamedSharding]) -> list[Any]:
        return jax.block_until_ready(relayout.crossed(leaves, homes, self.dtype))


def _shares(one: Any, other: Any) -> bool:
    """Returns whether `brought_to` between two shardings may reuse pieces on common devices."""
    return one.device_set != other.device_set and not one.device_set.isdisjoint(other.device_set)
