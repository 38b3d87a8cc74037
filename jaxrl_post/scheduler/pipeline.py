"""Generation that never stops: full slots, weights swapped under running answers, staleness bounded by admission.

PipelineRL (arXiv 2509.19128, section 3) keeps a number of answers on their way and trains on the first batch to be there.
So does this, and bounds how old a token may be when it is trained on: a group that is admitted under version v is trained
on by optimizer step v + max_staleness at the latest, so no token of it is ever older. Two rules keep that promise:

  credit  a step trains on `prompts_per_step` groups, B, so the steps up to the last one that may train on a new group
          train on B * (max_staleness + 1): never are more groups open. By Little's law that is the closed form of staleness
          turned round: open groups over B are the steps that a group waits on average.
  commit  the oldest B whole groups are trained on as soon as those that stay can still meet their own last steps; else the
          ring waits for who is late, and admission pauses meanwhile, which is counted.

Invariant: nothing is dropped for its age or length, and every group is trained on, or filtered, once; with filters, those open
when the run ends are trained on by nobody and counted as open. What is decided follows
from counts and engine clocks. With max_staleness 0 it trains as synchronous rounds do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_post.scheduler.groups import Open, PromptOrder, revived, written
from jaxrl_post.scheduler.learner_pace import Pace, TimeShared, begins
from jaxrl_post.scheduler.ledger import Ledger, LedgerState
from jaxrl_post.scheduler.placement.placement import LeastLoaded, Placement
from jaxrl_post.scheduler.rounds.rounds import differs
from jaxrl_post.types import Capacity, Group, Part, Request, Rollout, RolloutId, Stop

_PAUSED = ("paused_steps", "paused_slot_steps")


@dataclass
class PipelineState(LedgerState):
    """`step`: optimizer steps handed out. `version`: weights published. `clock`: engine steps. `slots`: of the engine.
    `flying`: rollouts admitted and not finished. `left_out`: groups filtered since the last step. Of the last step: `busy`,
    engine steps that it takes; `until`, the clock at which it is due; `ended`, the clock of its publish; `pieces`, in which
    the learner gets its groups. `paused`: rollouts that the bound holds back since `clock`. Of whole groups so far:
    `answers`, `groups`, and `longest`, the sum of each one's longest rollout in tokens."""

    step: int = 0
    version: int = 0
    clock: int = 0
    slots: int = 0
    flying: int = 0
    left_out: int = 0
    until: float = 0.0
    ended: int = -1
    busy: float = 0.0
    pieces: int = 1
    paused: int = 0
    answers: int = 0
    groups: int = 0
    longest: int = 0


def expected_staleness(*, rate: float, longest: float, batch: int, ratio: float, most: int, held: float = 0.0) -> float:
    """Mean optimizer steps between the weights that begin an answer and those that train on it, by Little's law:
    rate * longest / batch + ratio + held, and never more than `most`. With full slots rate * E[answer] is their number, which
    makes it slots * tail / batch + ratio (Applied Compute, July 2026).

    Args:
      rate: answers that end in an engine step; batch: those that an optimizer step trains on.
      longest: mean of the longest answer of a group, tokens.
      ratio: the time a step takes the learner over that in which the engine generates a batch; 0 where devices are shared,
        since the engine rests meanwhile; from 1 on the learner is behind and answers wait until the bound stops admission.
      held: batches that wait for their graders beyond the one that is next.
    """
    return float(most) if ratio >= 1 else min(rate * longest / batch + ratio + held, float(most))


