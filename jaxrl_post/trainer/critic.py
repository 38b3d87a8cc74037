"""The critic: a value of the state before every token, and its own optimizer step beside the policy's.

Its weights are a scalar head {"value": [D], "bias": []} and, unless it reads the policy's last layer, a decoder of its own
under "trunk". The decoder has the policy's shape and no head. The value of a token is computed from the position before
it, as its log-prob is.

Invariants:
- Values are computed once, at the weights of the round's start. Advantages and returns follow from them.
- The value loss has the weights and the divisor of the policy's loss. With the policy's trunk it is added to the policy's
  gradient, times critic.loss_coef, by a pass of its own.
- A step that is not finite, or that counted nothing, leaves every bit. The policy's step is another matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxrl_post.algorithms import losses
from jaxrl_post.config import CriticConfig, OptimizerConfig
from jaxrl_post.models import decoder, lora
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.trainer import compiled_programs, programs
from jaxrl_post.trainer import optimizer as optimizers
from jaxrl_post.trainer.packing import Batch
from jaxrl_post.trainer.state import TrainState, abstract, is_abstract, moments, owned, struct


class NoCritic:
    """Stands for the critic in runs that have none: hands back what it is given, and has no programs and no metrics."""

    there, warmup_steps = False, 0

    def joined(self, state: TrainState) -> TrainState:
        """Returns the policy's state."""
        return state

    def taken(self, whole: TrainState) -> TrainState:
        """Returns the policy's state."""
        return whole

    def jitted(self, own: Any, mesh: Any, shapes: Any, recipe: Any) -> compiled_programs.Jitted:
        return {}

    def begin(self, compiled: Mapping[str, Any]) -> None:
        """Does nothing."""

    def accumulate(self, policy: Any, policy_sums: Any, batch: Any) -> Any:
        return policy_sums

    def commit(self, step: Any) -> dict[str, Any]:
        return {}


