"""Gradients of families with experts, leaf by leaf, against float64. scripts/shows/moe_parity.py has all families."""

from __future__ import annotations

import expert_arms
import jax
import parity_arms as arms
import pytest

from jaxrl_post.models import hf

BOUND = 5e-6  # of a leaf's largest number


@pytest.mark.parametrize("family", (*arms.WITH_EXPERTS, "gemma4_moe"))
def test_no_two_experts_are_nearly_tied(family):
    """Where they were, rounding alone could choose another one, and scores and gradients would jump."""
    config, params = hf.load(arms.GOLDENS / family)
    chosen, margin = expert_arms.choices(config, params, arms.golden(family)[0])
    assert margin > 20 * arms.BOUND and len(chosen) == config.layers - len(config.experts.dense_layers)
    assert all(len(set(ids.ravel().tolist())) == config.experts.count for ids in chosen.values())


def test_every_leaf_has_the_gradient_of_a_plain_form_in_float64():
    """Qwen2-MoE has most leaves: biases, and a shared expert with its gate."""
    found = expert_arms.gradients("qwen2_moe")
    assert len(found) == len(jax.tree.leaves(hf.load(arms.GOLDENS / "qwen2_moe")[1]))
    assert max(found.values()) <= BOUND, max(found, key=found.get)


@pytest.mark.extended
@pytest.mark.parametrize("fault", expert_arms.PLANTED)
def test_a_gradient_that_stops_is_found(fault):
    assert max(expert_arms.gradients("mixtral", fault=fault).values()) > 1e-3
