"""The learner: groups in, new weights out, on one mesh.

Invariant: every program is compiled once, for one shape, before it first runs; another shape is an error, never a
second compilation. Gradients are sums until `commit` divides once. What it refuses: groups that were not prepared, a KL
coefficient without a reference, and a mesh that cannot divide the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_post import batch as door
from jaxrl_post import config
from jaxrl_post import mesh as meshes
from jaxrl_post.algorithms import advantages, losses
from jaxrl_post.algorithms.mismatch import mismatch
from jaxrl_post.models import decoder
from jaxrl_post.trainer import optimizer as optimizers
from jaxrl_post.trainer import programs
from jaxrl_post.trainer.state import TrainState
from jaxrl_post.types import Group, RolloutId


class Learner:
    """Satisfies protocols.Learner. `state` is the only tree that changes; it is donated at every commit, so arrays
    taken from `params` die at the next commit unless they were copied."""

    def __init__(self, model: decoder.ModelConfig, params: Any, mesh: jax.sharding.Mesh, *, algorithm: config.Algorithm,
                 optimizer: config.Optimizer, batch: config.Batch, temperature: float, steps: int, max_tokens: int,
                 reference: Any = None, remat: bool = False, compute_dtype: str = "float32"):
        """
        Args:
          params: the policy, host or device arrays; kept as float32 (float64 if given so and x64 is on).
          temperature: of the sampling law; 0 stands for 1, as in the engine's log-probs.
          steps: commits of the whole run, for the schedule.
          max_tokens: longest answer of the run: the constant of seq-mean-token-sum-norm.
          reference: frozen weights like `params`, or None.
          compute_dtype: of activations; weights, gradients and moments stay wide.
        """
        _check(model, mesh, algorithm, batch, reference)
        self._mesh, self._algorithm, self._batch = mesh, algorithm, batch
        self._recipe = programs.Recipe(
            model=model, algorithm=algorithm, temperature=temperature or 1.0, max_tokens=max_tokens,
            head_chunk=batch.head_chunk, dtype=jnp.dtype(compute_dtype), remat=remat,
            rows=meshes.batch_sharding(mesh), heads=meshes.heads_sharding(mesh))
        self._wide = np.dtype(jnp.promote_types(compute_dtype, jnp.float32))
        axes = decoder.axes(model)
        self._shardings = meshes.param_shardings(mesh, axes, "learner")
        self._transform = optimizers.transform(optimizer, optimizers.matrices(axes))
        self._rate = optimizers.rate(optimizer, steps)
        self._reference = None if reference is None else _owned(reference, self._shardings)
        self.state = self._first_state(_owned(params, self._shardings))
        self._programs: dict[str, Any] = {}
        self._sums: programs.Sums | None = None
        self._step = 0
        self._forget()

    @property
    def step(self) -> int:
        """Commits so far, skipped ones included: the version of `params`."""
        return self._step

    @property
    def params(self) -> Any:
        """The policy's weights, in the learner's layout; dead after the next commit."""
        return self.state.params["policy"]

    def compile(self) -> None:
        """Compiles every program for the run's one batch shape, and empties the sums. Later calls do nothing."""
        if self._programs:
            return
        one = meshes.replicated(self._mesh)
        batch = self._blank(self._needs_old, self._reference is not None)
        state, recipe = _abstract(self.state), self._recipe
        policy = state.params["policy"]
        shape = jax.eval_shape(lambda: programs.empty(policy, batch, recipe))
        home = jax.tree.map(lambda _: one, shape)
        home = dataclasses.replace(home, grads=self._shardings)
        sums = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shape, home)
        states = jax.tree.map(lambda x: x.sharding, state)
        jitted = {
            "zeros": (jax.jit(lambda: programs.empty(policy, batch, recipe), out_shardings=home), ()),
            "score": (jax.jit(lambda p, b: programs.score(p, b, recipe)[0], out_shardings=one),
                      (policy, self._blank(False, False))),
            "accumulate": (jax.jit(lambda p, s, b: programs.accumulate(p, s, b, recipe), donate_argnums=1,
                                   out_shardings=home), (policy, sums, batch)),
            "divided": (jax.jit(programs.divided, out_shardings=self._shardings), (sums,)),
            "commit": (jax.jit(lambda s, g: programs.commit(s, g, self._transform, self._rate), donate_argnums=(0, 1),
                               out_shardings=(states, home, one)), (state, sums)),
        }
        self._programs = {name: program.lower(*shapes).compile() for name, (program, shapes) in jitted.items()}
        self._sums = self._programs["zeros"]()

    def logprobs(self, groups: Sequence[Group]) -> dict[RolloutId, np.ndarray]:
        """Log-probs of every answer at the current weights, float[T] on the host, by rollout id."""
        self.compile()
        return self._scored(groups, self.params)

    def prepare(self, groups: Sequence[Group]) -> None:
        """Old log-probs (where the loss reads them) and reference log-probs of these groups at the current weights."""
        self.compile()
        self._prepared.update(rollout.id for group in groups for rollout in group.rollouts)
        if self._needs_old:
            self._old.update(self.logprobs(groups))
            for group in groups:
                for rollout in group.rollouts:
                    self._pairs.append((self._old[rollout.id][rollout.sampled], rollout.logprobs[rollout.sampled]))
        if self._reference is not None:
            self._ref.update(self._scored(groups, self._reference))

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Adds these groups' undivided gradient and counts.

        Raises:
          ValueError: a group that `prepare` has not seen since the last commit, or a sequence longer than batch.tokens.
        """
        self.compile()
        self._refuse_unprepared(groups)
        estimate = advantages.ADVANTAGES[self._algorithm.adv_estimator]
        values = [estimate(group.rewards, group.scored) for group in groups]
        batches, places = self._packed(groups, values)
        for batch in batches:
            self._sums = self._programs["accumulate"](self.params, self._sums, self._put(batch))
        for group, value in zip(groups, values, strict=True):
            for rollout, advantage, scored in zip(group.rollouts, value, group.scored, strict=True):
                if scored:
                    self._advantages.append((float(advantage), int(rollout.sampled.sum())))
        self._filled += sum(int((batch.segment_ids > 0).sum()) for batch in batches)
        self._room += len(batches) * self._batch.rows * self._batch.tokens

    def gradient(self) -> Any:
        """What `commit` would step along, before clipping: the divided gradient, in the learner's layout."""
        self.compile()
        return self._programs["divided"](self._sums)

    def commit(self) -> Mapping[str, Any]:
        """One optimizer step from what was accumulated. Device scalars, and host floats for what the host knew."""
        self.compile()
        self.state, self._sums, metrics = self._programs["commit"](self.state, self._sums)
        self._step += 1
        metrics = {**metrics, **self._host_metrics()}
        self._forget()
        return metrics

    @property
    def _needs_old(self) -> bool:
        return losses.NEEDS_OLD_LOGPROBS[self._algorithm.loss_mode]

    def _first_state(self, policy: Any) -> TrainState:
        one = meshes.replicated(self._mesh)
        shapes = jax.eval_shape(self._transform.init, policy)
        homes = optax.tree_utils.tree_map_params(self._transform, lambda _, sharding: sharding, shapes, self._shardings,
                                                 transform_non_params=lambda _: one)
        moments = jax.jit(self._transform.init, out_shardings=homes)(policy)
        return TrainState(params={"policy": policy}, opt_state=moments, step=meshes.put(np.int32(0), one))

    def _forget(self) -> None:
        self._prepared: set[RolloutId] = set()
        self._old: dict[RolloutId, np.ndarray] = {}
        self._ref: dict[RolloutId, np.ndarray] = {}
        self._pairs: list[tuple[np.ndarray, np.ndarray]] = []
        self._advantages: list[tuple[float, int]] = []
        self._filled, self._room = 0, 0

    def _refuse_unprepared(self, groups: Sequence[Group]) -> None:
        for group in groups:
            for rollout in group.rollouts:
                if rollout.id not in self._prepared:
                    raise ValueError(f"learner: rollout {tuple(rollout.id)} was not prepared since the last commit; "
                                     f"call prepare with its group first")

    def _blank(self, old: bool, reference: bool) -> door.Batch:
        """The shape of a micro-batch, where it lives."""
        rows = meshes.batch_sharding(self._mesh)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows),
                            door.blank(self._batch.rows, self._batch.tokens, self._wide, old, reference))

    def _put(self, batch: door.Batch) -> door.Batch:
        return meshes.put(batch, meshes.batch_sharding(self._mesh))

    def _packed(self, groups, values) -> tuple[list[door.Batch], list[door.Place]]:
        return door.pack(groups, values, rows=self._batch.rows, tokens=self._batch.tokens, dtype=self._wide,
                         old_logprobs=self._old if self._needs_old else None,
                         ref_logprobs=self._ref if self._reference is not None else None)

    def _scored(self, groups: Sequence[Group], policy: Any) -> dict[RolloutId, np.ndarray]:
        """Log-probs of every answer under `policy`, on the host."""
        nothing = [np.zeros(len(group.rollouts)) for group in groups]
        batches, places = door.pack(groups, nothing, rows=self._batch.rows, tokens=self._batch.tokens, dtype=self._wide)
        results = [self._programs["score"](policy, self._put(batch)) for batch in batches]
        return door.answers(jax.device_get(results), places)

    def _host_metrics(self) -> dict[str, float]:
        out = {"training/packed_fill_ratio": self._filled / self._room if self._room else 0.0}
        values, weights = np.array(self._advantages, float).reshape(-1, 2).T
        if weights.sum() > 0:
            seen = values[weights > 0]
            out |= {"critic/advantages/mean": float(values @ weights / weights.sum()),
                    "critic/advantages/max": float(seen.max()), "critic/advantages/min": float(seen.min())}
        if sum(old.size for old, _ in self._pairs):
            out |= mismatch(*(np.concatenate(side).astype(float) for side in zip(*self._pairs, strict=True)))
        return out


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _owned(tree: Any, shardings: Any) -> Any:
    """A copy of `tree` as float32 or wider in the learner's layout: the state is donated, the caller's arrays are
    not."""
    def host(leaf, sharding):
        return meshes.put(np.array(leaf, np.promote_types(leaf.dtype, np.float32)), sharding)

    if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree)):
        def wide(leaf):
            return jnp.array(leaf, jnp.promote_types(leaf.dtype, jnp.float32), copy=True)

        return jax.jit(lambda t: jax.tree.map(wide, t), out_shardings=shardings)(tree)
    return jax.tree.map(host, tree, shardings)


def _check(model: decoder.ModelConfig, mesh: jax.sharding.Mesh, algorithm: config.Algorithm, batch: config.Batch,
           reference: Any) -> None:
    meshes.check_divisible(mesh, decoder.axes(model), decoder.abstract(model), "learner")
    ways = meshes.replicas(mesh)
    if batch.rows % ways:
        raise ValueError(f"batch.rows={batch.rows} must be a multiple of mesh.data*mesh.fsdp={ways}; the nearest valid "
                         f"value is {-(-batch.rows // ways) * ways}")
    if algorithm.kl_loss_coef > 0 and reference is None:
        raise ValueError(f"algorithm.kl_loss_coef={algorithm.kl_loss_coef} needs a reference model and none was given; "
                         f"the nearest valid value is 0")
