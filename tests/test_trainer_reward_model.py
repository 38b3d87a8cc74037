"""A reward model: gradients of the learner against autodiff of TRL's formula, metrics by hand, and what starts it."""

from __future__ import annotations

import dataclasses

import gradient_arms as arms
import jax
import made_groups
import numpy as np
import pytest
import reward_model_arms as pairs

from jaxrl_post.algorithms import credit, preferences
from jaxrl_post.launch.parts import second_models
from jaxrl_post.parallel import mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")

GROUPS = pairs.groups()


@pytest.mark.parametrize("center", [0.0, 0.3])
def test_the_gradient_is_that_of_the_loss(center):
    given = pairs.algorithm(center_rewards_coefficient=center)
    found = pairs.gradient(GROUPS, given, rows=2)
    assert arms.worst(found, pairs.plain_gradient(GROUPS, given)) <= 5e-6
    assert np.abs(found["score"]).max() > 0 and np.abs(found["embed"]).max() > 0


def test_slopes_are_those_of_differences():
    step = 1e-5
    for rewards in ([0.0, 0.0], [2.0, -1.0], [-30.0, 40.0], [400.0, -900.0]):
        for margin, center in ((0.0, 0.0), (1.5, 0.2)):
            of = lambda r: preferences.bradley_terry(r, margin, center)[0]  # noqa: B023, E731
            _, slopes = preferences.bradley_terry(np.array(rewards), margin, center)
            moved = [(of(np.array(rewards) + d) - of(np.array(rewards) - d)) / (2 * step) for d in step * np.eye(2)]
            np.testing.assert_allclose(slopes, moved, rtol=1e-4, atol=1e-8)


def test_metrics_are_those_of_trl_by_hand():
    """Five pairs, of which one is unscored and in no mean."""
    given, rng = pairs.algorithm(), np.random.default_rng(1)
    scores = {r.id: rng.standard_normal(len(r)) for g in GROUPS for r in g.rollouts}
    _, facts = credit.assign(GROUPS, given, max_tokens=20, old=scores, reference={})
    kept = [group for group in GROUPS if group.scored.all()]
    rewards = np.array([[scores[r.id][-1] for r in group.rollouts] for group in kept])
    margins, needed = rewards[:, 0] - rewards[:, 1], [group.prompt.extra.get("margin", 0.0) for group in kept]
    assert len(kept) == 4 and credit.describe([facts], given) == pytest.approx(
        {
            "rewards/accuracy": np.mean(margins > 0),
            "rewards/margin": margins.mean(),
            "rewards/mean_reward": rewards.mean(),
            "rewards/min_reward": rewards.min(),
            "rewards/max_reward": rewards.max(),
            "actor/preference_loss": np.mean(np.log1p(np.exp(needed - margins)) + 0.3 * rewards.sum(1) ** 2),
        }
    )


def test_only_the_last_token_of_a_rollout_has_an_advantage():
    scores = {r.id: np.ones(len(r)) for g in GROUPS for r in g.rollouts}
    credits, _ = credit.assign(GROUPS, pairs.algorithm(), max_tokens=20, old=scores, reference={})
    for rollout in GROUPS[0].rollouts:
        moved = np.flatnonzero(credits[rollout.id].advantages)
        assert moved.tolist() == [len(rollout) - 1]


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_head_is_zero_and_the_decoder_is_the_policys(tied):
    policy = dataclasses.replace(made_groups.MODEL, tied=tied)
    model = dataclasses.replace(policy, scalar=True)
    own = made_groups.weights(0, np.float32, policy)
    asked = {}

    def load(shardings, dtype):
        asked.update(shardings)
        return mesh.put(own, shardings)

    home = mesh.replicated(mesh.make_mesh(1, 1, 1))
    shardings = jax.tree.map(lambda _: home, made_groups.weights(0, np.float32, model))
    found = second_models.with_score_head(policy, model, load)(shardings)
    assert asked.keys() == own.keys() and found.keys() == shardings.keys()
    assert found["score"].shape == (16, 1) and not np.any(found["score"])
    np.testing.assert_array_equal(found["embed"], own["embed"])
    assert second_models.with_score_head(model, model, load) is load
