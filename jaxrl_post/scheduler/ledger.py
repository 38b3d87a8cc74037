"""Groups on their way: what every scheduler has in common, with rounds or without.

Invariant: an answer is generated once and kept by its sample index, so what a group holds never depends on who finished
first. It refuses a prompt twice in an epoch and an answer that no group lacks.
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
    """Plain values that a checkpoint holds. `position`: of the next prompt. `opened`: groups entered since the policy last
    started counting, the rank of the next one."""

    position: int = 0
    opened: int = 0


class Ledger:
    """Opens groups in the order of prompts and takes their rollouts in; a policy says when, and what is trained on."""

    State: type[LedgerState] = LedgerState

    def __init__(
        self,
        prompts: PromptOrder,
        *,
        run_seed: int,
        group_size: int,
        sampling: Sampling,
        max_tokens: int,
        placement: Placement,
    ):
        self._prompts, self._run_seed, self._group_size = prompts, run_seed, group_size
        self._sampling, self._max_tokens, self._placement = sampling, max_tokens, placement
        self._state = self.State()
        self._open: dict[tuple[int, str], Open] = {}  # by admission
        self._whole: list[Open] = []  # of those, not asked for, by completion
        self._counts: Counter[str] = Counter()

    @property
    def _missing(self) -> int:
        """Rollouts that its groups lack."""
        return sum(max(opened.size - len(opened.rollouts), 0) for opened in self._open.values())

    def _draw(self, launched: int) -> Open:
        """The group of the next prompt in order."""
        epoch, prompt = self._prompts.at(self._state.position)
        opened = Open(
            position=self._state.position, epoch=epoch, prompt=prompt, size=self._group_size, launched=launched
        )
        self._state.position += 1
        self._counts["num_groups_admitted"] += 1
        return opened

    def _enter(self, opened: Open, prefix_mode: str = "recompute") -> list[Request]:
        """Takes a group in; the requests of what it lacks, with what their samples had before."""
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
                sampling=self._sampling,
                prefix=opened.prefixes.get(id.sample),
                prefix_mode=prefix_mode,
            )
            for id in ids
        ]

    def _only(self, opened: Open, others: Mapping[tuple[int, str], Open]) -> Open:
        if opened.key in others:
            raise ValueError(
                f"data: prompt id {opened.prompt.id!r} appears twice in epoch {opened.epoch}; ids must be unique"
            )
        return opened

    def _open_group(self) -> list[Request]:
        return self._enter(self._draw(self._group_size))

    def complete(self, rollout: Rollout) -> Stop:
        """Keeps it by sample index. Who loses a race is parked; so is what shall go on in another replica."""
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
        """Ids that need not go on."""
        return []

    def _late(self, rollout: Rollout) -> None:
        """A rollout finished that nobody waits for any more."""
        raise AssertionError(f"{rollout.id} belongs to no group that lacks it")

    def parked(self, rollouts: Sequence[Rollout]) -> None:
        """What `complete` asked for: it goes on in another replica."""
        if rollouts:
            self._placement.moved(rollouts)

    def _ask(self, ready: Sequence[Open]) -> list[Group]:
        """Their scores are needed now."""
        for opened in ready:
            opened.asked = True
        self._whole = [opened for opened in self._whole if not opened.asked]
        return [self._unscored(opened) for opened in ready]

    def _unscored(self, opened: Open) -> Group:
        return opened.unscored()

    def _keep_score(self, group: Group) -> Open:
        """Of one that was asked for."""
        opened = self._open[group.rollouts[0].id.epoch, group.prompt.id]
        assert opened.asked and opened.group is None, f"group {group.prompt.id!r} was not due"
        opened.group = group
        self._counts["num_rollouts_unscored"] += int(np.sum(~group.scored))
        return opened

    def held(self) -> list[Rollout]:
        return [
            rollout for opened in self._open.values() if opened.group is None for rollout in opened.rollouts.values()
        ]

    def layout(self) -> Layout | None:
        """None: decisions are the same however the engine lies."""
        return None

    def state_dict(self) -> dict:
        """At any point."""
        return asdict(self._state) | {
            "counts": dict(self._counts),
            "placement": self._placement.state_dict(),
            "open": [written(opened) for opened in self._open.values()],
            "whole": [opened.rank for opened in self._whole],
        }

    def load_state_dict(self, state: Mapping) -> None:
        self._state = self.State(**{field.name: state[field.name] for field in fields(self.State)})
        self._counts = Counter(state["counts"])
        self._placement.load_state_dict(state["placement"])
        groups = [revived(opened, self._prompts) for opened in state["open"]]
        self._open = {opened.key: opened for opened in groups}
        by_rank = {opened.rank: opened for opened in groups}
        self._whole = [by_rank[rank] for rank in state["whole"]]

    def metrics(self) -> dict[str, float]:
        """Counts since the last call."""
        counts, self._counts = self._counts, Counter()
        return {f"sched/{name}": float(counts[name]) for name in self._counters}

    @property
    def _counters(self) -> tuple[str, ...]:
        return _COUNTERS
