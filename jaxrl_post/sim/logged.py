"""A finished run as inputs of its twin: of the rollouts that it logged their lengths, how they ended, and their scores.

Invariant: no text goes through here. A token of a known answer is a stand-in, an end token where the logged one ended
so; of the clocks that were logged only which tokens came in one step, never when.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_post.sim.rows import Known
from jaxrl_post.types import Finish, Group, Request, Rollout, RolloutId, Sampling


class LoggedAnswers:
    """`answers` of a RowTwin. `train`: all rollouts of training; `evaluations`: those of each evaluated version. `drafted`:
    whether a step may have settled several tokens; else each settled one."""

    def __init__(self, train: Sequence[Group], evaluations: Mapping[int, Sequence[Group]], *, drafted: bool):
        self._train = {rollout.id: rollout for group in train for rollout in group.rollouts}
        self._evaluations = {version: {rollout.id: rollout for group in groups for rollout in group.rollouts}
                             for version, groups in evaluations.items()}
        self._drafted = drafted
        self._known: dict[tuple[RolloutId, int], Known] = {}

    def __call__(self, request: Request, version: int) -> Known:
        """
        Raises:
          ValueError: nothing was logged for it.
        """
        evaluated = request.purpose == "eval"
        key = (request.rollout_id, version if evaluated else 0)
        if key not in self._known:
            there = self._evaluations.get(version, {}) if evaluated else self._train
            if request.rollout_id not in there:
                raise ValueError(f"{request.rollout_id} of version {version} is in no log: the twin asks for what the run never "
                                 "did")
            self._known[key] = known(there[request.rollout_id], request.sampling, drafted=self._drafted)
        return self._known[key]


def known(rollout: Rollout, sampling: Sampling, *, drafted: bool) -> Known:
    """Its length, its end, and which of its tokens came in one step.

    Raises:
      ValueError: it ended in a way that no token of its own shows (a stop string).
    """
    ends = sampling.eos_ids + sampling.stop_ids
    other = next(id for id in range(len(ends) + 1) if id not in ends)
    tokens = np.full(len(rollout), other, np.int32)
    if rollout.finish is not Finish.LENGTH:
        last = {Finish.EOS: sampling.eos_ids, Finish.STOP: sampling.stop_ids}.get(rollout.finish)
        if not last:
            raise ValueError(f"{rollout.id}: it ended by {rollout.finish.value!r} and the law names no token that does so: what "
                             "ended it is not known from its length")
        tokens[-1] = last[0]
    if not drafted:
        return Known(tokens)
    return Known(tokens, np.append(np.flatnonzero(np.diff(rollout.clocks)) + 1, tokens.size))


class LoggedRewards:
    """A protocols.Rewards that gives every rollout the score it was given."""

    def __init__(self, groups: Sequence[Group]):
        self._groups = {group.rollouts[0].id: group for group in groups}

    def start(self, rollout: Rollout) -> None:
        """Nothing is graded."""

    def join(self, group: Group) -> Group:
        """
        Raises:
          ValueError: the group was not logged.
        """
        first = group.rollouts[0].id
        if first not in self._groups or [r.id for r in self._groups[first].rollouts] != [r.id for r in group.rollouts]:
            raise ValueError(f"the group of {first} is in no log")
        return dataclasses.replace(self._groups[first], prompt=group.prompt, rollouts=group.rollouts)

    def metrics(self) -> dict[str, float]:
        return {}
