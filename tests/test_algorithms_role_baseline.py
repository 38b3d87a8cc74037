"""Baselines of roles by hand, and in rollouts that the credit of a round is made of."""

import made_groups
import numpy as np

from jaxrl_post.algorithms import credit
from jaxrl_post.algorithms.advantages import RoleBaseline
from jaxrl_post.config import AlgorithmConfig
from jaxrl_post.ring.types import Group, Prompt


def group(role, rewards, scored=(True, True), name="1"):
    prompt = Prompt(id=f"{role}{name}", tokens=[1], source=role)
    rollouts = tuple(made_groups.rollout(prompt, i, np.arange(2)) for i in range(len(rewards)))
    return Group(prompt=prompt, rollouts=rollouts, rewards=rewards, scored=scored)


def test_by_hand():
    """Decay 0.5: 1 - 0, then b = 0.5 and 3 - 0.5, then b = 1.75. The other role begins at 0."""
    roles = RoleBaseline(0.5)
    masks = [np.ones(2, bool)] * 2
    got = roles.estimate([np.array([0.0, 1.0]), np.array([1.0, 2.0])], masks, "first")
    np.testing.assert_array_equal(got, [[1, 1], [2.5, 2.5]])
    assert roles.of == {"first": 1.75}
    np.testing.assert_array_equal(roles.estimate([np.array([0.0, 2.0])], masks[:1], "second"), [[2, 2]])
    np.testing.assert_array_equal(roles.estimate([np.array([0.0, 2.0])], masks[:1], "first"), [[0.25, 0.25]])


def test_an_unscored_rollout_moves_nothing():
    roles = RoleBaseline(0.5)
    roles.estimate([np.array([np.nan])], [np.zeros(1, bool)], "a")
    assert roles.of == {}


def test_a_restored_baseline_goes_on_where_it_was():
    one, two = RoleBaseline(0.9), RoleBaseline(0.9)
    masks, rewards = [np.ones(1, bool)] * 4, [np.array([value]) for value in (1.0, 0.0, 3.0, -2.0)]
    whole = one.estimate(rewards, masks, "a")
    two.estimate(rewards[:2], masks[:2], "a")
    three = RoleBaseline(0.9)
    three.load_state_dict(two.state_dict())
    np.testing.assert_array_equal(three.estimate(rewards[2:], masks[2:], "a"), whole[2:])
    assert three.of == one.of


def test_the_source_of_a_prompt_is_the_role():
    groups = [group("x", (1.0, 1.0)), group("o", (-1.0, -1.0)), group("x", (1.0, 0.0), (True, False), "2")]
    algorithm, roles = AlgorithmConfig(adv_estimator="rae", rae_decay=0.5), RoleBaseline(0.5)
    credits, _ = credit.assign(groups, algorithm, max_tokens=9, old={}, reference={}, roles=roles)
    got = [[credits[r.id].advantages[0] for r in one.rollouts] for one in groups[:2]]
    np.testing.assert_array_equal(got, [[1, 0.5], [-1, -0.5]])
    assert roles.of == {"x": 0.875, "o": -0.75}
