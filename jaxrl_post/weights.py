"""Learner layout to engine layout.

Three cases, told apart by looking at the arrays: `shared` (same dtype and layout: the engine uses the learner's buffers),
`cast` (another dtype, same layout: one compiled program writes into the buffers of the old weights) and `relayout` (another
sharding: leaf by leaf, each old leaf given up before its successor is made). In the last two the engine owns its copy, and
at no time does more than one leaf exist beside the learner's weights and the engine's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


class Torn(RuntimeError):
    """A swap failed when its checks were behind it: the old weights may be used up, so there is nothing to go on with."""


class Layout:
    """Where and as what the engine wants its weights: `shardings`, a tree like the weights, and `dtype`."""

    def __init__(self, shardings: Any, dtype: Any):
        self.shardings, self.dtype = shardings, dtype
        self._finite = jax.jit(lambda tree: jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)])))
        self._first = jax.jit(self._cast, out_shardings=shardings)
        self._into = jax.jit(lambda old, new: self._cast(new), out_shardings=shardings, donate_argnums=0, keep_unused=True)
        self._narrow = jax.jit(self._cast)

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
            raise ValueError(f"swap: the new weights have {now.num_leaves} leaves in another tree than the {was.num_leaves} "
                             f"in use")
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True):
            if a.shape != b.shape:
                raise ValueError(f"swap: {jax.tree_util.keystr(path)} has shape {b.shape}, in use is {a.shape}")
        if not bool(self._finite(new)):
            raise ValueError("swap: the new weights are not finite")

    def place(self, params: Any) -> Any:
        """The first weights; the engine's own copy unless shared."""
        return params if self.case(params) == "shared" else self._first(params)

    def memory(self, old: Any, new: Any) -> Any:
        """What the compiler says of the program that `replace` runs in case `cast` (`memory_analysis()`)."""
        return self._into.lower(old, new).compile().memory_analysis()

    def replace(self, old: Any, new: Any) -> Any:
        """The next weights; `old` is used up unless shared.

        Raises:
          Torn: the device or its runtime failed.
        """
        try:
            return self._replaced(old, new)
        except jax.errors.JaxRuntimeError as error:
            raise Torn(f"the swap to new weights failed after its checks, and the old ones may be used up: {error}") from error

    def _replaced(self, old: Any, new: Any) -> Any:
        case = self.case(new)
        if case == "shared":
            return new
        return self._into(old, new) if case == "cast" else jax.tree.map(self._move, old, new, self.shardings)

    def bring(self, held: Any, owned: bool) -> Any:
        """Weights that lie as another layout wants them, of the same dtype; where `owned`, each leaf is given up once its
        successor is there."""
        return jax.tree.map(lambda leaf, sharding: self._bring(leaf, sharding, owned), held, self.shardings)

    @staticmethod
    def _bring(leaf: jax.Array, sharding: Any, owned: bool) -> jax.Array:
        brought = jax.block_until_ready(jax.device_put(leaf, sharding, may_alias=False))
        if owned:
            leaf.delete()
        return brought

    def _move(self, old: jax.Array, new: jax.Array, sharding: Any) -> jax.Array:
        """One leaf onto another sharding. `device_put` copies between devices directly, where a compiled program would use
        collectives, which on CPU is slower (scripts/results/swap-live.json holds the times)."""
        old.delete()
        narrow = new if new.dtype == self.dtype else self._narrow(new)
        return jax.device_put(narrow, sharding, may_alias=False)
