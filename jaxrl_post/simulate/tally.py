"""An observer of a simulation: records what happened in each round, and computes the figures.

Invariant: the tally reads the simulation and never changes it. Seconds are those of the engine and of the learner.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_post.ring.protocols import Scheduler
from jaxrl_post.ring.types import Group, Part
from jaxrl_post.simulate.engine import SimEngine
from jaxrl_post.simulate.learner import SimLearner
from jaxrl_post.simulate.pace import Moments, Spent, Wall


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one round took, and what it trained on."""

    kind: str  # short or long
    generate_s: float  # seconds of generating
    train_s: float  # seconds of training
    lent_s: float  # seconds of both if drained replicas were lent to the learner (simulate/pace.py)
    lengths: np.ndarray  # of the trained rollouts, int64[N]
    reward: float  # mean reward
    staleness: float  # mean staleness of the trained tokens, in optimizer steps
    batches: int = 1  # trained on, one after the other

    @property
    def step_s(self) -> float:
        return self.generate_s + self.train_s


class Tally:
    """A protocols.Observer.

    `round_s`: seconds added to the generation of every round. `wall`: how seconds of engine and learner add up. None:
    engine and learner take turns.
    """

    def __init__(
        self,
        engine: SimEngine,
        scheduler: Scheduler,
        learner: SimLearner,
        *,
        round_s: float = 0.0,
        wall: Wall | None = None,
    ):
        self._engine, self._scheduler, self._learner, self._round_s = engine, scheduler, learner, round_s
        self._wall = wall or Wall(engine, learner)
        self._before = Spent(0.0, 0.0)
        self._counted: Counter[str] = Counter()  # since the last publish
        self._batches = 0
        self.moments = Moments(lambda: engine.seconds)  # listens to the engine's steps
        self._fresh: dict[tuple, tuple[Group, int]] = {}  # id -> group, step before its first commit
        self.phases: list[Callable[[str, float, float], object]] = []  # called with (name, begin, end)
        self.rounds: list[Round] = []
        self.counts: Counter[str] = Counter()

    def now(self) -> float:
        """Returns the simulated seconds since the start."""
        return sum(self._wall.spent()) + self._round_s * len(self.rounds)

    def begun(self, groups: Sequence[Group]) -> None:
        """Notes that the learner is about to accumulate these groups."""
        self._wall.begun(groups)

    def commit(self, metrics: Mapping[str, Any], part: Part) -> None:
        self._wall.committed()
        counted = self._scheduler.metrics()
        self._counted.update(counted)
        self._batches += int(counted.get("sched/num_rounds", 1))
        for group in part.groups:
            self._fresh.setdefault(group.rollouts[0].id, (group, self._learner.step - 1))

    def published(self, version: int) -> None:
        counted, self._counted = self._counted, Counter()
        batches, self._batches = self._batches, 0
        counted.update(self._engine.metrics())
        self.counts.update(counted)
        self._wall.published()
        seconds = self._wall.spent()
        groups, self._fresh = list(self._fresh.values()), {}
        rollouts = [(rollout, step) for group, step in groups for rollout in group.rollouts]
        generate_s, train_s = (after - before for after, before in zip(seconds, self._before))
        lent_s = self.moments.round_over([group for group, _ in groups], rollout_s=generate_s, train_s=train_s)
        self.rounds.append(
            Round(
                kind="long" if counted.get("sched/num_long_rounds") else "short",
                batches=batches,
                generate_s=generate_s + self._round_s,
                train_s=train_s,
                lent_s=self._round_s + lent_s,
                lengths=np.array([len(rollout) for rollout, _ in rollouts], np.int64),
                reward=float(np.mean([group.rewards.mean() for group, _ in groups])),
                staleness=_mean([float(step - rollout.versions.mean()) for rollout, step in rollouts if len(rollout)]),
            )
        )
        self._before = seconds
        ends = self.now()
        for phase in self.phases:
            phase("update_actor", ends - self._round_s - self.rounds[-1].train_s, ends - self._round_s)
            phase("update_weights", ends - self._round_s, ends)


def figures(rounds: Sequence[Round], counts: Mapping[str, float]) -> dict[str, float]:
    """Returns the figures of a simulation.

    - `*_s`: mean seconds per batch. Figures of short and of long rounds are per round. They are only given if both
      kinds occurred.
    - lengths: in tokens.
    - `period`: rounds per long round.
    - `tokens_wasted`: the share of generated tokens that was not trained.
    - `tokens_recomputed`: tokens kept from prefixes, as a share of generated tokens.
    """
    batches = sum(one.batches for one in rounds)
    out = {
        name: sum(getattr(one, of) for one in rounds) / batches
        for name, of in (("rollout_s", "generate_s"), ("step_s", "step_s"), ("lent_step_s", "lent_s"))
    }
    for kind in ("short", "long"):
        own = [one for one in rounds if one.kind == kind]
        if own and len(own) < len(rounds):
            out |= {
                f"{kind}_rollout_s": _mean([one.generate_s for one in own]),
                f"{kind}_step_s": _mean([one.step_s for one in own]),
                f"{kind}_lent_step_s": _mean([one.lent_s for one in own]),
                f"{kind}_longest": _mean([float(one.lengths.max()) for one in own]),
                f"{kind}_mean_length": float(np.concatenate([one.lengths for one in own]).mean()),
            }
    lengths = np.concatenate([one.lengths for one in rounds])
    generated = counts.get("sim/num_tokens_generated", 0.0)
    num_long = sum(one.kind == "long" for one in rounds)
    return out | {
        "period": len(rounds) / num_long if num_long else 1.0,
        "mean_length": float(lengths.mean()),
        "reward": _mean([one.reward for one in rounds]),
        "staleness": _mean([one.staleness for one in rounds]),
        "tokens_wasted": 1.0 - float(lengths.sum()) / generated if generated else 0.0,
        "tokens_recomputed": (counts.get("sim/num_tokens_reused", 0.0) / generated) if generated else 0.0,
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else math.nan
