"""Groups between admission and their end: what every scheduler does with them, with rounds or without.

Invariant: a rollout is generated once and stored by its sample index. So the content of a group never depends on the
order of completion. A ledger refuses a prompt that comes twice in an epoch, and a rollout that no group lacks.

In a checkpoint only plain values and arrays are written. `restored(group_state(group))` leads to the same decisions as the group
itself. A prompt is found again by its position in the order of prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

import numpy as np

from jaxrl_post.config import SchedulerConfig
from jaxrl_post.ring.history import Past
from jaxrl_post.ring.types import Finish, Group, Layout, Prompt, Request, Rollout, RolloutId, Sampling, Stop
from jaxrl_post.scheduler.learner_pace import Pace
from jaxrl_post.scheduler.placement.placement import Placement

_COUNTERS = (
    "num_groups_admitted",
    "num_groups_trained",
    "num_groups_filtered",
    "num_rollouts_admitted",
    "num_rollouts_completed",
    "num_rollouts_unscored",
)


class PromptOrder(Protocol):
    """The endless order of the training prompts."""

    def at(self, position: int) -> tuple[int, Prompt]:
        """Returns the epoch and the prompt at `position` >= 0. This is a pure function."""


@dataclass(kw_only=True)
class PendingGroup:
    """A group between its admission and its end."""

    position: int
    epoch: int
    prompt: Prompt
    size: int  # rollouts that make the group complete
    launched: int  # samples that are generated at once, at least `size`
    attempt: int = 0  # in the ids of its rollouts
    rank: int = 0  # its place in the order of admission within a round
    rollouts: dict[int, Rollout] = field(default_factory=dict)  # finished ones, by sample index
    prefixes: dict[int, Rollout] = field(default_factory=dict)  # parked ones, whose tokens are the next prefix
    since: int = 0  # the clock at which the group was deferred, in engine steps
    until: int = 0  # the last optimizer step that may train on the group; steps count from 0
    asked: bool = False  # whether `due` has returned the group for scoring
    group: Group | None = None  # with its scores

    @property
    def key(self) -> tuple[int, str]:
        return self.epoch, self.prompt.id

    @property
    def whole(self) -> bool:
        """Whether the group is complete: it has `size` finished rollouts."""
        return len(self.rollouts) >= self.size

    @property
    def missing(self) -> list[int]:
        """Returns sample indices that were launched and have not finished."""
        return [sample for sample in range(self.launched) if sample not in self.rollouts]

    @property
    def scored_group(self) -> Group:
        assert self.group is not None, f"{self.key} has no scores yet"
        return self.group

    def ids(self, run_seed: int, samples: Iterable[int]) -> list[RolloutId]:
        return [RolloutId(run_seed, "train", self.epoch, self.prompt.id, sample, self.attempt) for sample in samples]

    def unscored(self) -> Group:
        """Returns the complete group without scores, rollouts by sample index."""
        return Group.unscored(self.prompt, (self.rollouts[sample] for sample in sorted(self.rollouts)))


# Fields of a group that are saved as they are.
_PLAIN = ("position", "size", "launched", "attempt", "rank", "since", "until", "asked")


def group_state(opened: PendingGroup) -> dict:
    """Returns the group as plain values and arrays, for a checkpoint."""
    out: dict[str, Any] = {name: getattr(opened, name) for name in _PLAIN} | {"scores": None}
    if (group := opened.group) is not None:
        out["scores"] = {"rewards": group.rewards, "scored": group.scored, "components": dict(group.components)}
    for name in ("rollouts", "prefixes"):
        by_sample = getattr(opened, name)
        out[name] = [by_sample[sample].state() for sample in sorted(by_sample)]
    return out


def restored(state: Mapping, prompts: PromptOrder) -> PendingGroup:
    """Returns the group that `group_state` described."""
    epoch, prompt = prompts.at(state["position"])
    out = PendingGroup(epoch=epoch, prompt=prompt, **{name: state[name] for name in _PLAIN})
    for name in ("rollouts", "prefixes"):
        found = [Rollout.restored(rollout, prompt) for rollout in state[name]]
        setattr(out, name, {rollout.id.sample: rollout for rollout in found})
    if state["scores"] is not None:
        out.group = Group(prompt=prompt, rollouts=out.unscored().rollouts, **state["scores"])
    return out


@dataclass
class LedgerState:
    """The plain values that a checkpoint holds."""

    position: int = 0  # of the next prompt
    opened: int = 0  # groups entered since the policy last reset the count, which is the rank of the next group


class Ledger:
    """Opens groups in the order of prompts and stores their rollouts. Subclasses decide when to open groups and what to
    train on.
    """

    State: type[LedgerState] = LedgerState
    _state: LedgerState

    def __init__(
        self,
        prompts: PromptOrder,
        options: SchedulerConfig,
        *,
        steps: int,
        run_seed: int,
        sampling: Sampling,
        max_tokens: int,
        placement: Placement,
        baseline: Sampling | None = None,
        past: Callable[[str], Sequence[Past]] = lambda prompt_id: (),
        pace: Pace | None = None,
    ):
        """Begins with the first prompt.

        Args:
          prompts: the endless order of training prompts.
          steps: rounds of the run, or optimizer steps where there are no rounds.
          baseline: how the last rollout of each group is drawn, where that serves as the others' baseline (ReMax).
          past: maps a prompt id to its records, newest first (history.History.of).
          pace: how long an optimizer step takes the learner, where no rounds wait for it. None: the engine rests.
        """
        self._prompts, self._options, self._steps, self._run_seed = prompts, options, steps, run_seed
        self._sampling, self._max_tokens, self._placement = sampling, max_tokens, placement
        self._baseline, self._past, self._pace = baseline, past, pace or Pace()
        self._state = self.State()
        self._open: dict[tuple[int, str], PendingGroup] = {}  # in order of admission
        self._whole: list[PendingGroup] = []  # complete, and not requested for scoring; in order of completion
        self._counts: Counter[str] = Counter()

    @property
    def _missing(self) -> int:
        """Returns how many rollouts the open groups lack."""
        return sum(max(opened.size - len(opened.rollouts), 0) for opened in self._open.values())

    def _draw(self, launched: int) -> PendingGroup:
        """Returns a new group of the next prompt. The group is not open yet."""
        epoch, prompt = self._prompts.at(self._state.position)
        opened = PendingGroup(
            position=self._state.position, epoch=epoch, prompt=prompt, size=self._options.group_size, launched=launched
        )
        self._state.position += 1
        self._counts["num_groups_admitted"] += 1
        return opened

    def _enter(self, opened: PendingGroup, prefix_mode: str = "recompute") -> list[Request]:
        """Opens a group and returns a request for each missing rollout. A request carries the prefix of its sample, if
        there is one.
        """
        self._open[opened.key] = self._only(opened, self._open)
        opened.rank, opened.asked = self._state.opened, False
        self._state.opened += 1
        ids = opened.ids(self._run_seed, opened.missing)
        self._counts["num_rollouts_admitted"] += len(ids)
        return [
            Request(
                rollout_id=id,
                prompt=opened.prompt,
                seed=id.seed(),
                max_tokens=self._max_tokens,
                sampling=self._sampling_params(id.sample),
                prefix=opened.prefixes.get(id.sample),
                prefix_mode=prefix_mode,
            )
            for id in ids
        ]

    def _sampling_params(self, sample: int) -> Sampling:
        last = sample == self._options.group_size - 1
        return self._baseline if last and self._baseline is not None else self._sampling

    def _only(self, opened: PendingGroup, others: Mapping[tuple[int, str], PendingGroup]) -> PendingGroup:
        """Returns the group.

        Raises:
          ValueError: the prompt already has a group in this epoch.
        """
        if opened.key in others:
            raise ValueError(
                f"data: prompt id {opened.prompt.id!r} appears twice in epoch {opened.epoch}; ids must be unique"
            )
        return opened

    def _open_group(self) -> list[Request]:
        return self._enter(self._draw(self._options.group_size))

    def complete(self, rollout: Rollout) -> Stop:
        """Stores a finished rollout by its sample index. Returns rollouts to park: losers of a race, and rollouts that
        shall move to another replica.
        """
        assert rollout.finish is not Finish.PARKED, f"{rollout.id} came back {rollout.finish}"
        self._counts["num_rollouts_completed"] += 1
        stop = list(self._placement.learn(rollout))
        opened = self._open.get((rollout.id.epoch, rollout.id.prompt_id))
        if opened is None or opened.whole:
            self._late(rollout)
        else:
            assert rollout.id.sample not in opened.rollouts, f"{rollout.id} came back twice"
            opened.rollouts[rollout.id.sample] = rollout
            if opened.whole:
                self._whole.append(opened)
                stop += self._on_group_complete(opened, rollout.finish_clock)
        return Stop(park=tuple(dict.fromkeys(stop)))

    def _on_group_complete(self, opened: PendingGroup, clock: int) -> list[RolloutId]:
        """Returns ids of rollouts that need not continue, now that a group is complete."""
        return []

    def _late(self, rollout: Rollout) -> None:
        """Handles a finished rollout that no open group lacks. This is an error unless a subclass races groups."""
        raise AssertionError(f"{rollout.id} belongs to no group that lacks it")

    def parked(self, rollouts: Sequence[Rollout]) -> None:
        """Gives parked rollouts to the placement, so that they continue in another replica."""
        if rollouts:
            self._placement.moved(rollouts)

    def _ask(self, ready: Sequence[PendingGroup]) -> list[Group]:
        """Marks groups as requested for scoring and returns them, unscored."""
        for opened in ready:
            opened.asked = True
        self._whole = [opened for opened in self._whole if not opened.asked]
        return [self._unscored(opened) for opened in ready]

    def _unscored(self, opened: PendingGroup) -> Group:
        return opened.unscored()

    def _keep_score(self, group: Group) -> PendingGroup:
        """Stores the scores of a group that was requested, and returns its entry."""
        opened = self._open[group.rollouts[0].id.epoch, group.prompt.id]
        assert opened.asked and opened.group is None, f"group {group.prompt.id!r} was not due"
        opened.group = group
        self._counts["num_rollouts_unscored"] += int(np.sum(~group.scored))
        return opened

    def held(self) -> list[Rollout]:
        """Returns finished rollouts of groups that have no scores yet."""
        return [
            rollout for opened in self._open.values() if opened.group is None for rollout in opened.rollouts.values()
        ]

    def layout(self) -> Layout | None:
        """Returns None: decisions do not depend on the engine's layout."""
        return None

    def state_dict(self) -> dict:
        """Returns the state as plain values and arrays. It may be called at any point."""
        return asdict(self._state) | {
            "counts": dict(self._counts),
            "placement": self._placement.state_dict(),
            "open": [group_state(opened) for opened in self._open.values()],
            "whole": [opened.rank for opened in self._whole],
        }

    def load_state_dict(self, state: Mapping) -> None:
        self._state = self.State(
            **{field.name: state[field.name] for field in fields(self.State) if field.name in state}
        )
        self._counts = Counter(state["counts"])
        self._placement.load_state_dict(state["placement"])
        groups = [restored(opened, self._prompts) for opened in state["open"]]
        self._open = {opened.key: opened for opened in groups}
        by_rank = {opened.rank: opened for opened in groups}
        self._whole = [by_rank[rank] for rank in state["whole"]]

    def metrics(self) -> dict[str, float]:
        """Returns counts since the last call."""
        counts, self._counts = self._counts, Counter()
        return {f"sched/{name}": float(counts[name]) for name in self._counters}

    @property
    def _counters(self) -> tuple[str, ...]:
        return _COUNTERS
