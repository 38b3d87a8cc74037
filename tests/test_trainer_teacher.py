"""A teacher of another shape beside the policy: gradients, log-probs, and what stays as it is."""

import dataclasses

import distill_arms as distill
import gradient_arms as arms
import jax
import made_groups
import numpy as np
import pytest
from refusals import refused

from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.trainer.teacher import Teacher

pytestmark = pytest.mark.usefixtures("quick_compilation")
GROUPS = made_groups.groups()
EXACT, SINGLE = 1e-12, 5e-6
BESIDE = distill.algorithm("grpo", opd_kl_coef=0.7)


@pytest.mark.parametrize(
    "given, how",
    [
        (distill.algorithm(), {}),
        pytest.param(BESIDE, dict(parts=3), marks=pytest.mark.extended),
        pytest.param(distill.algorithm(), dict(scan_layers="yes", remat=True), marks=pytest.mark.shown("variants")),
        pytest.param(BESIDE, dict(sizes=(2, 2, 2)), marks=pytest.mark.extended),
        pytest.param(distill.algorithm(), dict(sizes=(2, 2, 1), split_head="yes"), marks=pytest.mark.shown("variants")),
    ],
)
def test_the_gradient_is_that_of_plain_code_in_x64(given, how):
    want = distill.plain_gradient(GROUPS, given=given)
    assert arms.worst(distill.gradient(GROUPS, np.float64, given=given, **how), want) <= EXACT


@pytest.mark.shown("training-parity")
@pytest.mark.parametrize("given", [distill.algorithm(), BESIDE])
def test_the_gradient_in_f32(given):
    assert arms.worst(distill.gradient(GROUPS, given=given), distill.plain_gradient(GROUPS, given=given)) <= SINGLE


@pytest.mark.parametrize(
    "beta, how",
    [
        (1.0, dict(head_chunk=24)),
        pytest.param(0.0, dict(parts=3), marks=pytest.mark.extended),
        pytest.param(0.3, {}, marks=pytest.mark.shown("variants")),
        pytest.param(0.3, dict(sizes=(2, 2, 2)), marks=pytest.mark.shown("variants")),
        pytest.param(1.0, dict(sizes=(2, 2, 2), split_head="yes", head_chunk=24), marks=pytest.mark.extended),
        pytest.param(1.0, dict(scan_layers="yes", remat=True), marks=pytest.mark.shown("variants")),
    ],
)
def test_whole_laws_have_the_gradient_of_plain_code_in_x64(beta, how):
    want, _ = distill.plain_exact(GROUPS, beta)
    assert arms.worst(distill.gradient(GROUPS, np.float64, given=distill.exact(beta), **how), want) <= EXACT


def test_whole_laws_need_no_pass_before_the_gradient_and_tell_the_exact_kl():
    one = distill.learner(given=distill.exact(0.5), kind=arms.Learner)
    assert "teacher score" not in one.jitted() and "measure" not in one.jitted()
    one.prepare(GROUPS)
    arms.shift(one, np.float32)
    one.accumulate(GROUPS)
    told = one.commit()
    assert told["rollout/opd_reverse_kl"] == pytest.approx(distill.plain_exact(GROUPS, 0.5)[1], rel=1e-4)
    assert told["actor/pg_loss"] > 0


def test_written_rows_are_compared_with_no_engine():
    """Their log-probs are zeros, which no engine sampled them by. Nothing else of the step changes."""
    told = {}
    for written in (False, True):
        one = distill.learner(given=distill.exact(0.5), kind=arms.Learner, written=written)
        one.prepare(GROUPS)
        one.accumulate(GROUPS)
        told[written] = {name: float(value) for name, value in one.commit().items()}
    gone = told[False].keys() - told[True].keys()
    assert {"rollout_corr/kl", "training/rollout_probs_diff_mean"} < gone
    assert all(name.startswith(("rollout_corr/", "training/rollout_")) for name in gone)
    assert told[True] == {name: value for name, value in told[False].items() if name not in gone}


def test_a_round_tells_the_reverse_kl_and_leaves_the_teacher_alone():
    one = distill.learner(kind=arms.Learner)
    before = jax.tree.map(np.array, jax.device_get(one._teacher._weights))
    one.prepare(GROUPS)
    one.accumulate(GROUPS)
    told = one.commit()
    _, mask, _, _, gains = distill.plain_gains(GROUPS, np.float32)
    means = [-float(row[own].mean()) for row, own in zip(np.asarray(gains), mask, strict=True) if own.any()]
    assert told["rollout/opd_reverse_kl"] == pytest.approx(np.mean(means), rel=1e-4)
    assert set(one.state.params) == {"policy"}
    after = jax.tree.leaves(jax.device_get(one._teacher._weights))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(jax.tree.leaves(before), after, strict=True))


def test_without_a_teacher_the_learner_is_refused():
    with pytest.raises(ValueError, match="adv_estimator='distill' .* needs a teacher and none was given"):
        arms.learner(given=distill.algorithm(), reference=False)


def test_a_mesh_that_does_not_divide_the_teacher_is_refused():
    odd = dataclasses.replace(distill.MODEL, heads=3, kv_heads=3)
    refused("mesh", Teacher, odd, made_groups.weights(0, np.float32, odd), meshes.make_mesh(1, 1, 2))
