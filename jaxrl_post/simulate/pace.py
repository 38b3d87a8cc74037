"""The seconds of a simulation: the speed of replicas, a step that lends them to the learner, and engine and learner together.

Invariant: seconds are computed from a cost, never measured. There are two paces, which say tokens and
seconds per unit of the engine's clock:

- `LockStep`: all replicas run in one program, and the clock counts its steps. A step takes as long as that of the
  slowest replica.
- `Independent`: each replica takes steps of its own. The clock counts ticks of equal length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from jaxrl_post.ring.types import Group, Rollout
from jaxrl_post.scheduler.forecast import Cost
from jaxrl_post.simulate.learner import SimLearner


@dataclass(frozen=True, kw_only=True)
class DraftSpeed:
    """Speculative decoding in replicas where at most `most_running` rollouts run.

    Each rollout there settles `tokens` tokens per step on average. It uses `width` additional rows.
    """

    tokens: float = 1.0
    width: int = 0
    most_running: int = 0

    def __post_init__(self):
        if not 1 <= self.tokens <= self.width + 1:
            raise ValueError(f"drafts: tokens={self.tokens} a step must lie between 1 and width + 1 = {self.width + 1}")

    def rates(self, running: np.ndarray) -> np.ndarray:
        """Returns the average tokens per step of a rollout, for each replica."""
        return np.where(running <= self.most_running, self.tokens, 1.0)

    def rows(self, running: np.ndarray) -> np.ndarray:
        return np.where(running <= self.most_running, running * (1 + self.width), running)


NO_DRAFTS = DraftSpeed()


class Pace(Protocol):
    """The speeds that the engine asks for. Arrays have one element per replica.

    `running` counts rollouts, `context` tokens in the KV cache, and `forced` tokens to prefill.
    """

    def rates(self, running: np.ndarray, context: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the tokens that each rollout gains per unit of the clock, over its next `tokens` tokens."""

    def stall(self, forced: float) -> float:
        """Returns for how many units of the clock a replica does nothing but prefill `forced` tokens."""

    def seconds(self, running: np.ndarray, context: np.ndarray, units: float, forced: np.ndarray) -> float:
        """Returns the seconds of `units` of the clock, including prefill. `context`: halfway through them."""


