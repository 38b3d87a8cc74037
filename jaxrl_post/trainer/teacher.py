"""The teacher of on-policy distillation: a frozen model that scores what the policy sampled.

It may have another size than the policy, and lies on the learner's mesh in the number format that it was given in. Its
log-probs are of the policy's temperature.

Invariant: its weights never change and are no part of the state. A run that resumes reads them again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.trainer import compiled_programs, placement, programs
from jaxrl_post.trainer.packing import Batch
from jaxrl_post.trainer.state import abstract, frozen

_SCORE = "teacher score"


class NoTeacher:
    """Stands for the teacher in runs that have none: it has no program, and changes no recipe."""

    def joined(self, recipe: programs.Recipe) -> tuple[programs.Recipe, tuple]:
        return recipe, ()

    def jitted(self, mesh: Any, shapes: Any, recipe: Any) -> compiled_programs.Jitted:
        return {}

    def logprobs(self, compiled: Any) -> Any:
        """Is never called: no advantage asks for it."""
        raise AssertionError("a run without a teacher asks for its log-probs")


class Teacher:
    """Holds the teacher's weights."""

    def __init__(self, model: decoder.ModelConfig, params: Any, mesh: Mesh, attention: Callable | None = None):
        """Places the weights.

        Args:
          params: host or device arrays, ShapeDtypeStructs for a teacher that only plans, or a function from shardings to
            arrays. Their dtype stays.
          attention: the devices' kernel for packed rows, for this model, or None for the jnp form.

        Raises:
          ValueError: the mesh does not divide the model.
        """
        meshes.check_divisible(mesh, decoder.axes(model), decoder.abstract(model), "learner")
        self._model, self._attention = model, attention
        self._weights = frozen(params, placement.of_policy(model, mesh)[0])

    @property
    def model(self) -> decoder.ModelConfig:
        return self._model

    def joined(self, recipe: programs.Recipe) -> tuple[programs.Recipe, tuple]:
        """Returns the policy's recipe with the teacher's in it, and its weights, where the loss compares whole laws."""
        if recipe.algorithm.loss_mode != "gkd":
            return recipe, ()
        return dataclasses.replace(recipe, teacher=self._own(recipe)), (self._weights,)

    def jitted(self, mesh: Mesh, shapes: compiled_programs.Shapes, recipe: programs.Recipe) -> compiled_programs.Jitted:
        """Returns its program by name, with the shapes of its arguments, where the advantage needs log-probs.

        `recipe`: the policy's.
        """
        if not recipe.algorithm.teacher_coef:
            return {}
        own = self._own(recipe)
        score = jax.jit(lambda p, b: programs.score(p, b, own)[0], out_shardings=meshes.replicated(mesh))
        return {_SCORE: (score, (abstract(self._weights), shapes.bare(mesh)))}

    def logprobs(self, compiled: Mapping[str, Any]) -> Callable[[Batch], Float[Array, "B T"]]:
        """Returns a function from a placed batch to the log-prob of every token, [B, T]. `compiled`: programs by name."""
        return lambda batch: compiled[_SCORE](self._weights, batch)

    def _own(self, recipe: programs.Recipe) -> programs.Recipe:
        return dataclasses.replace(recipe, model=self._model, attention=self._attention)
