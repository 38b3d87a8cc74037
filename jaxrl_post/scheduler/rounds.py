"""Synchronous rounds: a round's groups are generated, scored and trained on before the next round begins.

Invariant: what a round trains on is a function of (prompts, run seed, rewards): never of the order in which rollouts
finish. Every (epoch, prompt) that was admitted ends exactly once: trained, filtered (all its accuracies equal) or
refused (kept, but after the round was full). It refuses to train on a group that lacks a rollout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jaxrl_post.types import Capacity, Finish, Group, Layout, Part, Prompt, Request, Rollout, RolloutId, Sampling, Stop

_COUNTERS = ("num_rounds", "num_waves", "num_groups_admitted", "num_groups_trained", "num_groups_filtered",
             "num_groups_refused", "num_rollouts_admitted", "num_rollouts_completed", "num_rollouts_unscored")


class PromptOrder(Protocol):
    """The endless order of the training prompts."""

    def at(self, position: int) -> tuple[int, Prompt]:
        """The epoch and the prompt at `position` >= 0: a pure function."""


@dataclass
class _Open:
    """A group on its way: admitted, not yet ended."""

    prompt: Prompt
    replica: int
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    asked: bool = False  # handed out by `due`
    group: Group | None = None  # scored


class Sync:
    """A protocols.Scheduler: waves of whole groups, one Part per round.

    A round opens with a wave of `prompts_per_round` prompts. With `filter_groups` a group whose scored accuracies are
    all equal is left out, and when a whole wave is scored the next prompts in order refill the round, as many as the
    round's own keep rate asks for; the first `prompts_per_round` kept groups by admission order are the batch (dynamic
    sampling, DAPO, arXiv 2503.14476, section 3.2). A group lives in the replica with the fewest groups on their way.
    A round is trained on in `mini_batches` equal slices of its groups, in order, one optimizer step each, `ppo_epochs`
    times over; `steps` counts rounds.
    """

    def __init__(self, prompts: PromptOrder, *, run_seed: int, steps: int, prompts_per_round: int, group_size: int,
                 sampling: Sampling, max_tokens: int, filter_groups: bool, max_waves: int, replicas: int,
                 mini_batches: int = 1, ppo_epochs: int = 1):
        if prompts_per_round % mini_batches:
            raise ValueError(f"scheduler.mini_batches={mini_batches} must divide scheduler.prompts={prompts_per_round}")
        self._mini_batches, self._ppo_epochs = mini_batches, ppo_epochs
        self._prompts, self._run_seed, self._steps = prompts, run_seed, steps
        self._size, self._group_size, self._replicas = prompts_per_round, group_size, replicas
        self._sampling, self._max_tokens = sampling, max_tokens
        self._filter_groups, self._max_waves = filter_groups, max_waves
        self._position = 0  # of the next prompt
        self._round = 0  # rounds taken
        self._waves = 0  # of this round
        self._seen = 0  # groups scored in this round
        self._kept: list[Group] = []  # of this round
        self._wave: dict[tuple[int, str], _Open] = {}  # by admission
        self._counts: Counter[str] = Counter()

    def __str__(self) -> str:
        missing = sum(self._group_size - len(group.rollouts) for group in self._wave.values())
        return (f"sync round {self._round + 1} of {self._steps}, wave {self._waves}: {len(self._kept)} of {self._size} "
                f"groups kept, {len(self._wave)} on their way with {missing} rollouts missing, next position "
                f"{self._position}")

    def admit(self, capacity: Capacity, clock: int) -> list[Request]:
        """A whole wave at once, when nothing is on its way and rounds are left; the engine queues what does not fit.

        Raises:
          RuntimeError: `max_waves` waves did not fill the round.
        """
        if self._wave or self._round == self._steps:
            return []
        if self._waves == self._max_waves:
            raise RuntimeError(
                f"scheduler.filter_groups kept {len(self._kept)} of the {self._size} groups of round {self._round + 1} "
                f"after scheduler.max_waves={self._max_waves} waves ({self._seen} groups scored): the other groups' "
                "answers were all right or all wrong; use prompts of fitting difficulty, a larger "
                "scheduler.group_size or scheduler.max_waves, or scheduler.filter_groups=False")
        count = self._wave_size()
        self._waves += 1
        self._counts.update(num_waves=1, num_groups_admitted=count, num_rollouts_admitted=count * self._group_size)
        return [request for _ in range(count) for request in self._open_group()]

    def _wave_size(self) -> int:
        if self._waves == 0:
            return self._size
        missing = self._size - len(self._kept)
        return min(self._size, -(-missing * self._seen // max(len(self._kept), 1)))

    def _open_group(self) -> list[Request]:
        epoch, prompt = self._prompts.at(self._position)
        self._position += 1
        key = (epoch, prompt.id)
        if key in self._wave:
            raise ValueError(f"data: prompt id {prompt.id!r} appears twice in epoch {epoch}; ids must be unique")
        load = Counter(group.replica for group in self._wave.values())
        replica = min(range(self._replicas), key=lambda r: (load[r], r))
        self._wave[key] = _Open(prompt, replica)
        ids = [RolloutId(self._run_seed, "train", epoch, prompt.id, sample, 0) for sample in range(self._group_size)]
        return [Request(rollout_id=id, prompt=prompt, seed=id.seed(), max_tokens=self._max_tokens,
                        sampling=self._sampling, replica=replica) for id in ids]

    def complete(self, rollout: Rollout) -> Stop:
        """Keeps it by sample index. Nothing is ever stopped because another rollout finished."""
        assert rollout.finish not in (Finish.PARKED, Finish.CANCELLED), f"{rollout.id} came back {rollout.finish}"
        group = self._wave[rollout.id.epoch, rollout.id.prompt_id]
        assert rollout.id.sample not in group.rollouts, f"{rollout.id} came back twice"
        group.rollouts[rollout.id.sample] = rollout
        self._counts["num_rollouts_completed"] += 1
        return Stop()

    def parked(self, rollouts: Sequence[Rollout]) -> None:
        """Nothing to do: `complete` never asks to park."""
        assert not rollouts, f"nobody asked to park {[rollout.id for rollout in rollouts]}"

    def due(self) -> list[Group]:
        """All groups of the wave, in admission order, once its last rollout is in: until then graders and engine work
        side by side, and the ring waits for neither."""
        if any(group.asked or len(group.rollouts) < self._group_size for group in self._wave.values()):
            return []
        for group in self._wave.values():
            group.asked = True
        return [self._unscored(group) for group in self._wave.values()]

    def _unscored(self, group: _Open) -> Group:
        return Group(prompt=group.prompt, rollouts=tuple(group.rollouts[s] for s in range(self._group_size)),
                     rewards=np.zeros(self._group_size), scored=np.zeros(self._group_size, bool))

    def scored(self, group: Group) -> None:
        """Keeps the score. When the whole wave is scored, its groups are filtered and the round is filled in order."""
        open_group = self._wave[group.rollouts[0].id.epoch, group.prompt.id]
        assert open_group.asked and open_group.group is None, f"group {group.prompt.id!r} was not due"
        open_group.group = group
        self._counts["num_rollouts_unscored"] += int(np.sum(~group.scored))
        groups = [opened.group for opened in self._wave.values()]
        if any(waiting is None for waiting in groups):
            return
        kept = [group for group in groups if not self._filter_groups or differs(group)]
        room = self._size - len(self._kept)
        self._kept += kept[:room]
        self._seen += len(groups)
        self._counts.update(num_groups_filtered=len(groups) - len(kept), num_groups_refused=len(kept[room:]))
        self._wave.clear()

    def take(self) -> list[Part]:
        """The round's batch, once it is full: all of it is fresh in the first part, every part commits, the last one
        publishes."""
        if len(self._kept) < self._size:
            return []
        batch = tuple(self._kept)
        self._kept, self._waves, self._seen = [], 0, 0
        self._round += 1
        self._counts.update(num_rounds=1, num_groups_trained=len(batch))
        size = self._size // self._mini_batches
        slices = [batch[at:at + size] for _ in range(self._ppo_epochs) for at in range(0, self._size, size)]
        return [Part(fresh=batch if n == 0 else (), groups=groups, commit=True, publish=n == len(slices) - 1)
                for n, groups in enumerate(slices)]

    def layout(self) -> Layout | None:
        """None: rounds are the same however the engine lies."""
        return None

    def state_dict(self) -> dict:
        """Between two rounds nothing is open: the cursor, the round and the counters are all there is."""
        assert not self._wave and not self._kept, f"not between two rounds: {self}"
        return {"position": self._position, "round": self._round, "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping) -> None:
        assert not self._wave and not self._kept, f"not between two rounds: {self}"
        self._position, self._round, self._counts = state["position"], state["round"], Counter(state["counts"])

    def metrics(self) -> dict[str, float]:
        """Counts since the last call."""
        counts, self._counts = self._counts, Counter()
        return {f"sched/{name}": float(counts[name]) for name in _COUNTERS}


def differs(group: Group) -> bool:
    """Whether the scored accuracies of a group are not all equal; False with fewer than two of them."""
    accuracies = group.accuracies[group.scored]
    return bool(np.any(accuracies != accuracies[:1])) if accuracies.size else False
