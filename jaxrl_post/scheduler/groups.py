"""Groups between admission and their end, and their form in a checkpoint.

Invariant: `revived(written(group))` leads to the same decisions as the group itself. A prompt is found again by its
position in the order of prompts. Only plain values and arrays are written.
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
        """Returns the epoch and the prompt at `position` >= 0. This is a pure function."""


@dataclass(kw_only=True)
class Open:
    """A group between its admission and its end.

    Attributes:
      size: rollouts that make the group complete.
      launched: samples that are generated at once, at least `size`.
      attempt: the attempt number in the ids of its rollouts.
      rank: its place in the order of admission within a round.
      rollouts: finished rollouts by sample index.
      prefixes: parked rollouts by sample index. Their tokens are the prefix of the next request.
      since: the clock at which the group was deferred, in engine steps.
      until: the last optimizer step that may train on the group. Steps count from 0.
      asked: whether `due` has returned the group for scoring.
      group: the scored group, or None.
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
    asked: bool = False
    group: Group | None = None

    @property
    def key(self) -> tuple[int, str]:
        """Returns epoch and prompt id, which identify the group."""
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
        """Returns the group with its scores."""
        assert self.group is not None, f"{self.key} has no scores yet"
        return self.group

    def ids(self, run_seed: int, samples: Iterable[int]) -> list[RolloutId]:
        """Returns the rollout ids of the given samples."""
        return [RolloutId(run_seed, "train", self.epoch, self.prompt.id, sample, self.attempt) for sample in samples]

    def unscored(self) -> Group:
        """Returns the complete group without scores, rollouts by sample index."""
        return Group(
            prompt=self.prompt,
            rollouts=tuple(self.rollouts[sample] for sample in sorted(self.rollouts)),
            rewards=np.zeros(len(self.rollouts)),
            scored=np.zeros(len(self.rollouts), bool),
        )


def written(opened: Open) -> dict:
    """Returns the group as plain values and arrays, for a checkpoint."""
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
    """Returns the group that `written` described."""
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
    """Returns a rollout as plain values and arrays."""
    return {
        "id": list(rollout.id),
        "finish": rollout.finish.value,
        "start_clock": rollout.start_clock,
        "finish_clock": rollout.finish_clock,
        **{name: getattr(rollout, name) for name in PER_TOKEN},
    }


def _revived(state: Mapping, prompt: Prompt) -> Rollout:
    """Returns the rollout that `_rollout` described."""
    return Rollout(
        id=RolloutId(*state["id"]),
        prompt=prompt,
        finish=Finish(state["finish"]),
        start_clock=state["start_clock"],
        finish_clock=state["finish_clock"],
        **{name: state[name] for name in PER_TOKEN},
    )
