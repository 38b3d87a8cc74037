"""What clients train: their weights, moments and gradient sums on the devices, and the steps that change them.

Invariant: a step of one client reads and writes that client's arrays alone. Its bits follow from the weights that it began
with and from its own requests, in their order.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.models import decoder, lora
from jaxrl_post.models.model_config import Lora
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.serve.schema import Refusal
from jaxrl_post.serve.tinker.losses import Bounds
from jaxrl_post.serve.tinker.programs import Datum, Micro, Moments, Programs, adam_scalars, pack, unpacked
from jaxrl_post.serve.tinker.snapshots import Snapshot
from jaxrl_post.trainer import placement
from jaxrl_post.trainer.programs import Recipe
from jaxrl_post.trainer.state import frozen, owned


@dataclass(kw_only=True)
class Run:
    """A client's training. `lora`: None where it trains all weights. `sums`: None before the first gradient of a step."""

    name: str
    lora: Lora | None
    weights: Any
    moments: Moments
    sums: Any = None
    steps: int = 0


class Outcome(NamedTuple):
    """Log-probs and losses of each datum, float32[N] each."""

    logprobs: list[np.ndarray]
    losses: list[np.ndarray]

    @property
    def total(self) -> float:
        """Returns the sum of all losses, added up in float64 in the order of the datums."""
        return float(sum(one.sum(dtype=np.float64) for one in self.losses))


