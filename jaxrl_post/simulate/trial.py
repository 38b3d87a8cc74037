"""A trial of a run's own scheduler over rollouts of known lengths: the second at which each optimizer step ends.

Invariant: a trial is a function of its arguments. It reads no clock and no file, and its seeds are fixed. The scheduler
is the one that the run would have. Drafts, loans, filters and further layouts are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxrl_post.config import Config, EvalConfig, SchedulerConfig, WatchdogConfig
from jaxrl_post.ring import loop
from jaxrl_post.ring.events import Ring
from jaxrl_post.ring.types import Group, Sampling
from jaxrl_post.scheduler import registry
from jaxrl_post.scheduler.forecast import Cost, ReplicaCapacity
from jaxrl_post.scheduler.learner_pace import Pace, Split
from jaxrl_post.simulate import workloads
from jaxrl_post.simulate.engine import SimEngine
from jaxrl_post.simulate.learner import Lengths, SimLearner, SimRewards
from jaxrl_post.simulate.pace import LockStep, SideBySide, Wall
from jaxrl_post.simulate.texts import SimTexts


@dataclass(frozen=True, kw_only=True)
class TrialInputs:
    """What a trial knows of a run beside its config."""

    lengths: tuple[tuple[int, ...], ...]  # of rollouts, in tokens, one list for each prompt that was observed
    prompts: int  # of an epoch
    prompt_tokens: int  # of a prompt
    replica: ReplicaCapacity  # of the engine, with the cost of its steps
    token_s: float  # seconds of a trained token
    step_s: float = 0.0  # seconds of an optimizer step beside its tokens
    drift: float = 0.0  # chance per token that the next weights sample another one there
    seed: int = 0  # of the rollouts; equal seeds give equal rollouts to every scheduler


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a trial found."""

    ends: tuple[float, ...]  # seconds from the start to the publish after each optimizer step
    oldest: int  # age of the oldest token that was trained on, in optimizer steps


@dataclass(frozen=True, kw_only=True)
class InSizes:
    """A Cost of an engine that computes rows in compiled sizes. A step costs what the smallest size that holds it costs."""

    cost: Cost
    sizes: tuple[int, ...]

    @property
    def prefill_s(self) -> float:
        """Returns the seconds of a prefilled token."""
        return self.cost.prefill_s

    @property
    def source(self) -> str:
        """Returns where the costs come from."""
        return self.cost.source

    @property
    def digest(self) -> str:
        """Returns the digest of the costs."""
        return self.cost.digest

    def __call__(self, rows: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Returns the seconds of a step, elementwise. Without a row: 0."""
        rows, sizes = np.asarray(rows), np.sort(np.asarray(self.sizes))
        held = sizes[np.minimum(np.searchsorted(sizes, rows), sizes.size - 1)]
        return self.cost(np.where(rows > 0, np.maximum(held, rows), 0), np.asarray(context))


def run(config: Config, job: TrialInputs, rounds: int) -> Trial:
    """Runs `rounds` rounds of a config, from an idle engine to the last optimizer step.

    Raises:
      ValueError: options of the config contradict each other.
    """
    given = _alone(config, rounds)
    engine = SimEngine(
        SimTexts(workloads.groups(job.lengths), cap=given.sampling.max_tokens, tv=job.drift),
        replicas=given.replicas,
        slots=job.replica.slots,
        pace=LockStep(job.replica.cost),
        kv_tokens=job.replica.kv_tokens,
    )
    past, pace = Lengths(), _pace(given, job)
    prompts = workloads.SimPrompts(job.prompts, tokens=job.prompt_tokens, seed=job.seed)
    scheduler = registry.made(given, prompts, Sampling(), past.of, lambda: job.replica, pace)
    learner = SimLearner(token_s=job.token_s, step_s=job.step_s)
    watched = _Watched(learner, SideBySide(engine, learner) if pace else Wall(engine, learner))
    ring = Ring()
    ring.on("accumulating", watched.begun)
    ring.on("committed", lambda metrics, part: watched.wall.committed())
    ring.on("published", watched.published)
    loop.run(ring, engine, scheduler, SimRewards(records=[past]), learner, _publish, given.steps)
    return Trial(ends=tuple(watched.ends), oldest=watched.oldest)


def _alone(config: Config, rounds: int) -> Config:
    """Returns the config of a short run without evaluation, loans and filters."""
    plain = SchedulerConfig()
    unfiltered = {"filter_groups": False, "filter_metric": plain.filter_metric, "max_waves": plain.max_waves}
    scheduler = replace(config.scheduler, lend=0.0, **unfiltered)
    quiet = dict(eval=EvalConfig(prompts=0), watchdog=WatchdogConfig())
    return replace(config, steps=rounds * scheduler.updates, scheduler=scheduler, **quiet)


def _pace(config: Config, job: TrialInputs) -> Pace | None:
    """Returns how long new weights keep the engine waiting. None: learner and engine share devices."""
    return Split(job.replica, token_s=job.token_s, step_s=job.step_s) if config.mesh.engine else None


def _publish(learner: SimLearner, engine: SimEngine) -> int:
    engine.swap(learner.params, learner.step)
    return learner.step


class _Watched:
    """Listens to a ring: seconds by optimizer step, and the age of tokens."""

    def __init__(self, learner: SimLearner, wall: Wall):
        self._learner, self.wall = learner, wall
        self.ends: list[float] = []
        self.oldest = 0

    def begun(self, groups: Sequence[Group]) -> None:
        self.wall.begun(groups)
        ages = [self._learner.step - int(one.versions.min()) for group in groups for one in group.rollouts if len(one)]
        self.oldest = max([self.oldest, *ages])

    def published(self, version: int) -> None:
        """Notes the second of a publish. Optimizer steps since the publish before end at the same second."""
        self.wall.published()
        self.ends += [math.fsum(self.wall.spent())] * (version - len(self.ends))
