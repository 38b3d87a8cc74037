"""The learner in a job where whole processes learn and whole processes generate.

Programs of the learner run in the processes that have its devices. The others take the same steps in number, and hear
the metrics of a step when they read them, so that they do not wait for it before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_post.models.decoder import ModelConfig
from jaxrl_post.parallel import exchange
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.types import Group
from jaxrl_post.trainer.learner import Learner
from jaxrl_post.trainer.state import TrainState, abstract


def learner(relays: exchange.Relays, model: ModelConfig, params: Any, mesh: Mesh, **more: Any) -> Learner:
    """Returns the learner of this process. `model`, `params`, `mesh`, `more`: as in Learner."""
    metrics = relays.open("metrics", min(meshes.processes(mesh)))
    kind = TellingLearner if meshes.is_here(mesh) else DistantLearner
    return kind(metrics, model, params, mesh, **more)


class Row(Mapping[str, float]):
    """Metrics of a step, of which the sender's reach all processes when they are first read.

    `read`: returns them in a process that has them on a device, None elsewhere.
    """

    def __init__(self, metrics: exchange.Relay, read: Callable[[], Mapping[str, float]] | None):
        self._metrics, self._read = metrics, read
        self._found: dict[str, float] | None = None

    @property
    def _values(self) -> dict[str, float]:
        if self._found is None:
            own = json.dumps(dict(self._read())).encode() if self._read else b""
            self._found = json.loads(self._metrics.broadcast(own))
        return self._found

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class TellingLearner(Learner):
    """A learner in a process that has some of its devices."""

    def __init__(self, metrics: exchange.Relay, *given: Any, **more: Any):
        super().__init__(*given, **more)
        self._metrics = metrics

    def commit(self) -> Mapping[str, Any]:
        """Takes one optimizer step; see Learner. Returns metrics that are read once in every process."""
        found = super().commit()
        return Row(self._metrics, lambda: {n: float(x) for n, x in jax.device_get(dict(found)).items()})


class DistantLearner(Learner):
    """A learner in a process without any of its devices. Its state is of ShapeDtypeStructs. It counts steps."""

    def __init__(
        self,
        metrics: exchange.Relay,
        model: ModelConfig,
        params: Any,
        mesh: Mesh,
        *,
        reference: Any = None,
        **more: Any,
    ):
        def shapes(homes: Any) -> Any:
            return abstract(params(homes))  # no piece of them is of this process, which hears why a file is refused

        same = None if reference is None else shapes
        super().__init__(model, shapes if callable(params) else params, mesh, reference=same, **more)
        self._metrics = metrics

    @property
    def at_work(self) -> bool:
        """Returns that none of the learner's devices is seen to compute from here."""
        return False

    def compile(self) -> None:
        """Compiles nothing here; see Learner."""

    def prepare(self, groups: Sequence[Group]) -> None:
        """Does nothing here; see Learner."""

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Does nothing here; see Learner."""

    def commit(self) -> Mapping[str, Any]:
        """Counts a step, and returns metrics that are heard when they are read; see Learner."""
        self._step += 1
        return Row(self._metrics, None)

    def restore(self, read: Callable[[TrainState], TrainState], step: int) -> None:
        """Goes on from a checkpoint that the others read; see Learner."""
        self._step = step
