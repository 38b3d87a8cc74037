"""Open groups: what every scheduler does with them, with rounds or without.

Invariant: a rollout is generated once and stored by its sample index. So the content of a group never depends on the
order of completion. A ledger refuses a prompt that comes twice in an epoch, and a rollout that no group lacks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from jaxrl_post.scheduler.groups import Open, PromptOrder, revived, written
from jaxrl_post.scheduler.placement.placement import Placement
from jaxrl_post.types import Finish, Group, Layout, Request, Rollout, RolloutId, Sampling, Stop

_COUNTERS = (
    "num_groups_admitted",
    "num_groups_trained",
    "num_groups_filtered",
    "num_rollouts_admitted",
    "num_rollouts_completed",
    "num_rollouts_unscored",
)


@dataclass
class LedgerState:
    """The plain values that a checkpoint holds.

    - `position`: index of the next prompt.
    - `opened`: groups entered since the policy last reset the count. It is the rank of the next group.
    """

    position: int = 0
    opened: int = 0


class Ledger:
    """Opens groups in the order of prompts and stores their rollouts. Subclasses decide when to open groups and what to
    train on.
    """

    State: type[LedgerState] = LedgerState
    _state: LedgerState

    def __init__(
        self,
        prompts: PromptOrder,
        *,
        run_seed: int,
        group_size: int,
        sampling: Sampling,
        max_tokens: int,
        placement: Placement,
        baseline: Sampling | None = None,
    ):
        """Begins with the first prompt.

        Args:
          baseline: how the last rollout of each group is drawn, where that serves as the others' baseline (ReMax).
        """
        self._prompts, self._run_seed, self._group_size = prompts, run_seed, group_size
        self._sampling, self._max_tokens, self._placement = sampling, max_tokens, placement
        self._baseline = baseline
        self._state = self.State()
        self._open: dict[tuple[int, str], Open] = {}  # in order of admission
        self._whole: list[Open] = []  # complete, and not requested for scoring; in order of completion
        self._counts: Counter[str] = Counter()

    @property
    def _missing(self) -> int:
        """Returns how many rollouts the open groups lack."""
        return sum(max(opened.size - len(opened.rollouts), 0) for opened in self._open.values())

    def _draw(self, launched: int) -> Open:
        """Returns a new group of the next prompt. The group is not open yet."""
        epoch, prompt = self._prompts.at(self._state.position)
        opened = Open(
            position=self._state.position, epoch=epoch, prompt=prompt, size=self._group_size, launched=launched
        )
        self._state.position += 1
        self._counts["num_groups_admitted"] += 1
        return opened

    def _enter(self, opened: Open, prefix_mode: str = "recompute") -> list[Request]:
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
                sampling=self._law(id.sample),
                prefix=opened.prefixes.get(id.sample),
                prefix_mode=prefix_mode,
            )
            for id in ids
        ]

    def _law(self, sample: int) -> Sampling:
        last = sample == self._group_size - 1
        return self._baseline if last and self._baseline is not None else self._sampling

    def _only(self, opened: Open, others: Mapping[tuple[int, str], Open]) -> Open:
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
        """Opens a group of the next prompt and returns its requests."""
        return self._enter(self._draw(self._group_size))

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
                stop += self._became_whole(opened, rollout.finish_clock)
        return Stop(park=tuple(dict.fromkeys(stop)))

    def _became_whole(self, opened: Open, clock: int) -> list[RolloutId]:
        """Returns ids of rollouts that need not continue, now that a group is complete."""
        return []

    def _late(self, rollout: Rollout) -> None:
        """Handles a finished rollout that no open group lacks. This is an error unless a subclass races groups."""
        raise AssertionError(f"{rollout.id} belongs to no group that lacks it")

    def parked(self, rollouts: Sequence[Rollout]) -> None:
        """Gives parked rollouts to the placement, so that they continue in another replica."""
        if rollouts:
            self._placement.moved(rollouts)

    def _ask(self, ready: Sequence[Open]) -> list[Group]:
        """Marks groups as requested for scoring and returns them, unscored."""
        for opened in ready:
            opened.asked = True
        self._whole = [opened for opened in self._whole if not opened.asked]
        return [self._unscored(opened) for opened in ready]

    def _unscored(self, opened: Open) -> Group:
        """Returns a group without scores."""
        return opened.unscored()

    def _keep_score(self, group: Group) -> Open:
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
            "open": [written(opened) for opened in self._open.values()],
            "whole": [opened.rank for opened in self._whole],
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Restores the state that `state_dict` gave."""
        self._state = self.State(
            **{field.name: state[field.name] for field in fields(self.State) if field.name in state}
        )
        self._counts = Counter(state["counts"])
        self._placement.load_state_dict(state["placement"])
        groups = [revived(opened, self._prompts) for opened in state["open"]]
        self._open = {opened.key: opened for opened in groups}
        by_rank = {opened.rank: opened for opened in groups}
        self._whole = [by_rank[rank] for rank in state["whole"]]

    def metrics(self) -> dict[str, float]:
        """Returns counts since the last call."""
        counts, self._counts = self._counts, Counter()
        return {f"sched/{name}": float(counts[name]) for name in self._counters}

    @property
    def _counters(self) -> tuple[str, ...]:
        """Returns the names of the counters that `metrics` reports."""
        return _COUNTERS
