"""GMPO: the geometric mean of bounded ratios.

The other side is tests/made_groups.py, which takes the product of a sequence's ratios to the power of 1 / length, in
float64.
"""

from __future__ import annotations

from training_parity import SINGLE, plant

MODE = "seq-mean-token-mean"


def show(record) -> None:
    import gradient_arms as arms
    import made_groups
    import numpy as np

    groups, given = made_groups.groups(), arms.algorithm(MODE, loss_mode="geo_mean")
    want = arms.plain_gradient(groups, np.float64, mode=MODE, loss_mode="geo_mean")
    record.figure("gmpo", arms.worst(arms.gradient(groups, given=given), want), at_most=SINGLE)
    plant(record, "gmpo", FAULTS, lambda: arms.worst(arms.gradient(groups, given=given), want))


def _mean_across_sequences(patch) -> None:
    from jaxrl_post.algorithms import losses

    whole = losses.sequence_mean
    patch.setattr(losses, "sequence_mean", lambda values, mask, ids: whole(values, mask, (ids > 0).astype(ids.dtype)))


def _ratios_are_not_bounded(patch) -> None:
    import dataclasses

    from jaxrl_post.algorithms import losses

    whole = losses.LOSSES["geo_mean"]

    def free(*given):
        *arrays, algorithm = given
        return whole(*arrays, dataclasses.replace(algorithm, clip_ratio_low=99.0, clip_ratio_high=99.0))

    patch.setitem(losses.LOSSES, "geo_mean", free)


FAULTS = {"mean_across_sequences": _mean_across_sequences, "ratios_are_not_bounded": _ratios_are_not_bounded}