class Trainer:
    """The runs of all clients over one base.

    Args:
      recipe: of the base, without additions. Its dtypes, mesh and kernels are those of every run.
      base: its weights, float32: a function from shardings to arrays, or arrays that may lie in place already.
      name: of the base.
      rows, tokens: of a micro-batch.

    Attributes:
      runs: by name.
    """

    def __init__(self, recipe: Recipe, base: Any, *, name: str, rows: int, tokens: int):
        self._recipe, self._name, self._rows, self._tokens = recipe, name, rows, tokens
        self.base = frozen(base, placement.of_policy(recipe.model, recipe.mesh)[0])
        self._marks = _marks(self.base)
        self._programs: dict[Lora | None, Programs] = {}
        self.runs: dict[str, Run] = {}

    def begin(self, name: str, given: Lora | None, seed: int) -> Run:
        """Adds a run at the base's own weights. `seed`: of the additions' first values."""
        homes = self._of(given).homes
        first = self.base if given is None else lora.init(self._model(given), seed)
        weights = owned(first, homes)
        self.runs[name] = Run(name=name, lora=given, weights=weights, moments=_rest(weights, homes))
        return self.runs[name]

    def forward(self, name: str, datums: Sequence[Datum], loss: str, bounds: Bounds) -> Outcome:
        """Returns what the present weights of a run give."""
        run = self.runs[name]
        return self.scored(self._policy(run.lora, run.weights), datums, loss, bounds)

    def scored(self, policy: Any, datums: Sequence[Datum], loss: str, bounds: Bounds) -> Outcome:
        """Returns what a policy gives: the tree of all weights, or a lora.Adapted."""
        program = self._of(policy.lora if isinstance(policy, lora.Adapted) else None).forward[loss]
        return self._over(datums, lambda micro: program(policy, micro, bounds))

    def forward_backward(self, name: str, datums: Sequence[Datum], loss: str, bounds: Bounds) -> Outcome:
        """Does the same as `forward`, and adds the gradient of the summed loss to the run's sums."""
        run = self.runs[name]
        own, policy = self._of(run.lora), self._policy(run.lora, run.weights)
        if run.sums is None:
            run.sums = own.zeros(run.weights)

        def add(micro: Micro) -> tuple[Any, Any]:
            run.sums, *found = own.accumulate[loss](policy, run.sums, micro, bounds)
            return tuple(found)

        return self._over(datums, add)

    def step(self, name: str, adam: Mapping[str, float]) -> float:
        """Takes an optimizer step along the sums, which it empties, and returns the norm of the gradient before clipping.

        Refused: a gradient that is not finite. Weights and moments keep every bit, and the sums are dropped."""
        run = self.runs[name]
        own = self._of(run.lora)
        sums = own.zeros(run.weights) if run.sums is None else run.sums
        run.weights, run.moments, norm = own.step(run.weights, run.moments, sums, adam_scalars(run.steps + 1, **adam))
        run.sums, norm = None, float(norm)
        if not np.isfinite(norm):
            raise Refusal("the gradient is not finite, so the step was left out; look at log-probs and advantages")
        run.steps += 1
        return norm

    # ---- saved weights

    def snapshot(self, name: str, *, optimizer: bool) -> Snapshot:
        """Returns the weights of a run, with the optimizer's state where asked for."""
        run = self.runs[name]
        trees = {"weights": run.weights}
        if optimizer:
            trees |= run.moments._asdict()
        mark = self._marks[run.lora is not None]
        return Snapshot(base=self._name, mark=mark, lora=run.lora, steps=run.steps, trees=jax.device_get(trees))

    def load(self, name: str, saved: Snapshot, *, optimizer: bool) -> None:
        """Continues a run from saved weights. Gradients that were added are dropped.

        Refused: weights of another base or form, or without the optimizer's state."""
        run = self.runs[name]
        self.check(saved)
        if saved.lora != run.lora:
            raise Refusal(f"the saved weights are {_form(saved.lora)}, and the model trains {_form(run.lora)}", "path")
        if optimizer and len(saved.trees) == 1:
            raise Refusal("the saved weights have no optimizer's state; load them without it", "path")
        homes = self._of(run.lora).homes
        run.weights, run.sums = owned(saved.trees["weights"], homes), None
        if optimizer:
            run.moments = Moments(*(owned(saved.trees[part], homes) for part in Moments._fields))
            run.steps = saved.steps
        else:
            run.moments, run.steps = _rest(run.weights, homes), 0

    def check(self, saved: Snapshot) -> None:
        """Refuses weights of another base: additions to other weights, or all weights in other shapes."""
        if saved.base != self._name:
            raise Refusal(f"the saved weights belong to {saved.base!r}, and {self._name!r} is served here", "path")
        if saved.mark != self._marks[saved.lora is not None]:
            what = (
                "all weights of a model with other shapes than"
                if saved.lora is None
                else "additions to other weights than"
            )
            raise Refusal(
                f"the saved weights are {what} {self._name!r} here; serve the model that they were saved of", "path"
            )

    def policy(self, saved: Snapshot) -> Any:
        """Returns the policy of saved weights, in the learner's layout."""
        self.check(saved)
        return self._policy(saved.lora, owned(saved.trees["weights"], self._of(saved.lora).homes))

    # ---- one form of weights

    def _model(self, given: Lora | None) -> decoder.ModelConfig:
        return self._recipe.model if given is None else lora.adapting(self._recipe.model, given)

    def _of(self, given: Lora | None) -> Programs:
        """Returns the programs of a form of weights."""
        if given not in self._programs:
            model = self._model(given)
            recipe = dataclasses.replace(self._recipe, model=model)
            homes = lora.trained(placement.of_policy(model, self._recipe.mesh)[0])
            self._programs[given] = Programs(recipe, homes)
        return self._programs[given]

    def _policy(self, given: Lora | None, weights: Any) -> Any:
        return weights if given is None else lora.Adapted(self.base, weights, given)

    def _over(self, datums: Sequence[Datum], run: Callable[[Micro], tuple[Any, Any]]) -> Outcome:
        """Returns what `run` gives for every micro-batch, by datum."""
        micros, places = pack(datums, self._rows, self._tokens)
        rows = meshes.batch_sharding(self._recipe.mesh)
        found = jax.device_get([run(meshes.put(micro, rows)) for micro in micros])
        return Outcome(*(unpacked([one[part] for one in found], places) for part in range(2)))


def _marks(base: Any) -> tuple[str, str]:
    """Returns digests of a base, as text: of its shapes, and of its bits."""
    shapes = [(jax.tree_util.keystr(path), leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(base)]
    bits = jax.device_get(jax.jit(lora.digest)(base))
    return f"{zlib.crc32(repr(shapes).encode()):08x}", "".join(f"{one:08x}" for one in bits.tolist())


def _rest(weights: Any, homes: Any) -> Moments:
    """Returns moments of zeros."""
    zeros = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), out_shardings=homes)
    return Moments(zeros(weights), zeros(weights))


def _form(given: Lora | None) -> str:
    return "all weights" if given is None else f"additions of rank {given.rank} to {', '.join(given.targets)}"
