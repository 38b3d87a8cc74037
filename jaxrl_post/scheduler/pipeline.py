"""Generation without rounds: slots stay full, weights are swapped under running rollouts, and admission bounds
staleness.

PipelineRL (arXiv 2509.19128, section 3) keeps a number of rollouts running and trains on the first complete batch. This
scheduler does the same and also bounds staleness. Optimizer step v + max_staleness is the last that may train on a
group admitted under version v. So no trained token is older than max_staleness steps. Two rules ensure this, with B =
`prompts`:

- Credit: the steps up to the last one that may train on a new group train on B * (max_staleness + 1) groups. No more
  groups are open at a time. By Little's law, open groups divided by B are the steps that a group waits on average.
- Commit: the B oldest complete groups are trained on as soon as all other open groups can still meet their own last
  steps. Until then the ring waits for late groups, admission pauses, and the pause is counted.

Where the learner is the slower side, complete groups queue until the credit is used up, and all tokens grow old. With
`max_ready`, admission pauses while so many complete groups wait for the learner. Then only late groups near the bound.

Invariant: no group is dropped for its age or length. Every group is trained on or filtered exactly once. With filters,
groups that are open at the end of a run are never trained on and are counted as open. Decisions depend on counts and
engine clocks only. With max_staleness 0 the scheduler trains as synchronous rounds do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_post.config import SchedulerConfig
from jaxrl_post.ring.types import Capacity, Group, Part, Request, Rollout, RolloutId, Stop
from jaxrl_post.scheduler import group_filter
from jaxrl_post.scheduler.learner_pace import begins
from jaxrl_post.scheduler.ledger import Ledger, LedgerState, PendingGroup, PromptOrder, group_state, restored

_PAUSED = ("paused_steps", "paused_slot_steps")


@dataclass
class PipelineState(LedgerState):
    """The plain values that a checkpoint holds."""

    step: int = 0  # optimizer steps handed to the learner
    version: int = 0  # weights published
    clock: int = 0  # engine steps
    slots: int = 0  # of the engine
    flying: int = 0  # rollouts admitted and not finished
    left_out: int = 0  # groups filtered since the last step
    unsolved: int = 0  # those of them that have a rollout that is not right
    until: float = 0.0  # the clock at which the last step is due
    ended: int = -1  # the clock at which the last weights were published
    busy: float = 0.0  # engine steps that the last step takes
    pieces: int = 1  # in which the learner gets the groups of the last step
    paused: int = 0  # rollouts that the staleness bound or `max_ready` keeps from admission since `clock`
    answers: int = 0  # rollouts of all complete groups so far
    groups: int = 0  # complete groups so far
    longest: int = 0  # sum over complete groups of the longest rollout, in tokens


def expected_staleness(
    *, rate: float, longest: float, batch: int, ratio: float, most: int, held: float = 0.0, queue: float = math.inf
) -> float:
    """Returns the expected staleness of a rollout's first token in optimizer steps, by Little's law.

    The value is rate * longest / batch + ratio + held, and at most `most`. With full slots, rate * E[length] is the
    number of slots. The first term is then slots * tail / batch (Applied Compute, July 2026). From a ratio of 1 on,
    `queue` stands for it.

    Args:
      rate: rollouts that finish per engine step.
      longest: mean over groups of the longest rollout, in tokens.
      batch: rollouts that an optimizer step trains on.
      ratio: learner time of a step over engine time of a batch. 0 for shared devices, where the engine rests meanwhile.
        From 1 on, rollouts queue until the bound or `queue` stops admission.
      most: the bound of staleness.
      held: batches that wait for their graders, beyond the next batch.
      queue: batches that are trained or wait for the learner, at most.
    """
    return min(rate * longest / batch + (queue if ratio >= 1 else ratio + held), float(most))


class Pipeline(Ledger):
    """A protocols.Scheduler without rounds. A filtered group frees its credit at once, so that the next group is
    admitted.
    """

    name = "pipeline"
    State = PipelineState
    _state: PipelineState

    def __init__(self, prompts: PromptOrder, options: SchedulerConfig, **run: Any):
        """`run`: as Ledger. The first `admit` tells the number of slots.

        Raises:
          ValueError: `max_unscored` or `max_ready` never lets a batch become whole.
        """
        if 0 < options.max_unscored < options.prompts:
            raise ValueError(
                f"scheduler.max_unscored={options.max_unscored} never holds a batch of {options.prompts} groups: it must "
                "be 0 or at least scheduler.prompts"
            )
        super().__init__(prompts, options, **run)
        self._unscored_most = options.max_unscored or options.prompts
        if 0 < options.max_ready < self._unscored_most:
            raise ValueError(
                f"scheduler.max_ready={options.max_ready} pauses admission before a batch is whole and scored: it must be "
                f"0 or at least {self._unscored_most}"
            )
        self._left: list[PendingGroup] = []  # groups of the last step that the learner still lacks
        self._kept: list[PendingGroup] = []  # scored, not filtered, and not trained on yet
        self._held_back = dict.fromkeys(_PAUSED, 0)

    def __str__(self) -> str:
        late = min((opened.until for opened in self._open.values()), default=self._state.step)
        return (
            f"{self.name} step {self._state.step + 1} of {self._steps}, weights {self._state.version}: {len(self._kept)} groups of "
            f"{self._options.prompts} kept, {len(self._open)} open of at most {self._credit}, {self._state.flying} rollouts running, "
            f"the oldest group may wait until step {late + 1}, next position {self._state.position}"
        )

    def admit(self, capacity: Capacity, clock: int) -> list[Request]:
        """Returns requests until slots are full and `ahead` rollouts wait, or until the staleness bound or `max_ready`
        stops admission.

        Raises:
          NoGroups, Solved: filters left out `max_waves` batches of groups for one batch.
        """
        self._state.slots = self._state.slots or sum(capacity.slots)
        self._count_pause(clock)
        self._check_filters()
        groups = []
        while self._state.flying < self._state.slots + self._options.ahead and self._admits:
            groups.append(self._open_group())
            next(reversed(self._open.values())).until = self._last_step
            self._state.flying += self._options.group_size
        more = len(self._open) < self._options.prompts * (self._steps - self._state.step)
        self._state.paused = max(self._state.slots - self._state.flying, 0) if more else 0
        self._placement.place(groups, self._state.step)
        return self._placement.release(capacity)

    @property
    def _last_step(self) -> int:
        """Returns the last optimizer step that may train on a group admitted now."""
        return min(self._state.version + self._options.max_staleness, self._steps - 1)

    @property
    def _credit(self) -> int:
        """Returns how many groups may be open."""
        return self._options.prompts * (self._last_step - self._state.step + 1)

    @property
    def _admits(self) -> bool:
        """Whether a group may be admitted, were a slot free."""
        ready = len(self._kept) + len(self._whole)
        return len(self._open) < self._credit and (not self._options.max_ready or ready < self._options.max_ready)

    def _count_pause(self, clock: int) -> None:
        """Counts the pause since the last call and advances the clock."""
        if self._state.paused:
            self._held_back["paused_steps"] += clock - self._state.clock
            self._held_back["paused_slot_steps"] += self._state.paused * (clock - self._state.clock)
        self._state.clock = max(self._state.clock, clock)

    def _check_filters(self) -> None:
        """Raises NoGroups or Solved when filters leave out too many groups. A step that is running ends first."""
        state, most = self._state, self._options.max_waves * self._options.prompts
        if state.left_out >= most and state.version == state.step:
            raise group_filter.ended(
                self._options.filter_metric,
                begun=state.step > 0,
                kept=f"kept {len(self._kept)} of the {self._options.prompts} groups of step {state.step + 1}",
                left_out=state.left_out,
                unsolved=state.unsolved,
                waves=f"scheduler.max_waves={self._options.max_waves} times as many were left out",
            )

    def complete(self, rollout: Rollout) -> Stop:
        self._state.flying -= 1
        return super().complete(rollout)

    def _on_group_complete(self, opened: PendingGroup, clock: int) -> list[RolloutId]:
        lengths = [len(rollout) for rollout in opened.rollouts.values()]
        self._state.answers, self._state.groups = self._state.answers + len(lengths), self._state.groups + 1
        self._state.longest += max(lengths)
        return []

    def expected_staleness(self) -> float:
        """Returns the expected staleness, from the counts so far and the duration of the last step."""
        if not self._state.groups or not self._state.clock:
            return 0.0
        batch, rate = self._options.prompts * self._options.group_size, self._state.answers / self._state.clock
        return expected_staleness(
            rate=rate,
            longest=self._state.longest / self._state.groups,
            batch=batch,
            most=self._options.max_staleness,
            ratio=self._state.busy * rate / batch,
            held=self._unscored_most / self._options.prompts - 1,
            queue=1 + self._options.max_ready / self._options.prompts if self._options.max_ready else math.inf,
        )

    def due(self) -> list[Group]:
        """Returns unscored groups of the next batches, once enough groups are complete. Also returns the oldest groups
        beyond `max_unscored`.
        """
        ready = sorted([*self._kept, *self._whole], key=_age)
        urgent = any(opened.until <= self._state.step for opened in ready)
        if len(ready) < self._options.prompts or not (
            urgent or self._state.flying == 0 or len(ready) >= self._unscored_most
        ):
            return []
        count = len(ready) - len(ready) % self._options.prompts
        asked, others = ([opened for opened in some if not opened.asked] for some in (ready[:count], ready[count:]))
        beyond = len(self._whole) - len(asked) - self._unscored_most + 1
        return self._ask([*asked, *others[: max(beyond, 0)]])

    def scored(self, group: Group) -> None:
        opened = self._keep_score(group)
        if self._options.filter_groups and not group_filter.differs(group, self._options.filter_metric):
            self._counts["num_groups_filtered"] += 1
            self._state.left_out += 1
            self._state.unsolved += not group_filter.solved(group)
            del self._open[opened.key]
        else:
            self._kept.append(opened)

    def take(self) -> list[Part]:
        """Returns parts for the learner.

        - A step is running: its next pieces, or its end once it is due.
        - No step is running: new steps on the oldest groups, as long as every other open group can still meet its last
          step. Several steps that take no time publish once.
        """
        if self._state.version < self._state.step:
            works = self._state.flying > 0 or self._admits
            if works and self._state.clock < self._state.until:
                more = self._hand_over(self._pending)
                return [Part(fresh=(), groups=more, commit=False, publish=False)] if more else []
            self._state.version, self._state.ended = self._state.step, self._state.clock
            return [Part(fresh=(), groups=self._hand_over(0), commit=True, publish=True)]
        parts = []
        self._kept.sort(key=_age)
        while (
            self._state.version == self._state.step < self._steps
            and len(self._kept) >= self._options.prompts
            and self._can_wait()
        ):
            parts.append(self._train())
        return [dataclasses.replace(part, publish=False) for part in parts[:-1]] + parts[-1:]

    @property
    def _pending(self) -> int:
        """Returns how many groups of the running step the learner need not have yet. Pieces are spread evenly over the
        step.
        """
        passed = (self._state.clock - self._state.until + self._state.busy) / self._state.busy
        return (
            self._options.prompts
            - self._options.prompts
            * min(1 + int(passed * self._state.pieces), self._state.pieces)
            // self._state.pieces
        )

    def _hand_over(self, keep: int) -> tuple[Group, ...]:
        """Returns groups for the learner, so that at most `keep` groups of the step remain."""
        at = max(len(self._left) - keep, 0)
        handed, self._left = self._left[:at], self._left[at:]
        return tuple(opened.scored_group for opened in handed)

    def _can_wait(self) -> bool:
        """Whether all open groups outside the next batch can still be trained on in time after the next step."""
        batch = {opened.key for opened in self._kept[: self._options.prompts]}
        last = sorted(opened.until for key, opened in self._open.items() if key not in batch)
        return all(number < self._options.prompts * (until - self._state.step) for number, until in enumerate(last))

    def _train(self) -> Part:
        """Begins a step on the oldest kept groups."""
        self._left, self._kept = self._kept[: self._options.prompts], self._kept[self._options.prompts :]
        groups = tuple(opened.scored_group for opened in self._left)
        for opened in self._left:
            del self._open[opened.key]
        self._counts["num_groups_trained"] += len(groups)
        self._state.step, self._state.left_out, self._state.unsolved = self._state.step + 1, 0, 0
        self._state.busy, self._state.pieces = self._pace.steps(groups), self._pace.pieces(groups)
        self._state.until = (
            begins(clock=self._state.clock, until=self._state.until, ended=self._state.ended) + self._state.busy
        )
        at_once = self._state.busy == 0 or self._state.step == self._steps
        self._state.version = self._state.step if at_once else self._state.version
        return Part(
            fresh=groups, groups=self._hand_over(0 if at_once else self._pending), commit=at_once, publish=at_once
        )

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self._held_back = dict(state["held_back"])
        self._left = [restored(opened, self._prompts) for opened in state["left"]]
        self._kept = [opened for opened in self._open.values() if opened.group is not None]

    def state_dict(self) -> dict:
        return super().state_dict() | {
            "held_back": dict(self._held_back),
            "left": [group_state(opened) for opened in self._left],
        }

    def metrics(self) -> dict[str, float]:
        """Returns counts since the last call and current values.

        - `paused_steps`, `paused_slot_steps`: engine steps, and free slots times steps, in which the staleness bound
          or `max_ready` stopped admission.
        - `num_groups_open`: groups open now.
        - `expected_staleness`: in optimizer steps.
        """
        held_back, self._held_back = self._held_back, dict.fromkeys(_PAUSED, 0)
        return (
            super().metrics()
            | {f"sched/{name}": float(count) for name, count in held_back.items()}
            | {"sched/num_groups_open": float(len(self._open)), "sched/expected_staleness": self.expected_staleness()}
        )


def _age(opened: PendingGroup) -> int:
    return opened.rank
