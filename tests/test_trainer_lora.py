"""Gradients of low-rank additions against an explicit full model, and what an optimizer step leaves alone."""

from __future__ import annotations

import dataclasses

import gradient_arms as arms
import jax
import lora_arms
import made_groups
import numpy as np
import pytest

from jaxrl_post import config
from jaxrl_post.models import lora
from jaxrl_post.trainer.learner import Learner, LearnerSettings

pytestmark = pytest.mark.usefixtures("quick_compilation")
EXACT, SINGLE = 1e-12, 5e-6
GROUPS = made_groups.groups()
REMAT = dict(scan_layers="yes", remat=True, remat_policy="projections")


def test_gradients_in_float32():
    assert lora_arms.gap(lora_arms.ROOTED) <= SINGLE


def test_gradients_in_x64_scanned_and_computed_again():
    assert lora_arms.gap(lora_arms.PLAIN, np.float64, **REMAT) <= EXACT


@pytest.mark.extended
def test_gradients_on_eight_devices():
    some = lora_arms.PLAIN._replace(targets=("q", "v", "down"))
    assert lora_arms.gap(some, np.float64, sizes=(2, 2, 2)) <= EXACT


@pytest.mark.extended
@pytest.mark.parametrize("fault", lora_arms.FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    given = lora_arms.ROOTED
    lora_arms.explicit(given)  # before the fault
    lora_arms.planted(fault, monkeypatch)
    assert lora_arms.gap(given) > 1e-2


@pytest.fixture(scope="module")
def stepped():
    """A learner after one step, and its base and additions before it."""
    optimizer = config.OptimizerConfig(lr=1e-2, weight_decay=0.5, max_grad_norm=1e-3)
    one = lora_arms.learner(lora_arms.PLAIN, kind=Learner, optimizer=optimizer)
    before = jax.tree.map(np.array, jax.device_get(one.params))
    which = np.array(one.state.params["base"])
    one.prepare(GROUPS)
    one.accumulate(GROUPS)
    metrics = one.commit()
    return one, before, which, metrics


def test_a_step_moves_every_addition_and_no_bit_of_the_base(stepped):
    one, before, which, metrics = stepped
    after = jax.device_get(one.params)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before.base), jax.tree.leaves(after.base)))
    pairs = zip(jax.tree.leaves(before.adapter), jax.tree.leaves(after.adapter), strict=True)
    assert all(not np.array_equal(a, b) for a, b in pairs)
    assert np.array_equal(which, jax.device_get(one.state.params["base"]))
    assert np.array_equal(which, jax.device_get(jax.jit(lora.digest)(one.params.base)))
    assert float(metrics["actor/grad_norm"]) > 1e-3


def test_every_addition_decays(stepped):
    """Adam's first step has size lr wherever the gradient is not tiny, and decay adds lr * 0.5 times the weight."""
    one, before, _, _ = stepped
    for a, b in zip(jax.tree.leaves(before.adapter), jax.tree.leaves(jax.device_get(one.params.adapter)), strict=True):
        rest = (a - b) / 1e-2 - 0.5 * a
        assert np.median(np.abs(np.abs(rest) - 1)) < 1e-2


def test_moments_and_sums_are_those_of_additions(stepped):
    one, *_ = stepped
    count = sum(leaf.size for leaf in jax.tree.leaves(one.params.adapter))
    moments = sum(leaf.size for leaf in jax.tree.leaves(one.state.opt_state) if leaf.ndim)
    assert moments == 2 * count and sum(leaf.size for leaf in jax.tree.leaves(one._sums.grads)) == count


def test_a_base_in_place_is_not_copied(stepped):
    one, *_ = stepped
    other = Learner(
        one._recipe.model,
        one.params.base,
        one._mesh,
        LearnerSettings(
            algorithm=config.AlgorithmConfig(),
            optimizer=config.OptimizerConfig(),
            batch=one._batch,
            temperature=1.0,
            steps=1,
            max_tokens=arms.MAX_TOKENS,
        ),
        adapter=one.params.adapter,
    )
    pairs = zip(jax.tree.leaves(one.params.base), jax.tree.leaves(other.params.base), strict=True)
    assert all(mine is theirs for mine, theirs in pairs)


def test_another_base_is_refused_at_a_resume(stepped):
    one, *_ = stepped
    saved = jax.tree.map(np.array, jax.device_get(one.state))
    other = dataclasses.replace(saved, params={**saved.params, "base": saved.params["base"] + np.uint32(1)})
    with pytest.raises(ValueError, match="step 3 holds additions to another base than the one here"):
        one.restore(lambda shapes: jax.tree.map(jax.numpy.asarray, other), 3)
    one.restore(lambda shapes: jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), saved, shapes), 1)
    assert one.step == 1
