"""A second mesh for a learner's gradient sums: devices that are lent to the learner for a part of a round.

In RollPacker's stream trainer (arXiv 2509.21009, section 5.3), devices that generation no longer needs train on
complete groups. Here the lent devices hold a copy of the policy and sums of their own. These sums are added to the
learner's sums before the division. So the choice of device changes only the order of the sum.

Invariants:
- Which micro-batches go to the lent devices follows from counts.
- Between loans the lent devices hold nothing except log-probs that are still to be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel.relayout import brought_to
from jaxrl_post.trainer import packing
from jaxrl_post.trainer.programs import Sums


class LentDevices:
    """The lent devices of `mesh`, with the learner's layout of weights.

    `host` is the learner's own mesh. If the meshes overlap, learner and engine share all devices. Then all
    micro-batches go to the lent devices, while the other devices generate. Passes for reference and old log-probs
    still run on the learner's mesh, and wait for a dispatch to end.
    """

    def __init__(self, mesh: Mesh, model: decoder.ModelConfig, *, host: Mesh):
        self.mesh = mesh
        self.shardings = meshes.param_shardings(mesh, decoder.axes(model), "learner")
        self._alone = not set(mesh.devices.flat).isdisjoint(host.devices.flat)
        self._sizes = host.size, mesh.size
        self._programs: Mapping[str, Any] = {}
        self._join: Any = None
        self._policy = self._sums = None
        self.here = False
        self.newest: jax.Array | None = None  # a result of the program that was launched last
        self._begin()

    def compiled(self, programs: Mapping[str, Any], join: Any) -> None:
        """Takes the programs compiled for this mesh: `zeros`, `accumulate` and `measure`.

        `join(sums, sums)` is compiled for the learner's mesh.
        """
        self._programs, self._join = programs, join

    def warm_up(self, policy: Any, sums: Sums) -> None:
        """Moves weights and sums once, so that later moves compile nothing. Nothing stays on the lent devices."""
        jax.tree.map(brought_to, policy, self.shardings)
        self._home(self._programs["zeros"](), sums)

    @staticmethod
    def _home(theirs: Sums, sums: Sums) -> Sums:
        """Returns sums of the lent devices in the layout of `sums`."""
        return jax.tree.map(lambda one, home: brought_to(one, home.sharding), theirs, sums)

    def _begin(self) -> None:
        self._done = [0, 0]  # micro-batches since the loan or the last join: own devices, lent devices

    def borrow(self) -> None:
        """Marks the devices as lent. They receive nothing before their first micro-batch."""
        self.here = True
        self._begin()

    def takes(self) -> bool:
        """Returns whether the next micro-batch goes to the lent devices.

        It goes to the side that would then have fewer micro-batches per device.
        """
        if not self.here or self._alone:
            return self.here
        own, mine = ((done + 1) / size for done, size in zip(self._done, self._sizes))
        self._done[mine < own] += 1
        return mine < own

    def add(self, program: str, policy: Any, batch: packing.Batch, start: Any) -> jax.Array:
        """Runs one micro-batch from the host at the learner's `policy`. Returns its log-probs.

        `policy` must not change before `joined`.
        """
        if self._policy is None:
            self._policy = jax.tree.map(brought_to, policy, self.shardings)
            self._sums = self._programs["zeros"]()
        placed = meshes.put(batch, meshes.batch_sharding(self.mesh))
        at_start = meshes.put(start, meshes.replicated(self.mesh))
        self._sums, self.newest = self._programs[program](self._policy, self._sums, placed, at_start)
        return self.newest

    def joined(self, sums: Sums) -> Sums:
        """Returns `sums` of the learner's own devices plus the sums of the lent devices since the last call.

        The lent devices then drop their sums and weights, because the weights will change or the devices will leave.
        """
        self._begin()
        if self._policy is None:
            return sums
        whole = self._join(sums, self._home(self._sums, sums))
        # Dropped, not deleted: `brought_to` reuses pieces that are already in place, so some may be the learner's.
        self._policy = self._sums = None
        return whole


def join(sums: Sums, more: Sums) -> Sums:
    return jax.tree.map(jnp.add, sums, more)