class LockStep:
    """The clock counts steps of one program over all replicas. Prefill happens between steps."""

    def __init__(self, cost: Cost, drafts: DraftSpeed = NO_DRAFTS):
        self._cost, self._drafts = cost, drafts

    def rates(self, running: np.ndarray, context: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return self._drafts.rates(running)

    def stall(self, forced: float) -> float:
        return 0.0

    def seconds(self, running: np.ndarray, context: np.ndarray, units: float, forced: np.ndarray) -> float:
        step = self._cost(self._drafts.rows(running), context).max()
        return float(units * step + self._cost.prefill_s * forced.max())


class Independent:
    """The clock counts ticks of `tick_s` seconds. The speed of a replica depends on its own rows and context."""

    def __init__(self, cost: Cost, tick_s: float, drafts: DraftSpeed = NO_DRAFTS):
        if not tick_s > 0:
            raise ValueError(f"tick_s={tick_s} must be above 0")
        self._cost, self._tick_s, self._drafts = cost, tick_s, drafts

    def rates(self, running: np.ndarray, context: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        middle = context + running * tokens / 2
        return self._drafts.rates(running) * self._tick_s / self._cost(self._drafts.rows(running), middle)

    def stall(self, forced: float) -> float:
        return self._cost.prefill_s * forced / self._tick_s

    def seconds(self, running: np.ndarray, context: np.ndarray, units: float, forced: np.ndarray) -> float:
        return units * self._tick_s


def step_s(
    done: Sequence[float],
    groups: Sequence[tuple[float, float]],
    *,
    rollout_s: float,
    train_s: float,
    first: float = 0.2,
    share: float = 0.5,
    migrate_s: float = 3.0,
) -> float:
    """Returns the seconds of a step that lends replicas to the learner while a round drains.

    This is the stream trainer of RollPacker (arXiv 2509.21009, section 5.3). Once a share of a round's rollouts has finished,
    some devices train on complete groups while the others keep generating. At the end of the round all devices train on the
    remaining groups. A run does this with `scheduler.lend`. Here the seconds are computed from a round that was simulated
    without lending. A step with lending never takes longer than a step without. Both train on the same groups: the sum of
    gradients is exact, and only its order differs. The slower steps of the fuller replicas are not modelled. They cost at
    most 1 % according to the paper.

    Args:
      done: seconds from the start of the round to the end of each rollout.
      groups: for each trained group, the second at which it was complete, and its share of the training.
      rollout_s, train_s: seconds of generation and of training without lending.
      first: share of the rollouts that must have finished before devices are lent.
      share: share of the devices that are lent.
      migrate_s: seconds from the start of the loan until the lent devices train.
    """
    if not done:
        return rollout_s + train_s
    at, left = sorted(done)[math.ceil(first * len(done)) - 1] + migrate_s, 1.0
    for whole, part in sorted(groups):
        end = max(at, whole) + part * train_s / share
        if end > rollout_s:
            break
        at, left = end, left - part
    return rollout_s + left * train_s


class Moments:
    """A listener of the ring that records the second of each clock of a round. `now`: seconds of the engine."""

    def __init__(self, now: Callable[[], float]):
        self._now, self._begun = now, now()
        self._at: dict[int, float] = {}
        self._done: list[float] = []

    def stepped(self, finished: Sequence[Rollout], clock: int) -> None:
        self._at[clock] = self._now() - self._begun
        self._done += [self._at[clock]] * len(finished)

    def round_over(self, groups: Sequence[Group], *, rollout_s: float, train_s: float) -> float:
        """Returns `step_s` of the round that ends. Groups of earlier rounds count as complete at the start."""
        tokens = [sum(map(len, group.rollouts)) for group in groups]
        whole = [max(self._at.get(rollout.finish_clock, 0.0) for rollout in group.rollouts) for group in groups]
        found = step_s(
            self._done,
            [(end, own / sum(tokens)) for end, own in zip(whole, tokens)],
            rollout_s=rollout_s,
            train_s=train_s,
        )
        self._at, self._done, self._begun = {}, [], self._now()
        return found


class Spent(NamedTuple):
    """Seconds since the start.

    - `generate_s`: the engine generated or waited for the learner.
    - `train_s`: the ring did nothing but train.
    """

    generate_s: float
    train_s: float


class Engine(Protocol):
    @property
    def seconds(self) -> float:
        """Returns the seconds of all steps so far."""


class Wall:
    """Adds up the seconds of engine and learner, which share devices: one works after the other.

    It is notified when an optimizer step begins, ends, and has its weights published."""

    def __init__(self, engine: Engine, learner: SimLearner):
        self._engine, self._learner = engine, learner

    def spent(self) -> Spent:
        """Returns the seconds up to now."""
        return Spent(self._engine.seconds, self._learner.seconds)

    def begun(self, groups: Sequence[Group]) -> None:
        """Notes that the learner is about to accumulate these groups."""

    def committed(self) -> None:
        """Notes that the learner's seconds now include another step."""

    def published(self) -> None:
        """Notes that the weights of the step are published."""


class SideBySide(Wall):
    """Learner and engine have devices of their own.

    At a publish, the engine waits until the learner has finished the step.
    """

    def __init__(self, engine: Engine, learner: SimLearner):
        super().__init__(engine, learner)
        self._waited = self._until = self._learned = 0.0
        self._free = -1.0  # second of the last publish
        self._began: float | None = None  # when the running step began

    def spent(self) -> Spent:
        return Spent(self._engine.seconds + self._waited, 0.0)

    def begun(self, groups: Sequence[Group]) -> None:
        """Notes when the step began. At the second of a publish, it began as soon as the learner was free."""
        if groups and self._began is None:
            now = self.spent().generate_s
            self._began = self._until if now == self._free else max(self._until, now)

    def committed(self) -> None:
        took, self._learned = self._learner.seconds - self._learned, self._learner.seconds
        self._until, self._began = self._began + took, None

    def published(self) -> None:
        self._waited += max(self._until - self.spent().generate_s, 0.0)
        self._free = self.spent().generate_s
