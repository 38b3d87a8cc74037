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
        ("critic.lr=1e-3", "algorithm.adv_estimator is 'gae' or 'gae_turn'"),
        ("algorithm.lam=0.9", "algorithm.adv_estimator is 'gae' or 'gae_turn'"),
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


TAUGHT = ["algorithm.adv_estimator=distill", "teacher.path=teacher"]


@pytest.mark.parametrize(
    "overrides, words",
    [
        (TAUGHT[:1], "learns from a teacher: name its folder in teacher.path"),
        (["algorithm.opd_kl_coef=0.5"], "algorithm.opd_kl_coef=0.5 learns from a teacher"),
        (
            [*TAUGHT, "algorithm.prox_logp_method=rollout"],
            "the nearest valid algorithm.prox_logp_method is 'recompute'",
        ),
        (["algorithm.loss_mode=gkd"], "'gkd' is with 'distill', and 'rows' has other losses"),
        ([*TAUGHT, "engine.name=demonstrations"], "'gkd' is with 'distill', and 'rows' has other losses"),
        ([*TAUGHT, "algorithm.kl_coef=0.5"], "would be ignored"),
    ],
)
def test_a_teacher_is_refused_with_what_does_not_learn_from_it(overrides, words):
    assert words in refused(*overrides)


def test_a_teacher_needs_no_group_and_may_teach_what_the_data_wrote():
    resolve(default(), ["model.preset=tiny", *TAUGHT, "scheduler.group_size=1"])
    resolve(default(), ["model.preset=tiny", *TAUGHT, "algorithm.loss_mode=gkd", "engine.name=demonstrations"])


def test_luspo_is_refused_with_another_mean_than_its_own():
    assert refused("algorithm.loss_mode=luspo").endswith(
        "nearest valid algorithm.loss_agg_mode is 'seq-mean-token-mean'"
    )
    own = ["algorithm.loss_mode=luspo", "algorithm.loss_agg_mode=seq-mean-token-mean"]
    resolve(default(), ["model.preset=tiny", *own])


PAIRS = [
    *("engine.name=preferences", "algorithm.loss_mode=dpo", "algorithm.adv_estimator=pairs"),
    *("algorithm.loss_agg_mode=seq-mean-token-sum", "scheduler.group_size=2"),
]


@pytest.mark.parametrize(
    "override, end",
    [
        ("scheduler.group_size=4", "is no pair; the nearest valid scheduler.group_size is 2"),
        ("scheduler.ppo_epochs=2", "the nearest valid scheduler.ppo_epochs is 1"),
        ("scheduler.mini_batches=2", "the nearest valid scheduler.mini_batches is 1"),
        ("algorithm.loss_agg_mode=token-mean", "the nearest valid algorithm.loss_agg_mode is 'seq-mean-token-sum'"),
        ("engine.name=rows", "and 'rows' has other losses"),
        ("algorithm.loss_mode=gpg", "and 'rows' has other losses"),
        ("algorithm.adv_estimator=grpo", "and 'rows' has other losses"),
    ],
)
def test_pairs_are_refused_with_what_does_not_compare(override, end):
    assert refused(*PAIRS, override).endswith(end)
    resolve(default(), ["model.preset=tiny", *PAIRS])


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (
            ("algorithm.loss_mode=dro",),
            "algorithm.loss_mode='dro' with algorithm.old_kl_coef=0.0 is 'gpg'; 0.1 is usual",
        ),
        (("algorithm.adv_estimator=gdpo",), "algorithm.gdpo_reward_keys=() must name at least one"),
        (
            (
                "algorithm.adv_estimator=gdpo",
                "algorithm.gdpo_reward_keys=['a','b']",
                "algorithm.gdpo_reward_weights=[1]",
            ),
            "algorithm.gdpo_reward_weights=(1.0,) must be empty or have one number for each",
        ),
        (("algorithm.adv_estimator=gae", "algorithm.lam_value=-0.5"), "algorithm.lam_value=-0.5 must be -1"),
        (
            ("algorithm.loss_mode=clip_cov", "algorithm.clip_cov_lb=6"),
            "algorithm.clip_cov_lb=6.0 must be below algorithm.clip_cov_ub=5.0",
        ),
        (
            ("algorithm.loss_mode=kl_cov", "scheduler.stream=4"),
            "algorithm.loss_mode='kl_cov' ranks all tokens of a round",
        ),
        (
            ("algorithm.rollout_rs=m2po", "scheduler.stream=4"),
            "algorithm.rollout_rs='m2po' ranks all tokens of a round",
        ),
        (("algorithm.top_entropy_quantile=0.2", "scheduler.stream=4"), "quantile=0.2 ranks all tokens of a round"),
    ],
)
def test_what_rules_on_tokens_need(overrides, sentence):
    assert sentence in refused(*overrides)