class Critic:
    """Holds the critic's weights, its optimizer's state and the sums of its gradient.

    `warmup_steps`: the policy stands still over these first steps.
    """

    there = True

    def __init__(
        self,
        model: decoder.ModelConfig,
        start: Any,
        mesh: Mesh,
        *,
        settings: CriticConfig,
        optimizer: OptimizerConfig,
        steps: int,
    ):
        """Begins with a head of zeros, so that every first value is 0.

        Args:
          start: the policy's weights, or others of its shape, in the forms that trainer.learner.Learner takes.
          optimizer: of the policy. The critic has the learning rate of `settings`.
        """
        model = lora.plain(model)
        self._model, self._settings = dataclasses.replace(model, tied=True), settings
        self.warmup_steps, self._own = settings.warmup_steps, settings.trunk == "own"
        axes: dict[str, Any] = {"value": ("embed",), "bias": ()}
        axes |= {"trunk": decoder.axes(self._model)} if self._own else {}
        self._shardings = meshes.param_shardings(mesh, axes, "learner")
        self._optimizer = optimizers.optimizer(
            dataclasses.replace(optimizer, lr=settings.lr), optimizers.matrices(axes), steps
        )
        whole = meshes.param_shardings(mesh, decoder.axes(model), "learner")
        self.weights = self._first(model, start, whole)
        self._moments: Any = moments(self._optimizer.transform, self.weights, self._shardings, meshes.replicated(mesh))
        self._programs: Mapping[str, Any] = {}
        self._sums: programs.Sums | None = None

    def _first(self, model: decoder.ModelConfig, start: Any, whole: Any) -> dict[str, Any]:
        kinds = [np.float32] if callable(start) else [leaf.dtype for leaf in jax.tree.leaves(start)]
        dtype = np.promote_types(kinds[0], np.float32)
        head = {"value": jax.ShapeDtypeStruct((model.embed,), dtype), "bias": jax.ShapeDtypeStruct((), dtype)}
        if is_abstract(start):
            head = jax.tree.map(struct, head, {name: self._shardings[name] for name in head})
        else:
            head = {name: meshes.put(np.zeros(x.shape, dtype), self._shardings[name]) for name, x in head.items()}
        if not self._own:
            return head
        trunk = owned(start, whole)
        return head | {"trunk": {name: part for name, part in trunk.items() if name != "head"}}

    # ---- the critic's part of the run's state

    def joined(self, state: TrainState) -> TrainState:
        """Returns the state of policy and critic together, from that of the policy."""
        return TrainState(
            params={**state.params, "critic": self.weights},
            opt_state={"policy": state.opt_state, "critic": self._moments},
            step=state.step,
        )

    def taken(self, whole: TrainState) -> TrainState:
        """Takes the critic's part of a state of both, and returns that of the policy."""
        self.weights, self._moments = whole.params["critic"], whole.opt_state["critic"]
        rest = {name: tree for name, tree in whole.params.items() if name != "critic"}
        return TrainState(params=rest, opt_state=whole.opt_state["policy"], step=whole.step)

    # ---- what the learner calls

    def begin(self, compiled: Mapping[str, Any]) -> None:
        """Takes the compiled programs by name, and empties the sums."""
        self._programs = compiled
        self._sums = compiled["critic zeros"]()

    def values(self, policy: Any) -> Callable[[Batch], Float[Array, "B T"]]:
        """Returns a function from a placed batch to the value before every token, [B, T], at the present weights."""
        return lambda batch: self._programs["critic values"](self.weights, self._reads(policy), batch)

    def accumulate(self, policy: Any, policy_sums: programs.Sums, batch: Batch) -> programs.Sums:
        """Adds the undivided gradient of a micro-batch. Returns the policy's sums, which have its part of it."""
        given = self.weights, self._reads(policy), self._sums
        if self._own:
            self._sums = self._programs["critic accumulate"](*given, batch)
            return policy_sums
        self._sums, policy_sums = self._programs["critic accumulate"](*given, policy_sums, batch)
        return policy_sums

    def gradient(self) -> Any:
        """Returns the divided gradient before clipping, a tree like `weights`."""
        return self._programs["critic divided"](self._sums)

    def commit(self, step: Any) -> dict[str, Any]:
        """Takes one optimizer step, the policy's `step`, and empties the sums. Returns metrics as device scalars."""
        given = self.weights, self._moments, self._sums, step
        self.weights, self._moments, self._sums, metrics = self._programs["critic commit"](*given)
        return metrics

    def _reads(self, policy: Any) -> Any:
        """Returns the weights beside its own that the critic reads."""
        return None if self._own else policy

    # ---- the programs

    def jitted(
        self, own: compiled_programs.Jitted, mesh: Mesh, shapes: compiled_programs.Shapes, recipe: programs.Recipe
    ) -> compiled_programs.Jitted:
        """Returns the critic's programs by name, with the shapes of their arguments. `own`: the policy's programs."""
        one, (policy, policy_sums, batch, _) = meshes.replicated(mesh), own["accumulate"][1]
        weights, state = abstract(self.weights), abstract(self._moments)
        reads = self._reads(policy)
        shape = jax.eval_shape(lambda: self._empty(weights, reads, batch, recipe))
        home = jax.tree.map(lambda _: one, shape)
        home = dataclasses.replace(home, grads=self._homes(recipe))
        sums, step = jax.tree.map(struct, shape, home), jax.ShapeDtypeStruct((), np.int32, sharding=one)
        shared = () if self._own else (policy_sums,)
        added = home if self._own else (home, jax.tree.map(lambda x: x.sharding, policy_sums))
        places = tuple(jax.tree.map(lambda x: x.sharding, tree) for tree in (weights, state))
        made = {
            "zeros": (lambda: programs.zeros(shape, recipe), (), home, ()),
            "values": (lambda w, p, b: self._values(w, p, b, recipe), (weights, reads, shapes.bare(mesh)), one, ()),
            "accumulate": (
                lambda w, p, s, *rest: self._added(w, p, s, *rest, recipe=recipe),
                (weights, reads, sums, *shared, batch),
                added,
                (2,) if self._own else (2, 3),
            ),
            "divided": (lambda s: self._divided(s, recipe), (sums,), self._shardings, ()),
            "commit": (
                lambda w, o, s, step: self._stepped(w, o, s, step, recipe),
                (weights, state, sums, step),
                (*places, home, one),
                (0, 1, 2),
            ),
        }
        return {
            f"critic {name}": (jax.jit(run, donate_argnums=donated, out_shardings=out), given)
            for name, (run, given, out, donated) in made.items()
        }

    def _homes(self, recipe: programs.Recipe) -> Any:
        if not self._own:
            return self._shardings
        return self._shardings | {"trunk": compiled_programs.homes(self._shardings["trunk"], recipe)}

    def _values(self, weights: Any, policy: Any, batch: Batch, recipe: programs.Recipe) -> Float[Array, "B T"]:
        trunk, model = (weights["trunk"], self._model) if self._own else (lora.whole(policy), recipe.model)
        h = programs.hidden(trunk, model, batch, recipe)
        with jax.named_scope("values"):
            wide = jnp.promote_types(h.dtype, jnp.float32)
            found = jnp.einsum("btd,d->bt", h.astype(wide), weights["value"].astype(wide)) + weights["bias"]
            return jnp.pad(recipe.rows.joined(found)[:, :-1], ((0, 0), (1, 0)))

    def _numerator(self, weights: Any, policy: Any, batch: Batch, recipe: programs.Recipe) -> tuple[Any, programs.Sums]:
        """Returns the undivided loss of a micro-batch, and its sums without a gradient."""
        found = self._values(weights, policy, batch, recipe)
        with jax.named_scope("value_loss"):
            mask = batch.loss_mask
            per_token, indicators = losses.clipped_value(
                found, batch.values, batch.returns, self._settings.cliprange_value
            )
            total = jnp.sum(jnp.where(mask, batch.loss_weights * per_token, 0.0))
            told = {"critic/vpred_mean": found, **indicators}
            by_token = {name: jnp.sum(jnp.where(mask, x, 0.0)) for name, x in told.items()}
        return total, programs.counted(batch, {"critic/vf_loss": total}, by_token)

    def _slope(self, weights: Any, policy: Any, batch: Batch, recipe: programs.Recipe) -> tuple[programs.Sums, Any]:
        """Returns the critic's sums of a micro-batch, and the gradient by the policy's trained weights where it has one."""
        if self._own:
            grads, sums = jax.grad(self._numerator, has_aux=True)(weights, policy, batch, recipe)
            return dataclasses.replace(sums, grads=self._in_sums(grads, recipe)), None

        def loss(weights: Any, trained: Any) -> tuple[Any, programs.Sums]:
            return self._numerator(weights, lora.with_trained(policy, trained), batch, recipe)

        (grads, more), sums = jax.grad(loss, argnums=(0, 1), has_aux=True)(weights, lora.trained(policy))
        more = jax.tree.map(lambda g: self._settings.loss_coef * g, more)
        return dataclasses.replace(sums, grads=grads), programs.in_sums(more, recipe)

    def _empty(self, weights: Any, policy: Any, batch: Batch, recipe: programs.Recipe) -> programs.Sums:
        def sums(weights: Any, policy: Any, batch: Batch) -> programs.Sums:
            _, found = self._numerator(weights, policy, batch, recipe)
            return dataclasses.replace(found, grads=self._in_sums(weights, recipe))

        return programs.zeros(jax.eval_shape(sums, weights, policy, batch), recipe)

    def _in_sums(self, grads: Any, recipe: programs.Recipe) -> Any:
        """Returns a gradient by the critic's weights in the form of Sums.grads."""
        return grads | {"trunk": programs.in_sums(grads["trunk"], recipe)} if self._own else grads

    def _added(self, weights: Any, policy: Any, sums: Any, *rest: Any, recipe: programs.Recipe) -> Any:
        *shared, batch = rest
        added, more = self._slope(weights, policy, batch, recipe)
        if not shared:
            return programs.plus(sums, added)
        (policy_sums,) = shared
        both = dataclasses.replace(policy_sums, grads=programs.plus(policy_sums.grads, more))
        return programs.plus(sums, added), both

    def _divided(self, sums: programs.Sums, recipe: programs.Recipe) -> Any:
        grads = sums.grads
        if self._own:
            grads = grads | {"trunk": programs.by_layer(grads["trunk"], recipe)}
        return programs.mean(grads, sums.count)

    def _stepped(
        self, weights: Any, state: Any, sums: programs.Sums, step: Any, recipe: programs.Recipe
    ) -> tuple[Any, Any, programs.Sums, dict[str, jax.Array]]:
        with jax.named_scope("critic_commit"):
            norm = programs.gradient_norm(sums)
            sound = jnp.isfinite(norm) & (sums.count > 0)
            grads = self._divided(sums, recipe)
            weights, state, lr = programs.stepped(weights, state, grads, norm, sound, step, self._optimizer)
            metrics = programs.means(sums) | {
                "critic/grad_norm": norm,
                "critic/lr": lr,
                "critic/skipped_updates": 1 - sound.astype(jnp.int32),
            }
            return weights, state, jax.tree.map(jnp.zeros_like, sums), metrics
