"""Turns the logs of a finished run into inputs of its twin: lengths of rollouts, how they ended, and their scores.

A deferred rollout has several lives. A life ends when the rollout is parked or finishes. The twin must find by itself
at which length a life is parked. A life that begins with candidates accepts as many of them as in the run.

Invariant: the twin gets no text of the run and no clock. A known token is a stand-in. The last token is an end token
if the logged rollout ended with one. Logged clocks only show which tokens one step settled together, never when.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxrl_post.sim.twin import Known
from jaxrl_post.types import Finish, Group, Request, Rollout, RolloutId, Sampling

Ends = dict[int, tuple[int, Finish] | None]  # version in use -> (length, finish) of the life. None: parked


def lives(decisions: Iterable[Mapping]) -> dict[RolloutId, Ends]:
    """Returns how each life of every rollout ended, from the lines of scheduler_log.jsonl."""
    out: dict[RolloutId, Ends] = defaultdict(dict)
    commits = version = 0
    for line in decisions:
        if line["event"] == "take":
            commits += line["commit"]
            version = commits if line["publish"] else version
        elif line["event"] == "parked":
            for id, _ in line["ids"]:
                out[RolloutId(*id)][version] = None
        elif line["event"] == "complete":
            out[RolloutId(*line["id"])][version] = (line["tokens"], Finish(line["finish"]))
    return dict(out)


class LoggedAnswers:
    """The known rollouts of a run, as the argument `answers` of a RowTwin.

    Args:
      train: all groups that were trained.
      ended: how lives ended, as `lives` returns it.
      evaluations: the groups of each evaluated version.
      drafted: whether one step may have settled several tokens that were no candidates.
      prefix_mode: how deferred rollouts resumed (types.PREFIX_MODES).
    """

    def __init__(
        self,
        train: Sequence[Group],
        ended: Mapping[RolloutId, Ends],
        evaluations: Mapping[int, Sequence[Group]],
        *,
        drafted: bool,
        prefix_mode: str,
    ):
        self._train, self._ended = _by_id(train), ended
        self._evaluations = {version: _by_id(groups) for version, groups in evaluations.items()}
        self._drafted, self._mode = drafted, prefix_mode
        self._known: dict[tuple[RolloutId, int], Known] = {}

    def __call__(self, request: Request, version: int) -> Known:
        """Returns the rollout of the request under this version.

        Raises:
          ValueError: the logs lack the rollout, or the steps in which its drafts were settled.
        """
        key = (request.rollout_id, version)
        if key not in self._known:
            self._known[key] = self._found(request, version)
        return self._known[key]

    def _found(self, request: Request, version: int) -> Known:
        id = request.rollout_id
        if request.purpose == "eval":
            rollout = self._evaluations.get(version, {}).get(id)
            ends = {} if rollout is None else {version: (len(rollout), rollout.finish)}
        else:
            rollout, ends = self._train.get(id), self._ended.get(id, {})
        later = [when for when in ends if when >= version]
        if not later:
            raise ValueError(
                f"{id} has no end in the logs under version {version} or a later one: the twin asks for what the "
                "run never did"
            )
        life = max(ends) if self._mode == "recompute" else min(later)  # recompute: each life continues the one before
        last = life == max(ends)
        if self._drafted and not (last and rollout):
            raise ValueError(
                f"{id} was deferred and resumed by {self._mode!r}, or was not trained: no log has the steps that "
                "its drafts took then, so this run cannot be played again"
            )
        if ends[life] is None:
            return Known(np.full(request.max_tokens, _others(request.sampling)[0], np.int32))
        tokens = stand_ins(*ends[life], request.sampling)
        return self._as_stepped(rollout, tokens, request.sampling, len(ends) > 1) if last and rollout else Known(tokens)

    def _as_stepped(self, rollout: Rollout, tokens: np.ndarray, sampling: Sampling, again: bool) -> Known:
        """Makes the first rejected candidate differ, and adds the number of tokens after each logged step."""
        if len(rollout) != tokens.size:
            raise ValueError(
                f"{rollout.id} ends with {tokens.size} tokens by the log of decisions, with {len(rollout)} by "
                "that of rollouts"
            )
        if again and self._mode == "verify" and not rollout.drafted[:-1].all():
            tokens[int(np.argmin(rollout.drafted[:-1]))] = _others(sampling)[1]
        if not self._drafted:
            return Known(tokens)
        return Known(tokens, np.append(np.flatnonzero(np.diff(rollout.clocks)) + 1, tokens.size))


def _by_id(groups: Sequence[Group]) -> dict[RolloutId, Rollout]:
    return {rollout.id: rollout for group in groups for rollout in group.rollouts}


def _others(sampling: Sampling) -> list[int]:
    """Returns two tokens that do not end a rollout."""
    ends = sampling.eos_ids + sampling.stop_ids
    return [id for id in range(len(ends) + 2) if id not in ends][:2]


def stand_ins(length: int, finish: Finish, sampling: Sampling) -> np.ndarray:
    """Returns stand-in tokens, int32[length], that end in the same way as the rollout.

    Raises:
      ValueError: no token shows how the rollout ended (a stop string).
    """
    tokens = np.full(length, _others(sampling)[0], np.int32)
    if finish is not Finish.LENGTH:
        last = {Finish.EOS: sampling.eos_ids, Finish.STOP: sampling.stop_ids}.get(finish)
        if not last:
            raise ValueError(
                f"a rollout ended by {finish.value!r} and the law names no token that does so: what ended it is "
                "not known from its length"
            )
        tokens[-1] = last[0]
    return tokens


class LoggedRewards:
    """A protocols.Rewards that gives every group its logged scores, from the lines of scheduler_log.jsonl."""

    def __init__(self, decisions: Iterable[Mapping]):
        self._scored = {tuple(line["group"]): line for line in decisions if line["event"] == "scored"}

    def start(self, rollout: Rollout) -> None:
        """Does nothing: scores come from the log."""

    def join(self, group: Group) -> Group:
        """Returns the group with its logged scores.

        Raises:
          ValueError: no group of this prompt, epoch and size was scored.
        """
        line = self._scored.get((group.rollouts[0].id.epoch, group.prompt.id), {"scored": ()})
        if len(line["scored"]) != len(group.rollouts):
            raise ValueError(f"the group of {group.rollouts[0].id} and {len(group.rollouts)} rollouts was never scored")
        return dataclasses.replace(
            group, rewards=line["rewards"], scored=line["scored"], components={"acc": line["accuracies"]}
        )

    def metrics(self) -> dict[str, float]:
        return {}
