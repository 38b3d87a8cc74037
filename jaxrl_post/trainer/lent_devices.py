"""A second mesh for a learner's gradient sums: devices that are lent to it for a part of a round.

RollPacker's stream trainer (arXiv 2509.21009, section 5.3) lets devices that generation needs no more train on groups that are
whole. Here they hold the policy and sums of their own, which are added to the learner's before these are divided: so which
devices made a term of the sum is a matter of its order alone. Invariant: which micro-batches go there follows from counts, and a
guest that is not here holds nothing on its devices but log-probs that are still to be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel.weight_sync import brought_to
from jaxrl_post.trainer import packing as door
from jaxrl_post.trainer.programs import Sums


class Guest:
    """Devices of `mesh`, in the learner's layout of weights, while they are here. `host`: the learner's own mesh. Where that has
    them too, as it shares all devices with an engine, the others generate meanwhile and all micro-batches go here; passes for
    reference and old log-probs do not, and wait for a dispatch to end."""

    def __init__(self, mesh: jax.sharding.Mesh, model: decoder.ModelConfig, *, host: jax.sharding.Mesh):
        self.mesh = mesh
        self.shardings = meshes.param_shardings(mesh, decoder.axes(model), "learner")
        self._alone = not set(mesh.devices.flat).isdisjoint(host.devices.flat)
        self._sizes = host.size, mesh.size
        self._programs: Mapping[str, Any] = {}
        self._join: Any = None
        self._policy = self._sums = None
        self.here = False
        self.newest: jax.Array | None = None  # of what was begun last
        self._begin()

    def compiled(self, programs: Mapping[str, Any], join: Any) -> None:
        """Takes `zeros`, `accumulate` and `measure`, compiled for its mesh, and `join(sums, sums)` for the learner's."""
        self._programs, self._join = programs, join

    def _begin(self) -> None:
        self._done = [0, 0]  # micro-batches since it came or the last commit: the learner's own, and here

    def borrow(self) -> None:
        """The devices come; they get nothing before there is something to do."""
        self.here = True
        self._begin()

    def takes(self) -> bool:
        """Whether the next micro-batch is for these devices: it goes where it makes the lesser share of micro-batches a
        device."""
        if not self.here or self._alone:
            return self.here
        own, mine = ((done + 1) / size for done, size in zip(self._done, self._sizes))
        self._done[mine < own] += 1
        return mine < own

    def add(self, program: str, policy: Any, batch: door.Batch, start: Any) -> jax.Array:
        """A micro-batch, from the host, at the learner's `policy`, which is not to change before `joined`; its log-probs."""
        if self._policy is None:
            self._policy = jax.tree.map(brought_to, policy, self.shardings)
            self._sums = self._programs["zeros"]()
        placed = meshes.put(batch, meshes.batch_sharding(self.mesh))
        at_start = meshes.put(start, meshes.replicated(self.mesh))
        self._sums, self.newest = self._programs[program](self._policy, self._sums, placed, at_start)
        return self.newest

    def joined(self, sums: Sums) -> Sums:
        """`sums`, of the learner's own devices, plus what was summed here since the last time, of which nothing is kept: the
        weights are about to change, or the devices to go."""
        self._begin()
        if self._policy is None:
            return sums
        whole = self._join(sums, jax.tree.map(lambda one, home: brought_to(one, home.sharding), self._sums, sums))
        # Let go of, not deleted: pieces that lie where they shall are taken over, so some may be the learner's.
        self._policy = self._sums = None
        return whole


def join(sums: Sums, more: Sums) -> Sums:
    """Both together; `sums` may be donated."""
    return jax.tree.map(jnp.add, sums, more)
