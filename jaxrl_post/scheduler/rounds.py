"""Rounds: what every policy with a round barrier has in common, and the synchronous one.

Invariant: what a round trains on is a function of (prompts, run seed, rewards) and, where groups race, of the engine
clocks at which rollouts finished: never of how fast rewards came back. Every (epoch, prompt) that was admitted ends
exactly once: trained, filtered (all its accuracies equal) or refused (kept, but after the round was full). It refuses to
train on a group that lacks a rollout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_post.scheduler.delivery import Delivery, WholeRounds
from jaxrl_post.scheduler.groups import Open, PromptOrder, revived, written
from jaxrl_post.scheduler.placement import LeastLoaded, Placement
from jaxrl_post.types import Capacity, Finish, Group, Layout, Part, Request, Rollout, RolloutId, Sampling, Stop

_COUNTERS = ("num_rounds", "num_waves", "num_groups_admitted", "num_groups_trained", "num_groups_filtered",
             "num_groups_refused", "num_groups_streamed", "num_rollouts_admitted", "num_rollouts_completed",
             "num_rollouts_unscored")
_PLAIN = ("position", "round", "batches", "waves", "seen", "taken", "opened", "to_finish", "to_score")


class Rounds:
    """The machine: waves of whole groups, until a round's batch is full.

    A policy says which groups a wave opens and how many of them end it (`_next_wave`). With `filter_groups` a group whose
    scored accuracies are all equal is left out, and when a whole wave is scored another one refills the round, as large as
    the round's own keep rate asks for; the first `prompts_per_round` kept groups by admission are the batch (dynamic
    sampling, DAPO, arXiv 2503.14476, section 3.2). `steps` counts rounds.
    """

    name = "rounds"

    def __init__(self, prompts: PromptOrder, *, run_seed: int, steps: int, prompts_per_round: int, group_size: int,
                 sampling: Sampling, max_tokens: int, filter_groups: bool, max_waves: int, replicas: int,
                 mini_batches: int = 1, ppo_epochs: int = 1, placement: Placement | None = None,
                 delivery: Delivery | None = None):
        """
        Args:
          delivery: None: the whole round at once, in `mini_batches` x `ppo_epochs` parts; another one has its own.
          placement: None: the least loaded of `replicas`.
        """
        if prompts_per_round % mini_batches:
            raise ValueError(f"scheduler.mini_batches={mini_batches} must divide scheduler.prompts={prompts_per_round}")
        self._delivery = delivery or WholeRounds(mini_batches, ppo_epochs)
        self._placement = placement or LeastLoaded(replicas)
        self._prompts, self._run_seed, self._steps = prompts, run_seed, steps
        self._size, self._group_size = prompts_per_round, group_size
        self._sampling, self._max_tokens = sampling, max_tokens
        self._filter_groups, self._max_waves = filter_groups, max_waves
        self._position = 0  # of the next prompt
        self._round = 0  # batches trained on
        self._batches = 1  # of this round
        self._waves = self._seen = self._taken = self._opened = 0  # of this round: waves, groups scored, handed out, opened
        self._kept: list[Open] = []  # of this round, not handed out
        self._wave: dict[tuple[int, str], Open] = {}  # by admission
        self._whole: list[Open] = []  # of the wave, not asked for, by completion
        self._to_finish = self._to_score = 0  # groups of this wave: still to become whole, asked for and not scored
        self._counts: Counter[str] = Counter()

    def __str__(self) -> str:
        missing = sum(max(opened.size - len(opened.rollouts), 0) for opened in self._wave.values())
        return (f"{self.name} round {self._round + 1} of {self._steps}, wave {self._waves}: {self._taken + len(self._kept)} "
                f"of {self._wanted} groups kept, {len(self._wave)} on their way with {missing} rollouts missing, next "
                f"position {self._position}")

    def admit(self, capacity: Capacity, clock: int) -> list[Request]:
        """A whole wave at once, when nothing is on its way and rounds are left; the engine queues what does not fit.

        Raises:
          RuntimeError: `max_waves` waves did not fill the round.
        """
        if not self._wave and self._room and self._round < self._steps:
            self._check_waves()
            self._batches = self._batches if self._waves else self._open_round()
            self._waves += 1
            groups, ends = self._next_wave(clock)
            self._whole = [opened for opened in self._wave.values() if opened.whole]
            self._to_finish = ends - len(self._whole)
            self._counts["num_waves"] += 1
            self._placement.place([group for group in groups if group], self._round)
        return self._placement.release(capacity)

    def _next_wave(self, clock: int) -> tuple[list[list[Request]], int]:
        """Enters the groups of the next wave; their requests, by group, and how many whole groups end the wave."""
        raise NotImplementedError

    def _open_round(self) -> int:
        """How many batches the next round makes."""
        return 1

    @property
    def _wanted(self) -> int:
        """Groups of the round."""
        return self._size * self._batches

    @property
    def _room(self) -> int:
        """Those that are still to come."""
        return self._wanted - self._taken - len(self._kept)

    def _check_waves(self) -> None:
        if self._waves == self._max_waves:
            raise RuntimeError(
                f"scheduler.filter_groups kept {len(self._kept)} of the {self._wanted} groups of round {self._round + 1} "
                f"after scheduler.max_waves={self._max_waves} waves ({self._seen} groups scored): the other groups' "
                "answers were all right or all wrong; use prompts of fitting difficulty, a larger "
                "scheduler.group_size or scheduler.max_waves, or scheduler.filter_groups=False")

    def _wave_size(self) -> int:
        """Groups that the next wave shall make whole."""
        if self._waves <= 1:
            return self._wanted
        return min(self._wanted, -(-self._room * self._seen // max(len(self._kept), 1)))

    def _draw(self, launched: int) -> Open:
        """The group of the next prompt in order."""
        epoch, prompt = self._prompts.at(self._position)
        opened = Open(position=self._position, epoch=epoch, prompt=prompt, size=self._group_size, launched=launched)
        self._position += 1
        self._counts["num_groups_admitted"] += 1
        return opened

    def _enter(self, opened: Open, prefix_mode: str = "recompute") -> list[Request]:
        """Takes a group into the wave; the requests of what it lacks, with what their samples had before."""
        self._wave[opened.key] = self._only(opened, self._wave)
        opened.rank, opened.asked = self._opened, False
        self._opened += 1
        ids = opened.ids(self._run_seed, opened.missing)
        self._counts["num_rollouts_admitted"] += len(ids)
        return [Request(rollout_id=id, prompt=opened.prompt, seed=id.seed(), max_tokens=self._max_tokens,
                        sampling=self._sampling, prefix=opened.prefixes.get(id.sample), prefix_mode=prefix_mode)
                for id in ids]

    def _only(self, opened: Open, others: Mapping[tuple[int, str], Open]) -> Open:
        if opened.key in others:
            raise ValueError(f"data: prompt id {opened.prompt.id!r} appears twice in epoch {opened.epoch}; ids must be "
                             "unique")
        return opened

    def _open_group(self) -> list[Request]:
        return self._enter(self._draw(self._group_size))

    def complete(self, rollout: Rollout) -> Stop:
        """Keeps it by sample index. Who loses a race is parked; so is what shall go on in another replica."""
        assert rollout.finish not in (Finish.PARKED, Finish.CANCELLED), f"{rollout.id} came back {rollout.finish}"
        self._counts["num_rollouts_completed"] += 1
        stop = list(self._placement.learn(rollout))
        opened = self._wave.get((rollout.id.epoch, rollout.id.prompt_id))
        if opened is None or opened.whole:
            self._late(rollout)
        else:
            assert rollout.id.sample not in opened.rollouts, f"{rollout.id} came back twice"
            opened.rollouts[rollout.id.sample] = rollout
            if opened.whole:
                self._whole.append(opened)
                self._to_finish -= 1
                stop += self._became_whole(opened, rollout.finish_clock)
        return Stop(park=tuple(dict.fromkeys(stop)))

    def _became_whole(self, opened: Open, clock: int) -> list[RolloutId]:
        """Ids that need not go on."""
        return []

    def _late(self, rollout: Rollout) -> None:
        """A rollout finished that its round no longer waits for."""
        raise AssertionError(f"{rollout.id} belongs to no group that lacks it")

    def parked(self, rollouts: Sequence[Rollout]) -> None:
        """What `complete` asked for: it goes on in another replica."""
        if rollouts:
            self._placement.moved(rollouts)

    def due(self) -> list[Group]:
        ready = sorted(self._delivery.due(self._whole, self._to_finish == 0), key=lambda opened: opened.rank)
        if ready:
            self._whole = []
            self._to_score += len(ready)
        for opened in ready:
            opened.asked = True
        return [self._unscored(opened) for opened in ready]

    def _unscored(self, opened: Open) -> Group:
        return opened.unscored()

    def scored(self, group: Group) -> None:
        """Keeps the score; groups that settle by it are filtered and fill the round in order."""
        opened = self._wave[group.rollouts[0].id.epoch, group.prompt.id]
        assert opened.asked and opened.group is None, f"group {group.prompt.id!r} was not due"
        opened.group = group
        self._to_score -= 1
        self._counts["num_rollouts_unscored"] += int(np.sum(~group.scored))
        last = self._to_score == self._to_finish == 0 and not self._whole
        settled = self._delivery.settled(opened, self._wave.values(), last)
        kept = [done for done in settled if not self._filter_groups or differs(done.group)]
        room = self._room
        self._kept += kept[:room]
        self._seen += len(settled)
        self._counts.update(num_groups_filtered=len(settled) - len(kept), num_groups_refused=len(kept[room:]))
        for done in settled:
            del self._wave[done.key]

    def take(self) -> list[Part]:
        """What the delivery hands out now; groups by admission."""
        parts = self._delivery.parts(self._kept, self._room == 0, self._batches)
        if parts:
            self._counts["num_groups_trained"] += len(self._kept)
            self._taken += len(self._kept)
            self._kept = []
            if not parts[-1].publish:
                self._counts["num_groups_streamed"] += sum(len(part.groups) for part in parts)
            else:
                self._round += self._batches
                self._counts["num_rounds"] += self._batches
                self._batches = 1
                self._waves = self._seen = self._taken = self._opened = 0
        return parts

    def held(self) -> list[Rollout]:
        return [rollout for opened in self._wave.values() if opened.group is None for rollout in opened.rollouts.values()]

    def kind(self) -> str:
        """What sort of round opens next, for who expects like of like: here all are alike."""
        return ""

    def layout(self) -> Layout | None:
        """None: rounds are the same however the engine lies."""
        return None

    def state_dict(self) -> dict:
        """At any point: between two rounds little more than the cursor, the round and the counters."""
        return {name: getattr(self, f"_{name}") for name in _PLAIN} | {
            "counts": dict(self._counts), "placement": self._placement.state_dict(),
            "wave": [written(opened) for opened in self._wave.values()],
            "kept": [written(opened) for opened in self._kept], "whole": [opened.rank for opened in self._whole]}

    def load_state_dict(self, state: Mapping) -> None:
        for name in _PLAIN:
            setattr(self, f"_{name}", state[name])
        self._counts = Counter(state["counts"])
        self._placement.load_state_dict(state["placement"])
        wave = [revived(opened, self._prompts) for opened in state["wave"]]
        self._wave = {opened.key: opened for opened in wave}
        self._kept = [revived(opened, self._prompts) for opened in state["kept"]]
        by_rank = {opened.rank: opened for opened in wave}
        self._whole = [by_rank[rank] for rank in state["whole"]]

    def metrics(self) -> dict[str, float]:
        """Counts since the last call."""
        counts, self._counts = self._counts, Counter()
        return {f"sched/{name}": float(counts[name]) for name in self._counters}

    @property
    def _counters(self) -> tuple[str, ...]:
        return _COUNTERS


class Sync(Rounds):
    """A protocols.Scheduler: every round waits for all of its prompts, the next ones in order."""

    name = "sync"

    def _next_wave(self, clock: int) -> tuple[list[list[Request]], int]:
        count = self._wave_size()
        return [self._open_group() for _ in range(count)], count


def differs(group: Group) -> bool:
    """Whether the scored accuracies of a group are not all equal; False with fewer than two of them."""
    accuracies = group.accuracies[group.scored]
    return bool(np.any(accuracies != accuracies[:1])) if accuracies.size else False
