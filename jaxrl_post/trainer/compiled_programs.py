"""The learner's programs as jitted functions, each with the shapes that it is compiled for.

Invariant: a program is compiled for one shape, and every micro-batch of a run has that shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_post.config import AlgorithmConfig, BatchConfig
from jaxrl_post.models import lora
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel import row_pieces
from jaxrl_post.trainer import embedding, lent_devices, packing, programs
from jaxrl_post.trainer.optimizer import Optimizer
from jaxrl_post.trainer.state import TrainState, abstract, struct

Jitted = dict[str, tuple[Any, tuple]]  # name -> jitted function, shapes of its arguments
# Options of the compiler of a gradient, by platform. A TPU's compiler may multiply by one part of a matrix after another
# while the parts travel. That takes more memory, so the limit is set so high that no matrix reaches it.
COMPILER = {"tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """The shape of every micro-batch: rows, tokens, the floating dtype, and which optional leaves exist.

    `kept_ids`, `route_words`, `shared`: as in packing.pack. `context`: devices that share a row."""

    rows: int
    tokens: int
    dtype: Any
    leaves: tuple[str, ...]
    noise: bool
    kept_ids: int = 0
    route_words: int = 0
    shared: bool = False
    context: int = 1

    @property
    def records(self) -> dict[str, int]:
        return dict(kept_ids=self.kept_ids, route_words=self.route_words, shared=self.shared)

    def batch(self, mesh: Mesh) -> packing.Batch:
        """Returns the shapes of a micro-batch for the gradient, placed on `mesh`."""
        return self._placed(mesh, self.leaves)

    def bare(self, mesh: Mesh) -> packing.Batch:
        """Returns the shapes of a micro-batch that is only scored, placed on `mesh`."""
        return self._placed(mesh, ())

    def _placed(self, mesh: Mesh, leaves: tuple[str, ...]) -> packing.Batch:
        rows = row_pieces.RowPieces(mesh, self.context).sharding
        blank = packing.blank(self.rows, self.tokens, self.dtype, leaves, **self.records)
        blank = embedding.silent(blank, self.dtype) if self.noise else blank
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), blank)


def shapes(
    algorithm: AlgorithmConfig,
    batch: BatchConfig,
    dtype: np.dtype,
    *,
    old: bool,
    reference: bool,
    critic: bool,
    records: Mapping[str, int] = MappingProxyType({}),
    context: int = 1,
) -> Shapes:
    """Returns the shape of a run's micro-batches. `old`, `reference`, `critic`: whether the run has them. `records`: its
    kept_ids and route_words."""
    there = {
        "old_logprobs": old,
        "ref_logprobs": reference,
        "corrections": algorithm.corrects_rollouts,
        "prox_weights": algorithm.prox_logp_method == "loglinear",
        "values": critic,
        "returns": critic,
    }
    leaves = (*(name for name, is_there in there.items() if is_there), *algorithm.marks)
    noise = algorithm.neftune_alpha > 0
    sizes = dict(rows=batch.rows, tokens=batch.tokens, shared=batch.shared_prompts, context=context)
    return Shapes(dtype=dtype, leaves=leaves, noise=noise, **sizes, **records)


def learning(
    state: TrainState,
    policy: Any,
    mesh: Mesh,
    shardings: Any,
    shapes: Shapes,
    recipe: programs.Recipe,
    optimizer: Optimizer,
    *,
    measures: bool,
    taught: tuple = (),
) -> Jitted:
    """Returns the programs of the learner's own mesh.

    They are zeros, accumulate, score, divided and commit. With `measures`, also measure. score_norms is there where the
    advantage needs it.

    Args:
      policy: what is scored; `state` holds its trained weights.
      shardings: of every leaf of `policy`.
      taught: weights of a teacher that the loss compares with, if any.
    """
    one, state = meshes.replicated(mesh), abstract(state)
    own = adding(policy, mesh, shardings, shapes, recipe, measures=measures, taught=taught)
    policy, sums, *_ = own["accumulate"][1]
    states, home = (jax.tree.map(lambda x: x.sharding, tree) for tree in (state, sums))
    norms = jax.jit(lambda p, b: programs.score_norms(p, b, recipe), out_shardings=one)
    if recipe.algorithm.needs_score_norms:
        own |= {"score_norms": (norms, (policy, shapes.bare(mesh)))}
    return own | {
        "score": (
            jax.jit(lambda p, b: programs.score(p, b, recipe)[0], out_shardings=one),
            (policy, shapes.bare(mesh)),
        ),
        "divided": (jax.jit(lambda g: programs.divided(g, recipe), out_shardings=lora.trained(shardings)), (sums,)),
        "commit": (
            jax.jit(
                lambda s, g: programs.commit(s, g, recipe, optimizer),
                donate_argnums=(0, 1),
                out_shardings=(states, home, one, one),
            ),
            (state, sums),
        ),
    }


def lending(
    own: Jitted,
    policy: Any,
    devices: lent_devices.LentDevices,
    shapes: Shapes,
    recipe: programs.Recipe,
    *,
    measures: bool,
) -> Jitted:
    """Returns the programs of lent devices, with names that begin with "lent ", and the program `join`.

    `join` adds the sums of the lent devices to the learner's sums.
    """
    sums = own["accumulate"][1][1]
    home = jax.tree.map(lambda x: x.sharding, sums)
    lent = adding(policy, devices.mesh, devices.shardings, shapes, recipe, measures=measures)
    join = jax.jit(lent_devices.join, donate_argnums=0, out_shardings=home), (sums, sums)
    return {f"lent {name}": found for name, found in lent.items()} | {"join": join}


def adding(
    policy: Any,
    mesh: Mesh,
    shardings: Any,
    shapes: Shapes,
    recipe: programs.Recipe,
    *,
    measures: bool,
    taught: tuple = (),
) -> Jitted:
    """Returns the programs that make and fill sums on `mesh`: zeros, accumulate, and with `measures` also measure.

    `measure` computes the metrics of a micro-batch whose gradient is 0.
    """
    one, batch = meshes.replicated(mesh), shapes.batch(mesh)
    recipe = dataclasses.replace(recipe, mesh=mesh)
    policy, taught = jax.tree.map(struct, policy, shardings), abstract(taught)
    shape = jax.eval_shape(lambda: programs.empty(policy, batch, recipe, *taught))
    grads = homes(lora.trained(shardings), recipe)
    home = dataclasses.replace(jax.tree.map(lambda _: one, shape), grads=grads)
    sums = jax.tree.map(struct, shape, home)
    start = jax.ShapeDtypeStruct((), bool, sharding=one)
    runs = {"accumulate": programs.accumulate} | ({"measure": programs.measure} if measures else {})
    return {"zeros": (jax.jit(lambda: programs.zeros(shape, recipe), out_shardings=home), ())} | {
        name: (
            jax.jit(
                lambda p, s, b, start, *t, run=run: run(p, s, b, recipe, start, *t),
                donate_argnums=1,
                out_shardings=(home, one),
                compiler_options=COMPILER.get(mesh.devices.flat[0].platform),
            ),
            (policy, sums, batch, start, *taught),
        )
        for name, run in runs.items()
    }


def homes(shardings: Any, recipe: programs.Recipe) -> Any:
    """Returns the shardings of Sums.grads, from those of the trained weights."""
    first = [str(own[0]) for own in recipe.stacks]
    layers = shardings["layers"]
    own = {name: jax.tree.map(meshes.stacked, layers[name]) for name in first if name in layers}
    return shardings | {"layers": own} if first else shardings
