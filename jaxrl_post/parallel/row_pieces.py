"""Rows of the learner's batch in pieces, where devices share them: how they are cut, exchanged and put together again.

Invariant: cutting and joining move numbers and change none.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_post.parallel import mesh as meshes


@dataclass(frozen=True)
class RowPieces:
    """Rows of the learner's batch in pieces: each of `context` neighbours along fsdp has one of every row that they share.

    A row of T tokens has 2 x context equal stretches. A neighbour has one from the front and its mirror image from the end:
    under a causal mask all have equal work. What follows the cut takes pieces for rows.
    """

    mesh: Mesh
    context: int = 1

    @property
    def sharding(self) -> NamedSharding:
        """Returns that of whole rows. Where they are cut, the devices along fsdp have the same ones: they are small numbers."""
        return meshes.batch_sharding(self.mesh) if self.context == 1 else meshes.copied_rows(self.mesh)

    def cut(self, x: jax.Array) -> jax.Array:
        """Returns pieces [B * context, T / context, ...] of rows [B, T, ...]: those of a device lie one after another."""
        if self.context == 1:
            return x
        (B, T, *rest), groups, count = x.shape, meshes.shards(self.mesh) // self.context, 2 * self.context
        halves = x.reshape(groups, B // groups, count, T // count, *rest)[:, :, self._order]
        pieces = halves.reshape(groups, B // groups, self.context, T // self.context, *rest).swapaxes(1, 2)
        out = pieces.reshape(B * self.context, T // self.context, *rest)
        return jax.lax.with_sharding_constraint(out, meshes.batch_sharding(self.mesh))

    def joined(self, x: jax.Array) -> jax.Array:
        """Returns the rows of which `x` has the pieces."""
        if self.context == 1:
            return x
        (pieces, size, *rest), groups, count = x.shape, meshes.shards(self.mesh) // self.context, 2 * self.context
        B, T = pieces // self.context, size * self.context
        halves = x.reshape(groups, self.context, B // groups, size, *rest).swapaxes(1, 2)
        halves = halves.reshape(groups, B // groups, count, T // count, *rest)
        return halves[:, :, np.argsort(self._order)].reshape(B, T, *rest)

    @property
    def _order(self) -> np.ndarray:
        """Returns the stretches of a row in the order of the devices that have them."""
        return np.array([half for one in range(self.context) for half in (one, 2 * self.context - 1 - one)])

    def of_neighbours(self, x: jax.Array) -> jax.Array:
        """Returns [B * context, T, ...]: for each piece the whole row of `gathered`. Heads, the third axis if there are any, may lie
        over tensor."""
        spec = (meshes.heads_sharding if x.ndim > 2 else meshes.batch_sharding)(self.mesh).spec
        return jax.shard_map(self.gathered, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

    # ---- inside a function that every device runs by itself

    @property
    def _neighbours(self) -> list[list[int]]:
        return [list(range(at, at + self.context)) for at in range(0, self.mesh.shape[meshes.FSDP], self.context)]

    def gathered(self, x: jax.Array) -> jax.Array:
        """Returns whole rows [b, T, ...] of the pieces that neighbours have. Stretches stand in the order of the devices."""
        return jax.lax.all_gather(x, meshes.FSDP, axis=1, tiled=True, axis_index_groups=self._neighbours)

    def whole(self, x: jax.Array) -> jax.Array:
        """Returns whole rows of small numbers, from the first token to the last."""
        return self._sorted(self.gathered(x), np.argsort(self._order))

    def heads_of_rows(self, x: jax.Array) -> jax.Array:
        """Returns, of pieces [b, t, heads, ...] with all heads, whole rows [b, T, heads / context, ...] with the device's own."""
        how = dict(split_axis=2, concat_axis=1, tiled=True, axis_index_groups=self._neighbours)
        return self._sorted(jax.lax.all_to_all(x, meshes.FSDP, **how), np.argsort(self._order))

    def rows_of_heads(self, x: jax.Array) -> jax.Array:
        """Returns the pieces with all heads of what has the form of `heads_of_rows`."""
        how = dict(split_axis=1, concat_axis=2, tiled=True, axis_index_groups=self._neighbours)
        return jax.lax.all_to_all(self._sorted(x, self._order), meshes.FSDP, **how)

    def own_heads(self, x: jax.Array) -> jax.Array:
        """Returns, of an array [_, heads, ...] that all devices have, the part of this one's heads."""
        size = x.shape[1] // self.context
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(meshes.FSDP) % self.context * size, size, axis=1)

    def _sorted(self, x: jax.Array, order: np.ndarray) -> jax.Array:
        B, T, *rest = x.shape
        return x.reshape(B, len(order), T // len(order), *rest)[:, order].reshape(x.shape)
