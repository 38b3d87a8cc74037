"""What a critic and a greedy baseline refuse, each in one sentence with the nearest valid value."""

import pytest

from jaxrl_post.config import default, resolve


def refused(*overrides):
    with pytest.raises(ValueError) as error:
        resolve(default(), ["model.preset=tiny", *overrides])
    return str(error.value)


def test_a_critic_is_refused_where_groups_are_streamed():
    text = refused("algorithm.adv_estimator=gae", "scheduler.stream=4")
    assert text.startswith("algorithm.adv_estimator='gae' needs a critic's values of a whole round")
    assert text.endswith("scheduler.stream=4 hands it on in pieces; the nearest valid scheduler.stream is 0")


def test_a_warm_up_as_long_as_the_run_is_refused():
    text = refused("algorithm.adv_estimator=gae_turn", "critic.warmup_steps=10", "steps=10")
    assert text == (
        "critic.warmup_steps=10 leaves the policy no step of steps=10; the nearest valid critic.warmup_steps is 9"
    )


def test_the_greedy_rollout_may_not_lose_a_race():
    text = refused(
        "algorithm.adv_estimator=remax", "scheduler.name=rollpacker", "scheduler.over=1.5", "scheduler.over_samples=1.5"
    )
    assert "needs the greedy rollout of every group, and scheduler.over_samples=1.5 drops" in text


@pytest.mark.parametrize(
    "override, condition",
    [
        ("critic.lr=1e-3", "algorithm.adv_estimator begins with 'gae'"),
        ("algorithm.lam=0.9", "algorithm.adv_estimator begins with 'gae'"),
        ("algorithm.kl_target=0.1", "algorithm.use_kl_in_reward is true"),
    ],
)
def test_what_nothing_would_read_is_refused(override, condition):
    assert condition in refused(override)


def test_a_critic_needs_no_group_and_remax_does():
    assert resolve(default(), ["model.preset=tiny", "algorithm.adv_estimator=gae", "scheduler.group_size=1"])
    assert "scheduler.group_size=1 must be at least 2" in refused(
        "algorithm.adv_estimator=remax", "scheduler.group_size=1"
    )
