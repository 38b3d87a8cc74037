"""Groups that come in pieces, while others are still generated: the same gradient, and what cannot come in pieces."""

import functools

import gradient_arms as arms
import jax
import made_groups
import numpy as np
import pytest

from jaxrl_post import config
from jaxrl_post.algorithms import advantages

pytestmark = pytest.mark.usefixtures("quick_compilation")
EXACT = 1e-12
GROUPS = made_groups.groups()
PIECES = ([2], [4, 0], [1, 3])  # as they became whole


def streamed(dtype=np.float64, pieces=PIECES, one=None, **kwargs):
    """Gradient and metrics of a round whose groups are prepared and accumulated piece by piece."""
    with arms.precision(dtype):
        one = one or arms.learner(dtype, **kwargs)
        for piece in pieces:
            groups = [GROUPS[g] for g in piece]
            one.prepare(groups)
            one.accumulate(groups)
        return jax.device_get(one.gradient()), {name: float(value) for name, value in one.commit().items()}


@functools.cache
def learner(given=None):
    with arms.precision(np.float64):
        return arms.learner(np.float64, given=given)


@pytest.mark.parametrize("mode", arms.MODES)
def test_the_sum_is_that_of_the_plain_formula(mode):
    """The policy is that of the round's start; the other side packs nothing and sums nothing."""
    plain = arms.plain_gradient(GROUPS, np.float64, mode=mode, at_start=True)
    one = arms.again(learner(), np.float64, loss_agg_mode=mode)
    assert arms.worst(streamed(one=one)[0], plain) <= EXACT


@pytest.mark.parametrize(  # maxrl has a learner of its own, and distill needs a teacher (test_trainer_teacher.py)
    "estimator",
    [
        pytest.param(name, marks=pytest.mark.extended if name == "maxrl" else ())
        for name in sorted(set(advantages.ADVANTAGES) - {"distill"})
    ],
)
def test_every_estimator_of_a_group_and_every_metric(estimator):
    given = config.AlgorithmConfig(
        rollout_is="token",
        rollout_rs="seq_mean_k2",
        rollout_rs_threshold=(4.55,),
        use_kl_in_reward=estimator != "maxrl",
        kl_coef=0.2,
        overlong_buffer=0 if estimator == "maxrl" else 20,
    )
    (one, told), (two, whole) = (
        streamed(one=arms.again(learner(given), np.float64, adv_estimator=estimator), pieces=pieces)
        for pieces in (PIECES, ([0, 1, 2, 3, 4],))
    )
    assert arms.worst(one, two) <= EXACT
    assert told.keys() == whole.keys() and {"rollout_corr/rollout_is_std", "critic/advantages/max"} <= told.keys()
    for name in set(told) - {"training/packed_fill_ratio"}:  # small pieces fill their rows less
        assert told[name] == pytest.approx(whole[name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("estimator", sorted(advantages.WHOLE_ROUND))
def test_statistics_of_the_whole_round_are_refused(estimator):
    given = config.AlgorithmConfig(adv_estimator=estimator)
    with pytest.raises(
        ValueError,
        match=f"algorithm.adv_estimator='{estimator}' whitens over all tokens of a round and this "
        "round's groups came in pieces; the nearest valid scheduler.stream is 0",
    ):
        streamed(np.float32, given=given, reference=False)
    streamed(np.float32, pieces=([0, 1, 2, 3, 4],), given=given, reference=False)


@pytest.mark.extended
def test_a_planted_mean_per_micro_batch_is_found(monkeypatch):
    arms.mean_per_micro_batch(monkeypatch)
    assert arms.worst(streamed()[0], streamed(pieces=([0, 1, 2, 3, 4],))[0]) > EXACT