class Pipeline(Ledger):
    """A protocols.Scheduler. A group that filters leave out makes room at once; the next ones take its place."""

    name = "pipeline"
    State = PipelineState

    def __init__(
        self,
        prompts: PromptOrder,
        *,
        steps: int,
        prompts_per_step: int,
        max_staleness: int,
        ahead: int = 0,
        max_unscored: int = 0,
        filter_groups: bool = False,
        max_waves: int = 10,
        replicas: int,
        placement: Placement | None = None,
        pace: Pace | None = None,
        **ledger: Any,
    ):
        """
        Args:
          steps: optimizer steps of the run.
          max_staleness: optimizer steps that any trained token may be old.
          ahead: answers that wait for a slot, so that one that comes free is taken up at once; the slots are what `admit` is
            first told of.
          max_unscored: whole groups whose graders may still be at work; where there are so many the ring waits for the oldest.
            At least `prompts_per_step`, which 0 stands for.
          max_waves: groups left out for a batch, over its size, after which filters are said to leave nothing.
          pace: None: TimeShared.
          ledger: as Ledger.
        """
        if 0 < max_unscored < prompts_per_step:
            raise ValueError(
                f"scheduler.max_unscored={max_unscored} never holds a batch of {prompts_per_step} groups: it must "
                "be 0 or at least scheduler.prompts"
            )
        super().__init__(prompts, placement=placement or LeastLoaded(replicas), **ledger)
        self._steps, self._size, self._bound, self._ahead = steps, prompts_per_step, max_staleness, ahead
        self._unscored_most = max_unscored or prompts_per_step
        self._filter_groups, self._max_waves = filter_groups, max_waves
        self._pace = pace or TimeShared()
        self._left: list[Open] = []  # groups of the last step that the learner has not got yet
        self._kept: list[Open] = []  # scored and kept, to be trained on
        self._held_back = dict.fromkeys(_PAUSED, 0)

    def __str__(self) -> str:
        late = min((opened.until for opened in self._open.values()), default=self._state.step)
        return (
            f"{self.name} step {self._state.step + 1} of {self._steps}, weights {self._state.version}: {len(self._kept)} groups of "
            f"{self._size} kept, {len(self._open)} open of at most {self._credit}, {self._state.flying} answers on their way, "
            f"the oldest group may wait until step {late + 1}, next position {self._state.position}"
        )

    def admit(self, capacity: Capacity, clock: int) -> list[Request]:
        """Groups, until all slots are full and `ahead` answers wait, or the bound allows no more.

        Raises:
          RuntimeError: filters left too little of `max_waves` batches.
        """
        self._state.slots = self._state.slots or sum(capacity.slots)
        self._count_pause(clock)
        self._check_filters()
        groups = []
        while self._state.flying < self._state.slots + self._ahead and len(self._open) < self._credit:
            groups.append(self._open_group())
            next(reversed(self._open.values())).until = self._last_step
            self._state.flying += self._group_size
        more = len(self._open) < self._size * (self._steps - self._state.step)
        self._state.paused = max(self._state.slots - self._state.flying, 0) if more else 0
        self._placement.place(groups, self._state.step)
        return self._placement.release(capacity)

    @property
    def _last_step(self) -> int:
        """That may train on a group admitted now."""
        return min(self._state.version + self._bound, self._steps - 1)

    @property
    def _credit(self) -> int:
        """Groups that may be open."""
        return self._size * (self._last_step - self._state.step + 1)

    def _count_pause(self, clock: int) -> None:
        if self._state.paused:
            self._held_back["paused_steps"] += clock - self._state.clock
            self._held_back["paused_slot_steps"] += self._state.paused * (clock - self._state.clock)
        self._state.clock = max(self._state.clock, clock)

    def _check_filters(self) -> None:
        if self._state.left_out >= self._max_waves * self._size:
            raise RuntimeError(
                f"scheduler.filter_groups kept {len(self._kept)} of the {self._size} groups of step {self._state.step + 1} and left "
                f"{self._state.left_out} out, scheduler.max_waves={self._max_waves} times as many: their answers were all right or "
                "all wrong; use prompts of fitting difficulty, a larger scheduler.group_size or scheduler.max_waves, or "
                "scheduler.filter_groups=False"
            )

    def complete(self, rollout: Rollout) -> Stop:
        self._state.flying -= 1
        return super().complete(rollout)

    def _became_whole(self, opened: Open, clock: int) -> list[RolloutId]:
        lengths = [len(rollout) for rollout in opened.rollouts.values()]
        self._state.answers, self._state.groups = self._state.answers + len(lengths), self._state.groups + 1
        self._state.longest += max(lengths)
        return []

    def expected_staleness(self) -> float:
        """By what was counted so far, and what the latest step took."""
        if not self._state.groups or not self._state.clock:
            return 0.0
        batch, rate = self._size * self._group_size, self._state.answers / self._state.clock
        return expected_staleness(
            rate=rate,
            longest=self._state.longest / self._state.groups,
            batch=batch,
            most=self._bound,
            ratio=self._state.busy * rate / batch,
            held=self._unscored_most / self._size - 1,
        )

    def due(self) -> list[Group]:
        """The unscored ones of the next batches, once enough groups are whole; and the oldest of more than may be unscored."""
        ready = sorted([*self._kept, *self._whole], key=_age)
        urgent = any(opened.until <= self._state.step for opened in ready)
        if len(ready) < self._size or not (urgent or self._state.flying == 0 or len(ready) >= self._unscored_most):
            return []
        count = len(ready) - len(ready) % self._size
        asked, others = ([opened for opened in some if not opened.asked] for some in (ready[:count], ready[count:]))
        beyond = len(self._whole) - len(asked) - self._unscored_most + 1
        return self._ask([*asked, *others[: max(beyond, 0)]])

    def scored(self, group: Group) -> None:
        opened = self._keep_score(group)
        if self._filter_groups and not differs(group):
            self._counts["num_groups_filtered"] += 1
            self._state.left_out += 1
            del self._open[opened.key]
        else:
            self._kept.append(opened)

    def take(self) -> list[Part]:
        """The end of the step that is under way, once it is due; else steps on the oldest groups, as long as none of the
        others comes too late by it. Several that take no time publish once."""
        if self._state.version < self._state.step:
            works = self._state.flying > 0 or len(self._open) < self._credit
            if works and self._state.clock < self._state.until:
                more = self._hand_over(self._owed)
                return [Part(fresh=(), groups=more, commit=False, publish=False)] if more else []
            self._state.version, self._state.ended = self._state.step, self._state.clock
            return [Part(fresh=(), groups=self._hand_over(0), commit=True, publish=True)]
        parts = []
        self._kept.sort(key=_age)
        while (
            self._state.version == self._state.step < self._steps and len(self._kept) >= self._size and self._can_wait()
        ):
            parts.append(self._train())
        return [dataclasses.replace(part, publish=False) for part in parts[:-1]] + parts[-1:]

    @property
    def _owed(self) -> int:
        """Groups of the step under way that the learner need not have by now: pieces are spread evenly over its time."""
        passed = (self._state.clock - self._state.until + self._state.busy) / self._state.busy
        return (
            self._size
            - self._size * min(1 + int(passed * self._state.pieces), self._state.pieces) // self._state.pieces
        )

    def _hand_over(self, keep: int) -> tuple[Group, ...]:
        """What the learner gets so that no more than `keep` are left."""
        at = max(len(self._left) - keep, 0)
        handed, self._left = self._left[:at], self._left[at:]
        return tuple(opened.group for opened in handed)

    def _can_wait(self) -> bool:
        """Whether all that are open but the oldest kept ones can be trained on in time after the next step."""
        batch = {opened.key for opened in self._kept[: self._size]}
        last = sorted(opened.until for key, opened in self._open.items() if key not in batch)
        return all(number < self._size * (until - self._state.step) for number, until in enumerate(last))

    def _train(self) -> Part:
        """Begins a step on the oldest kept ones."""
        self._left, self._kept = self._kept[: self._size], self._kept[self._size :]
        groups = tuple(opened.group for opened in self._left)
        for opened in self._left:
            del self._open[opened.key]
        self._counts["num_groups_trained"] += len(groups)
        self._state.step, self._state.left_out = self._state.step + 1, 0
        self._state.busy, self._state.pieces = self._pace.steps(groups), self._pace.pieces(groups)
        self._state.until = (
            begins(clock=self._state.clock, until=self._state.until, ended=self._state.ended) + self._state.busy
        )
        at_once = self._state.busy == 0 or self._state.step == self._steps
        self._state.version = self._state.step if at_once else self._state.version
        return Part(fresh=groups, groups=self._hand_over(0 if at_once else self._owed), commit=at_once, publish=at_once)

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self._held_back = dict(state["held_back"])
        self._left = [revived(opened, self._prompts) for opened in state["left"]]
        self._kept = [opened for opened in self._open.values() if opened.group is not None]

    def state_dict(self) -> dict:
        return super().state_dict() | {
            "held_back": dict(self._held_back),
            "left": [written(opened) for opened in self._left],
        }

    def metrics(self) -> dict[str, float]:
        """Counts since the last call; engine steps, and free slots times steps, in which the bound held admission back; groups
        that are open now; the staleness to be expected."""
        held_back, self._held_back = self._held_back, dict.fromkeys(_PAUSED, 0)
        return (
            super().metrics()
            | {f"sched/{name}": float(count) for name, count in held_back.items()}
            | {"sched/num_groups_open": float(len(self._open)), "sched/expected_staleness": self.expected_staleness()}
        )


def _age(opened: Open) -> int:
    return opened.rank
