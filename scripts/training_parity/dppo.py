"""DPPO: a trust region of probabilities, by their difference and by a binary KL.

The other side is tests/made_groups.py, in float64. Bounds are narrow, because probabilities of the made-up groups are
small.
"""

from __future__ import annotations

import functools

from training_parity import SINGLE, plant

BOUNDS = {"dppo_tv": (4e-4, 8e-4), "dppo_kl": (4e-6, 8e-6)}


def show(record) -> None:
    import gradient_arms as arms
    import made_groups
    import numpy as np

    groups = made_groups.groups()
    for name, (low, high) in BOUNDS.items():
        given = arms.algorithm(loss_mode=name, clip_ratio_low=low, clip_ratio_high=high)
        want = arms.plain_gradient(groups, np.float64, loss_mode=name, given=given)
        distance = functools.partial(_distance, arms, groups, given, want)
        record.figure(name, distance(), at_most=SINGLE)
        plant(record, name, FAULTS, distance)


def _distance(arms, groups, given, want) -> float:
    return arms.worst(arms.gradient(groups, given=given), want)


def _advantages_of_the_other_sign(patch) -> None:
    """Tokens leave the loss where they move against their advantage."""
    from jaxrl_post.algorithms import losses

    for name in BOUNDS:
        whole = losses.LOSSES[name]

        def turned(logps, old, a, *rest, whole=whole):
            made, told = whole(logps, old, -a, *rest)
            return -made, told

        patch.setitem(losses.LOSSES, name, turned)


def _ratio_is_no_weight(patch) -> None:
    from jaxrl_post.algorithms import losses

    whole = losses._trusted
    patch.setattr(losses, "_trusted", lambda logps, old, *rest: whole(logps, logps, *rest))


FAULTS = {"advantages_of_the_other_sign": _advantages_of_the_other_sign, "ratio_is_no_weight": _ratio_is_no_weight}
