"""ReMax: a group's last rollout gives the others' baseline and has no gradient of its own.

The other side is tests/made_groups.py with advantages from two lines of arithmetic, in float64.
"""

from __future__ import annotations

import dataclasses

from training_parity import SINGLE, plant


def show(record) -> None:
    import gradient_arms as arms
    import made_groups
    import numpy as np

    groups = made_groups.groups(unscored=False)
    given = dataclasses.replace(arms.algorithm(), adv_estimator="remax")
    sampled = [
        dataclasses.replace(g, rollouts=g.rollouts[:-1], rewards=g.rewards[:-1], scored=g.scored[:-1]) for g in groups
    ]
    gains = [[float(reward) - float(g.rewards[-1]) for reward in g.rewards[:-1]] for g in groups]
    want = arms.plain_gradient(sampled, np.float64, values=gains)
    record.figure("remax", arms.worst(arms.gradient(groups, given=given), want), at_most=SINGLE)
    plant(record, "remax", FAULTS, lambda: arms.worst(arms.gradient(groups, given=given), want))


def _greedy_rollout_is_trained(patch) -> None:
    """It stays in the group, where its own advantage is 0, and counts."""
    from jaxrl_post.algorithms import credit

    patch.setattr(credit, "trained", lambda groups, algorithm: groups)


def _baseline_is_the_mean(patch) -> None:
    from jaxrl_post.algorithms import credit

    patch.setattr(credit, "_greedy_reward", lambda group, *_: float(group.rewards.mean()))


FAULTS = {"greedy_rollout_is_trained": _greedy_rollout_is_trained, "baseline_is_the_mean": _baseline_is_the_mean}
