"""A group on its way: admitted, not yet ended; and how it is written for a checkpoint.

Invariant: `revived(written(group))` decides every later step alike; its prompt is found again by its position in the
order of prompts, and only values and arrays are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jaxrl_post.types import PER_TOKEN, Finish, Group, Prompt, Rollout, RolloutId


class PromptOrder(Protocol):
    """The endless order of the training prompts."""

    def at(self, position: int) -> tuple[int, Prompt]:
        """The epoch and the prompt at `position` >= 0: a pure function."""


@dataclass(kw_only=True)
class Open:
    """A group from its admission to its end.

    `size`: rollouts of the group; `launched`: samples that are generated at once, at least `size`; `attempt`: of their ids;
    `rank`: place in its round. `rollouts`: finished ones by sample index, whole with `size` of them; `prefixes`: what others
    had when they were parked. `since`: clock at which it was put off. `until`: the last optimizer step, counted from 0, that may
    train on it.
    """

    position: int
    epoch: int
    prompt: Prompt
    size: int
    launched: int
    attempt: int = 0
    rank: int = 0
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    prefixes: dict[int, Rollout] = field(default_factory=dict)
    since: int = 0
    until: int = 0
    asked: bool = False  # handed out by `due`
    group: Group | None = None  # scored

    @property
    def key(self) -> tuple[int, str]:
        return self.epoch, self.prompt.id

    @property
    def whole(self) -> bool:
        return len(self.rollouts) >= self.size

    @property
    def missing(self) -> list[int]:
        """Sample indices that were launched and did not finish."""
        return [sample for sample in range(self.launched) if sample not in self.rollouts]

    def ids(self, run_seed: int, samples: Iterable[int]) -> list[RolloutId]:
        return [RolloutId(run_seed, "train", self.epoch, self.prompt.id, sample, self.attempt) for sample in samples]

    def unscored(self) -> Group:
        """The whole group, by sample index."""
        return Group(
            prompt=self.prompt,
            rollouts=tuple(self.rollouts[sample] for sample in sorted(self.rollouts)),
            rewards=np.zeros(len(self.rollouts)),
            scored=np.zeros(len(self.rollouts), bool),
        )


def written(opened: Open) -> dict:
    """Plain values and arrays."""
    group = opened.group
    scores = (
        None
        if group is None
        else {"rewards": group.rewards, "scored": group.scored, "components": dict(group.components)}
    )
    return {
        "position": opened.position,
        "size": opened.size,
        "launched": opened.launched,
        "attempt": opened.attempt,
        "rank": opened.rank,
        "since": opened.since,
        "until": opened.until,
        "asked": opened.asked,
        "scores": scores,
        "rollouts": [_rollout(opened.rollouts[sample]) for sample in sorted(opened.rollouts)],
        "prefixes": [_rollout(opened.prefixes[sample]) for sample in sorted(opened.prefixes)],
    }


def revived(state: Mapping, prompts: PromptOrder) -> Open:
    epoch, prompt = prompts.at(state["position"])
    out = Open(
        position=state["position"],
        epoch=epoch,
        prompt=prompt,
        size=state["size"],
        launched=state["launched"],
        attempt=state["attempt"],
        rank=state["rank"],
        since=state["since"],
        until=state["until"],
        asked=state["asked"],
    )
    for name in ("rollouts", "prefixes"):
        found = [_revived(rollout, prompt) for rollout in state[name]]
        setattr(out, name, {rollout.id.sample: rollout for rollout in found})
    if state["scores"] is not None:
        out.group = Group(prompt=prompt, rollouts=out.unscored().rollouts, **state["scores"])
    return out


def _rollout(rollout: Rollout) -> dict:
    return {
        "id": list(rollout.id),
        "finish": rollout.finish.value,
        "start_clock": rollout.start_clock,
        "finish_clock": rollout.finish_clock,
        **{name: getattr(rollout, name) for name in PER_TOKEN},
    }


def _revived(state: Mapping, prompt: Prompt) -> Rollout:
    return Rollout(
        id=RolloutId(*state["id"]),
        prompt=prompt,
        finish=Finish(state["finish"]),
        start_clock=state["start_clock"],
        finish_clock=state["finish_clock"],
        **{name: state[name] for name in PER_TOKEN},
    )
