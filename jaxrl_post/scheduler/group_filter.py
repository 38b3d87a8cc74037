"""Dynamic sampling: which scored groups are left out, and how a run ends where too many are (DAPO, arXiv 2503.14476, 3.2).

A group is left out where one number is equal in all its scored rollouts. `metric` names that number, with verl's words
(algorithm.filter_groups.metric):

- seq_reward, or score: the summed reward.
- acc: the accuracy (types.Group).
- another name: a component of the reward, or a reward function, whose score it is.
"""

from __future__ import annotations

import numpy as np

from jaxrl_post.ring.types import Group

SUMMED = ("seq_reward", "score")


class NoGroups(RuntimeError):
    """Filters left out so many groups that a batch cannot be filled."""


class Solved(Exception):
    """Filters left out so many groups, and every rollout of those is right. The run has nothing more to learn from."""


def differs(group: Group, metric: str = SUMMED[0]) -> bool:
    """Returns whether the metric is not equal in all scored rollouts. False with fewer than two that have it.

    Raises:
      NoGroups: the rewards have no such component.
    """
    values = _values(group, metric)[group.scored]
    values = values[~np.isnan(values)]
    return bool(np.any(values != values[:1])) if values.size else False


def solved(group: Group) -> bool:
    """Returns whether all rollouts of a group are scored and right."""
    return bool(group.scored.all() and (group.accuracies > 0.5).all())


def _values(group: Group, metric: str) -> np.ndarray:
    if metric in SUMMED:
        return group.rewards
    if metric == "acc":
        return group.accuracies
    found = group.components.get(metric, group.components.get(f"{metric}/score"))
    if found is not None:
        return found
    if not group.scored.any():
        return np.full(len(group.rollouts), np.nan)
    there = ", ".join(dict.fromkeys([SUMMED[0], "acc", *sorted(group.components)]))
    raise NoGroups(f"scheduler.filter_metric={metric!r} is no component of the rewards; they have {there}"[:600])


def ended(metric: str, begun: bool, kept: str, left_out: int, unsolved: int, waves: str) -> Exception:
    """Returns the error with which a run ends that cannot fill its batch.

    Args:
      begun: whether an optimizer step was taken. Without one, equal rewards may be a constant reward.
      kept: how many groups were kept, of how many, and where.
      left_out: groups that were left out.
      unsolved: those of them that have a rollout that is not right.
      waves: what bounds the groups.
    """
    if begun and not unsolved:
        return Solved(
            f"solved: all rollouts of the {left_out} groups that scheduler.filter_groups left out are right ({kept}, after "
            f"{waves}), so no more steps are taken; the policy and its checkpoint are those of the last step"
        )
    are = "right" if not unsolved else f"equal, and of {unsolved} of these groups not all are right"
    return NoGroups(
        f"scheduler.filter_groups {kept} after {waves}: it left out {left_out} groups, because scheduler.filter_metric="
        f"{metric!r} is equal in all rollouts of each; those rollouts are {are}; use prompts of fitting difficulty, a "
        "larger scheduler.group_size or scheduler.max_waves, another reward, or scheduler.filter_groups=False"
    )
