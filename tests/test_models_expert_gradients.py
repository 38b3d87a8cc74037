"""Gradients of families with experts, leaf by leaf, against float64. scripts/shows/moe_parity.py has all families."""

from __future__ import annotations

import re

import expert_arms
import jax
import jax.numpy as jnp
import numpy as np
import parity_arms as arms
import pytest

from jaxrl_post.models import experts, hf
from jaxrl_post.models.model_config import Experts

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


@pytest.mark.parametrize("most", [5, 1 << 30], ids=["one_key", "two_keys"])
def test_rows_are_sorted_by_expert_and_then_by_number(most):
    chosen = np.random.default_rng(0).integers(0, 6, 77)
    order, found = experts.by_expert(jnp.asarray(chosen), most)
    expected = np.argsort(chosen, kind="stable")
    assert np.array_equal(order, expected) and np.array_equal(found, chosen[expected])


def test_no_gradient_of_rows_is_a_scatter():
    """XLA:TPU sorts before a scatter, and adds one row after another. Biases of experts are not looked at: theirs are few rows."""

    def loss(x, scores, matrices):
        ids, _ = experts.highest(0, scores, 2, None)
        return experts.mixed(x, ids, experts.gates(scores, ids, given), matrices, given, "silu").sum()

    given = Experts(5, 2, 7)
    shapes = {"gate": (5, 6, 7), "up": (5, 6, 7), "down": (5, 7, 6)}
    wanted = jnp.ones((9, 6)), jnp.ones((9, 5)), {name: jnp.ones(shape) for name, shape in shapes.items()}
    program = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*wanted))
    assert "ragged_dot" in program and not re.findall(r":f32\S* = scatter", program)


@pytest.mark.extended
@pytest.mark.parametrize("fault", expert_arms.PLANTED)
def test_a_gradient_that_stops_is_found(fault):
    assert max(expert_arms.gradients("mixtral", fault=fault).values()) > 1e-3
