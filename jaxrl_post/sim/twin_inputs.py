"""A finished run as inputs of its twin: of the rollouts that it logged their lengths, how they ended, and their scores.

A rollout that is put off has several lives: each ends when it is parked, at a length that the twin must find out for itself,
or finishes; a life that begins with candidates keeps as many of them as the run's did.
Invariant: no text goes through here, and no clock. A token of a known answer is a stand-in, an end token where the logged
one ended so; of the clocks that were logged only which tokens came in one step, never when.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxrl_post.sim.twin import Known
from jaxrl_post.types import Finish, Group, Request, Rollout, RolloutId, Sampling

Ends = dict[int, tuple[int, Finish] | None]  # by the version in use: length and finish of a life, None: it was stopped


def lives(decisions: Iterable[Mapping]) -> dict[RolloutId, Ends]:
    """How the lives of every rollout ended, from the lines of scheduler_log.jsonl."""
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
    """`answers` of a RowTwin. `train`: all rollouts that were trained; `ended`: see `lives`; `evaluations`: the answers of each
    evaluated version. `drafted`: whether a step may have settled several tokens that were no candidates; `prefix_mode`: how
    what was put off went on (types.PREFIX_MODES).
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
        """
        Raises:
          ValueError: nothing was logged for it, or not what its drafts took.
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
        life = max(ends) if self._mode == "recompute" else min(later)  # what stays is the beginning of what comes
        last = life == max(ends)
        if self._drafted and not (last and rollout):
            raise ValueError(
                f"{id} was put off and went on by {self._mode!r}, or was not trained: no log has the steps that "
                "its drafts took then, so this run cannot be played again"
            )
        if ends[life] is None:
            return Known(np.full(request.max_tokens, _others(request.sampling)[0], np.int32))
        tokens = stand_ins(*ends[life], request.sampling)
        return self._as_stepped(rollout, tokens, request.sampling, len(ends) > 1) if last and rollout else Known(tokens)

    def _as_stepped(self, rollout: Rollout, tokens: np.ndarray, sampling: Sampling, again: bool) -> Known:
        """With what its steps show: where the candidates of an earlier life went wrong, and how many tokens came at once."""
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
    """Two tokens that end nothing."""
    ends = sampling.eos_ids + sampling.stop_ids
    return [id for id in range(len(ends) + 2) if id not in ends][:2]


def stand_ins(length: int, finish: Finish, sampling: Sampling) -> np.ndarray:
    """int32[length] that ends like that.

    Raises:
      ValueError: it ended in a way that no token of its own shows (a stop string).
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
    """A protocols.Rewards that gives every group the scores it was given, from the lines of scheduler_log.jsonl."""

    def __init__(self, decisions: Iterable[Mapping]):
        self._scored = {tuple(line["group"]): line for line in decisions if line["event"] == "scored"}

    def start(self, rollout: Rollout) -> None:
        """Nothing is graded."""

    def join(self, group: Group) -> Group:
        """
        Raises:
          ValueError: the group, or one of its size, was never scored.
        """
        line = self._scored.get((group.rollouts[0].id.epoch, group.prompt.id), {"scored": ()})
        if len(line["scored"]) != len(group.rollouts):
            raise ValueError(f"the group of {group.rollouts[0].id} and {len(group.rollouts)} rollouts was never scored")
        return dataclasses.replace(
            group, rewards=line["rewards"], scored=line["scored"], components={"acc": line["accuracies"]}
        )

    def metrics(self) -> dict[str, float]:
        return {}
