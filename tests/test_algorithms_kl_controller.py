"""The adaptive coefficient of the KL in the reward, by hand."""

import numpy as np
import pytest

from jaxrl_post.algorithms.kl_estimators import KlController
from jaxrl_post.config import AlgorithmConfig


def controller(**more):
    given = dict(use_kl_in_reward=True, kl_coef=0.2, kl_target=0.1, kl_horizon=100.0)
    return KlController(AlgorithmConfig(**given | more))


@pytest.mark.parametrize(
    "kls, value",
    [
        ([0.11] * 10, 0.2 * (1 + 0.1 * 10 / 100)),  # a tenth above the target, 10 of 100 rollouts
        ([0.5] * 10, 0.2 * (1 + 0.2 * 10 / 100)),  # far above: a fifth at most
        ([-0.5] * 50, 0.2 * (1 - 0.2 * 50 / 100)),  # k1 may be negative
        ([0.0, 0.2], 0.2),  # at the target
        ([], 0.2),
    ],
)
def test_one_step_by_hand(kls, value):
    one = controller()
    one.update(kls)
    assert one.value == pytest.approx(value, rel=1e-12)


def test_a_target_of_zero_keeps_the_coefficient():
    one = controller(kl_target=0.0)
    one.update([5.0] * 10)
    assert one.value == 0.2 and one.applied(AlgorithmConfig()).kl_coef == 0.2


def test_a_restored_controller_goes_on_alike():
    one, other = controller(), controller()
    one.update([0.3] * 7)
    other.load_state_dict(one.state_dict())
    for each in (one, other):
        each.update([0.05] * 3)
    assert one.value == other.value != 0.2 and isinstance(one.state_dict()["value"], float)
    assert one.applied(AlgorithmConfig()).kl_coef == np.float64(one.value)
