"""The learner: groups in, new weights out. It runs on one mesh, at times with the help of lent devices.

Invariants:
- Every program is compiled once, for one shape, before its first run. Another shape raises an error and is never
  compiled.
- Gradients are sums until `commit` divides them once.
- The results of `prepare` are kept until the first groups of the next round. So a round may take several optimizer
  steps against the policy of its start. Its groups may arrive in several pieces before the first step.

Refuses:
- groups that were not prepared
- groups in several pieces, where the advantage is computed over the whole round
- a KL term without a reference, and a mesh that cannot divide the model
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_post import config
from jaxrl_post.algorithms import credit
from jaxrl_post.algorithms.advantages import RoleBaseline
from jaxrl_post.algorithms.correction import mismatch, mismatch_by_cause
from jaxrl_post.algorithms.kl_estimators import KlController
from jaxrl_post.models import decoder, lora
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.types import Group, Rollout, RolloutId
from jaxrl_post.trainer import compiled_programs, embedding, lent_devices, packing, placement, programs
from jaxrl_post.trainer import optimizer as optimizers
from jaxrl_post.trainer.critic import Critic, NoCritic
from jaxrl_post.trainer.old_logprobs import OldLogprobs
from jaxrl_post.trainer.state import TrainState, abstract, first_state, frozen, is_abstract, owned
from jaxrl_post.trainer.teacher import NoTeacher, Teacher
from jaxrl_post.trainer.update_gate import Gate

GRADIENT = 3  # cost of a micro-batch's gradient, in forward passes


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """What a learner trains by, and how its programs compute.

    `temperature`: of the sampling distribution. 0 stands for 1, as in the engine's log-probs. `steps`: commits of the whole
    run, for the schedule. `max_tokens`: longest rollout of the run, for seq-mean-token-sum-norm and for the length penalty.
    `written`: rollouts were written, and their log-probs are no engine's. `remat`, `remat_policy` and `scan_layers`: as
    config.PolicyConfig declares them. `compute_dtype`: of activations. Weights stay float32 or wider; gradient sums and
    moments, as `optimizer` says. `attention`: the devices' kernel for packed rows, or None for the jnp form
    (trainer/attention.py). `kept_ids`: the most ids of a token's record (types.Rollout.kept), `route_words`: the words of its
    route; 0: rollouts have none.
    """

    algorithm: config.AlgorithmConfig
    optimizer: config.OptimizerConfig
    batch: config.BatchConfig
    temperature: float
    steps: int
    max_tokens: int
    written: bool = False
    remat: bool = False
    remat_policy: str = "full"
    scan_layers: str = "auto"
    compute_dtype: str = "float32"
    attention: Callable | None = None
    context: int = 1
    kept_ids: int = 0
    route_words: int = 0


class Learner:
    """Satisfies protocols.Learner.

    `state` is the only tree that changes. It is donated at every commit. Arrays taken from `params` are invalid after
    the next commit, unless they were copied.
    """

    def __init__(
        self,
        model: decoder.ModelConfig,
        params: Any,
        mesh: Mesh,
        settings: LearnerSettings,
        *,
        adapter: Any = None,
        reference: Any = None,
        critic: Critic | None = None,
        teacher: Teacher | None = None,
        lent: Mesh | None = None,
    ):
        """Builds the learner's state and checks the model against its meshes.

        Args:
          params: the policy in one of three forms:
            - host or device arrays, which are copied as float32 (float64 if given so and x64 is on);
            - ShapeDtypeStructs: the learner compiles, but has no weights to train;
            - a function from shardings to float32 arrays with these shardings, which the learner owns without a copy.
          adapter: where `model` has lora, the additions to train, in one of the forms of `params`. Then `params` are the
            frozen base. It keeps its dtype, and is not copied where it lies in the learner's layout.
          reference: frozen weights in one of the forms of `params`, or None. With lora: additions to the same base.
          critic, teacher: of the same mesh, where the advantage needs one.
          lent: devices that add up gradients between `borrow` and `give_back`, alone or together with the learner's
            own devices (trainer/lent_devices.py).
        """
        algorithm, batch = settings.algorithm, settings.batch
        meshes_of_run = (mesh, lent) if lent else (mesh,)
        placement.check(model, meshes_of_run, algorithm, batch, settings.context, reference, teacher)
        if teacher is not None:
            placement.check_states(teacher.model, meshes_of_run, batch, settings.context, " of the teacher")
        self._mesh, self._algorithm, self._batch, self._max_tokens = mesh, algorithm, batch, settings.max_tokens
        recipe = programs.recipe(
            model,
            algorithm,
            settings.optimizer,
            batch,
            mesh,
            remat=settings.remat_policy if settings.remat else None,
            temperature=settings.temperature,
            dtype=settings.compute_dtype,
            scan_layers=settings.scan_layers,
            attention=settings.attention,
            context=settings.context,
        )
        self._critic, self._teacher = critic or NoCritic(), teacher or NoTeacher()
        self._recipe, self._taught = self._teacher.joined(recipe)
        self._shardings, decayed = placement.of_policy(model, mesh)
        self._optimizer = optimizers.optimizer(
            settings.optimizer, decayed, settings.steps, first=self._critic.warmup_steps
        )
        self._base, weights = ({}, params) if model.lora is None else (frozen(params, self._shardings.base), adapter)
        homes = lora.trained(self._shardings)
        self._reference = None if reference is None else self._policy(owned(reference, homes))
        self._state = first_state(owned(weights, homes), self._base, homes, self._optimizer.transform, mesh)
        self.kl, self.roles = KlController(algorithm), RoleBaseline(algorithm.rae_decay)
        self._lent_devices, self._step = lent_devices.LentDevices(lent, model, host=mesh) if lent else None, 0
        self._old, self.gate = (
            OldLogprobs(algorithm, settings.written),
            Gate(algorithm.min_ess, algorithm.max_rollout_kl),
        )
        there = dict(old=self._old.needed, reference=self._kl_in_loss, critic=self._critic.there)
        records = dict(kept_ids=settings.kept_ids, route_words=settings.route_words)
        dtype = np.dtype(jnp.promote_types(settings.compute_dtype, jnp.float32))
        self._shapes = compiled_programs.shapes(
            algorithm, batch, dtype, **there, records=records, context=settings.context
        )
        self._noise = embedding.Noise(algorithm.neftune_alpha, model.embed, dtype)
        self._begin_run()

    def _begin_run(self) -> None:
        """Sets what programs fill. None is compiled yet."""
        self._programs: dict[str, Any] = {}
        self._sums: programs.Sums | None = None
        self._newest: jax.Array | None = None  # a result of the program that was launched last
        self._finite: jax.Array | None = None
        self._begin_round()
        self._begin_step()

    @property
    def state(self) -> TrainState:
        """Returns weights and optimizer's state of policy and critic, and the step."""
        return self._critic.joined(self._state)

    @state.setter
    def state(self, whole: TrainState) -> None:
        self._state, self._finite = self._critic.taken(whole), None

    @property
    def step(self) -> int:
        """Returns the number of commits so far, skipped ones included. It is the version of `params`."""
        return self._step

    @property
    def at_work(self) -> bool:
        """Returns whether any of the learner's devices, lent ones included, is still computing. Does not wait."""
        newest = (self._newest, self._lent_devices.newest if self._lent_devices else None)
        return any(result is not None and not result.is_ready() for result in newest)

    @property
    def params(self) -> Any:
        """Returns the policy's weights in the learner's layout, with lora a lora.Adapted.

        Trained weights are invalid after the next commit.
        """
        return self._policy(self._state.params["policy"])

    @property
    def finite(self) -> jax.Array | None:
        """Returns a device bool: whether all trained weights of the policy are finite after the newest commit.

        None where no commit has happened since the weights came from outside: first weights, `state` set, `restore`.
        """
        return self._finite

    def _policy(self, weights: Any) -> Any:
        added = self._recipe.model.lora
        return weights if added is None else lora.Adapted(self._base, weights, added)

    def jitted(self) -> compiled_programs.Jitted:
        """Returns every program by name, not compiled, with the shapes of its arguments.

        Names of programs for lent devices begin with "lent ".
        """
        made = dict(shapes=self._shapes, recipe=self._recipe, measures=self._of_advantages)
        more = dict(optimizer=self._optimizer, taught=self._taught)
        own = compiled_programs.learning(self._state, self.params, self._mesh, self._shardings, **more, **made)
        lent = compiled_programs.lending(own, self.params, self._lent_devices, **made) if self._lent_devices else {}
        apart = self._teacher.jitted(self._mesh, self._shapes, self._recipe)
        return own | lent | apart | self._critic.jitted(own, self._mesh, self._shapes, self._recipe)

    def compile(self) -> None:
        """Compiles every program for the run's one batch shape, and empties the sums. Later calls do nothing."""
        if self._programs:
            return
        self._programs = {name: program.lower(*shapes).compile() for name, (program, shapes) in self.jitted().items()}
        if self._lent_devices:
            lent = {name.removeprefix("lent "): one for name, one in self._programs.items() if name.startswith("lent ")}
            self._lent_devices.compiled(lent, self._programs["join"])
        if not is_abstract(self.state):
            self._sums = self._programs["zeros"]()
            self._critic.begin(self._programs)
            if self._lent_devices:
                self._lent_devices.warm_up(self.params, self._sums)

    @property
    def compiled(self) -> Mapping[str, Any]:
        """The compiled programs by name; none before `compile`."""
        return self._programs

    def temporaries(self) -> dict[str, int]:
        """Returns the bytes of temporary memory that each program needs on a device, as the compiler reports them.

        Arguments and results of the program are not included.
        """
        self.compile()
        return {name: program.memory_analysis().temp_size_in_bytes for name, program in self._programs.items()}

    def logprobs(self, groups: Sequence[Group], *, of_reference: bool = False) -> dict[RolloutId, np.ndarray]:
        """Returns log-probs of every rollout, float[T] on the host by id, at the current weights or the reference's."""
        self.compile()
        packed = self._bare(groups)
        return self._of_reference(packed) if of_reference else self._over(packed, self._scores(self.params))

    def prepare(self, groups: Sequence[Group]) -> None:
        """Computes reference log-probs and advantages of these groups, and keeps them over the commits of the round.

        The first groups after a commit begin a new round, and the results of the last round are discarded.

        Old log-probs come from the weights of the round's start. They are computed here only where the advantage
        depends on them. Otherwise the gradient's own pass computes them for groups accumulated before the first
        commit. That commit computes the old log-probs of all other groups before it changes the weights.

        Raises:
          ValueError: the round already has groups, and the advantage is computed over the whole round.
        """
        self.compile()
        if not groups:
            return
        if self._old.committed:
            self._begin_round()
        if self._credits and credit.needs_whole_round(self._algorithm):
            raise ValueError(
                f"learner: algorithm.adv_estimator={self._algorithm.adv_estimator!r} whitens over all tokens of "
                "a round and this round's groups came in pieces; the nearest valid scheduler.stream is 0"
            )
        packing.check_lengths(groups, self._batch.tokens)
        trained = credit.trained(groups, self._algorithm)
        packed = functools.cache(lambda: self._bare(trained))  # once for all passes
        self._old.version = self._step
        self._old.prepare(trained, lambda some: self._over(self._bare(some, noisy=True), self._scores(self.params)))
        if self._reference is not None:
            self._ref.update(self._of_reference(packed()))
        algorithm, known = self.kl.applied(self._algorithm), dict(old=self._old.of, reference=self._ref)
        if self._critic.there:
            known["values"] = self._over(packed(), self._critic.values(self.params))
        if algorithm.needs_score_norms:
            known["norms"] = self._over(packed(), lambda batch: self._programs["score_norms"](self.params, batch))
        if algorithm.teacher_coef:
            known["teacher"] = self._over(packed(), self._teacher.logprobs(self._programs))
        credits, found = credit.assign(groups, algorithm, max_tokens=self._max_tokens, roles=self.roles, **known)
        self._credits.update(credits)
        self._found.append(found)

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Adds these groups' undivided gradient and counts.

        Some groups have no gradient: all their advantages are 0 (equal rewards under GRPO, say), and every loss term
        is a multiple of the advantage. Such a group needs only a forward pass, for its metrics. It is packed
        separately where that saves passes.

        Raises:
          ValueError: `prepare` has not seen a group in this round, or a sequence is longer than batch.tokens.
        """
        self.compile()
        if not groups:
            return
        groups = credit.trained(groups, self._algorithm)
        for rollout in _rollouts(groups):
            if rollout.id not in self._credits:
                raise ValueError(
                    f"learner: rollout {tuple(rollout.id)} was not prepared in this round; call prepare "
                    f"with its group first"
                )
        still = [self._has_no_gradient(group) for group in groups]
        moving, others = ([group for group, one in zip(groups, still) if one is kind] for kind in (False, True))
        sizes = dict(rows=self._batch.rows, tokens=self._batch.tokens, shared=self._batch.shared_prompts)
        passes = functools.partial(packing.count, **sizes)
        if others and GRADIENT * passes(moving) + passes(others) < GRADIENT * passes(groups):
            self._add("accumulate", moving)
            self._add("measure", others)
        else:
            self._add("accumulate", groups)
        self._seen += [
            (rollout, self._credits[rollout.id])
            for group in groups
            for rollout, scored in zip(group.rollouts, group.scored, strict=True)
            if scored
        ]

    def _add(self, program: str, groups: Sequence[Group]) -> None:
        batches, places = self._packed(groups)
        at_start = np.bool_(self._old.from_gradient)
        start = meshes.put(at_start, meshes.replicated(self._mesh))
        results = []
        for batch in batches:
            if self._lent_devices and self._lent_devices.takes():
                results.append(self._lent_devices.add(program, self.params, batch, at_start))
                self._lent_batches += 1
                continue
            placed = self._put(batch)
            self._sums, logps = self._programs[program](self.params, self._sums, placed, start, *self._taught)
            self._sums = self._critic.accumulate(self.params, self._sums, placed)
            results.append(logps)
            self._newest = logps
        self._old.accumulated(groups, results, places)
        self._filled += sum(int((batch.segment_ids > 0).sum()) for batch in batches)
        self._texts += sum(one.prompt.tokens.size + len(one) for one in _rollouts(groups))
        self._room += len(batches) * self._batch.rows * self._batch.tokens

    @property
    def _of_advantages(self) -> bool:
        """Returns whether every term of the loss is a multiple of the advantage. A critic's loss is not."""
        if self._critic.there:
            return False
        a = self._algorithm
        if a.loss_mode in ("sft", "gkd") or a.entropy_coef > 0 or a.old_kl_coef > 0 or a.marks or a.routes_cost:
            return False
        return not (self._kl_in_loss and a.kl_loss_coef > 0)

    def _has_no_gradient(self, group: Group) -> bool:
        return self._of_advantages and not any(self._credits[rollout.id].advantages.any() for rollout in group.rollouts)

    def borrow(self) -> None:
        """Lets the lent devices take their share of the micro-batches from now on."""
        self._lent_devices.borrow()

    def give_back(self) -> None:
        """Adds the sums of the lent devices to the learner's own and stops using these devices.

        Afterwards they hold nothing of the learner's except log-probs that the commit will read.
        """
        self._join()
        self._lent_devices.here = False

    def restore(self, read: Callable[[TrainState], TrainState], step: int) -> None:
        """Continues from a checkpoint that was taken between two rounds.

        `read` gets the state as ShapeDtypeStructs and returns the saved state. The buffers of the current state are
        freed before `read` is called.

        Raises:
          ValueError: the saved weights are additions to another base.
        """
        shapes, mine = abstract(self.state), jax.jit(lora.digest)(self._base) if self._base else None
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()
        self.state, self._step = read(shapes), step
        lora.check_base(mine, self.state.params.get("base"), f"step {step}")

    def gradient(self) -> Any:
        """Returns the divided gradient before clipping, in the learner's layout. `commit` would step along it."""
        self.compile()
        self._join()
        return self._programs["divided"](self._sums)

    def _join(self) -> None:
        if self._lent_devices:
            self._sums = self._lent_devices.joined(self._sums)

    def commit(self) -> Mapping[str, Any]:
        """Takes one optimizer step from the accumulated sums.

        Returns metrics: device scalars, and floats that were computed on the host.
        """
        self.compile()
        self._old.settle(self.logprobs)
        self._join()
        lets = self.gate.lets(self._old.pairs, [r.versions[r.sampled] for r, _ in self._seen], self._step)
        if not lets:
            self._sums = self._programs["zeros"]()
            self._critic.begin(self._programs)
        learned = self._critic.commit(self._state.step)
        self._state, self._sums, self._finite, metrics = self._programs["commit"](self._state, self._sums)
        self._step += 1
        self._newest = metrics["actor/grad_norm"]
        self._old.committed = True
        metrics = {**metrics, **learned, **self._host_metrics()}
        self.kl.update([kl for piece in self._found for kl in piece.kls])
        if self.gate.watches:
            metrics["training/gated_updates"] = float(not lets)
        self._begin_step()
        return metrics

    @property
    def _kl_in_loss(self) -> bool:
        """Returns whether the loss has a KL term.

        With coefficient 0 it has one only if the reference serves nothing else. The term is then only reported.
        """
        return self._reference is not None and (
            self._algorithm.kl_loss_coef > 0 or not (self._algorithm.use_kl_in_reward or self._algorithm.compares_pairs)
        )

    def _begin_round(self) -> None:
        self._old.begin_round()
        self._ref: dict[RolloutId, np.ndarray] = {}
        self._credits: dict[RolloutId, credit.Credit] = {}

    def _begin_step(self) -> None:
        """Resets what the next commit reports. Only the round's first commit reports the results of `prepare`."""
        self._old.begin_step()
        self._found: list[credit.CreditStats] = []
        self._seen: list[tuple[Rollout, credit.Credit]] = []
        self._filled, self._texts, self._room, self._lent_batches = 0, 0, 0, 0

    def _put(self, batch: packing.Batch) -> packing.Batch:
        return meshes.put(batch, self._recipe.rows.sharding)

    @property
    def _sizes(self) -> dict[str, Any]:
        shapes = self._shapes
        return dict(rows=shapes.rows, tokens=shapes.tokens, dtype=shapes.dtype) | shapes.records

    def _packed(self, groups: Sequence[Group]) -> tuple[list[packing.Batch], list[packing.RolloutSpan]]:
        rollouts = _rollouts(groups)
        given = self._old.leaves(rollouts, self._step) | ({"ref_logprobs": self._ref} if self._kl_in_loss else {})
        batches, places = packing.pack(groups, self._credits, leaves=self._shapes.leaves, given=given, **self._sizes)
        return self._noise.added(batches, places, rollouts, self._step), places

    def _scores(self, policy: Any) -> Callable[[packing.Batch], jax.Array]:
        return lambda batch: self._programs["score"](policy, batch)

    def _of_reference(
        self, packed: tuple[list[packing.Batch], list[packing.RolloutSpan]]
    ) -> dict[RolloutId, np.ndarray]:
        """Returns the reference's log-probs of groups that `_bare` packed."""
        batches, places = packed
        if not self._algorithm.router_replay_reference:
            batches = [packing.unrouted(batch) for batch in batches]
        return self._over((batches, places), self._scores(self._reference))

    def _bare(
        self, groups: Sequence[Group], noisy: bool = False
    ) -> tuple[list[packing.Batch], list[packing.RolloutSpan]]:
        """Returns groups packed to be scored alone. `noisy`: with NEFTune's noise, if any."""
        batches, places = packing.pack(groups, None, **self._sizes)
        return self._noise.added(batches, places, _rollouts(groups) if noisy else (), self._step), places

    def _over(
        self, packed: tuple[list[packing.Batch], list[packing.RolloutSpan]], run: Callable[[packing.Batch], Any]
    ) -> dict[RolloutId, np.ndarray]:
        """Returns what `run` computes of each token, float[T] on the host, by rollout id."""
        batches, places = packed
        return packing.per_rollout(jax.device_get([run(self._put(batch)) for batch in batches]), places)

    def _host_metrics(self) -> dict[str, float]:
        out = {"training/packed_fill_ratio": self._filled / self._room if self._room else 0.0}
        out |= credit.describe(self._found, self.kl.applied(self._algorithm))
        if self._batch.shared_prompts:
            out["training/shared_tokens"] = float(self._texts - self._filled)
        if self._lent_devices:
            out["training/lent_micro_batches"] = float(self._lent_batches)
        out |= credit.spreads(self._seen)
        if not self._old.pairs:
            return out
        return out | mismatch(self._old.pairs) | mismatch_by_cause(self._old.pairs, self._old.current)


def _rollouts(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]
