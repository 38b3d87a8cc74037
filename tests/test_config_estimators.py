"""What a critic and a greedy baseline refuse, each in one sentence with the nearest valid value."""

from config_arms import PAIRS, error, unlike

from jaxrl_post.config import default, resolve


def test_a_critic_is_refused_where_groups_are_streamed():
    text = error("algorithm.adv_estimator=gae", "scheduler.stream=4")
    assert text.startswith("algorithm.adv_estimator='gae' needs a critic's values of a whole round")
    assert text.endswith("scheduler.stream=4 hands it on in pieces; the nearest valid scheduler.stream is 0")


def test_a_warm_up_as_long_as_the_run_is_error():
    text = error("algorithm.adv_estimator=gae_turn", "critic.warmup_steps=10", "steps=10")
    assert text == (
        "critic.warmup_steps=10 leaves the policy no step of steps=10; the nearest valid critic.warmup_steps is 9"
    )


def test_the_greedy_rollout_may_not_lose_a_race():
    text = error(
        "algorithm.adv_estimator=remax", "scheduler.name=rollpacker", "scheduler.over=1.5", "scheduler.over_samples=1.5"
    )
    assert "needs the greedy rollout of every group, and scheduler.over_samples=1.5 drops" in text


def test_a_critic_needs_no_group_and_remax_does():
    assert resolve(default(), ["model.preset=tiny", "algorithm.adv_estimator=gae", "scheduler.group_size=1"])
    assert "scheduler.group_size=1 must be at least 2" in error(
        "algorithm.adv_estimator=remax", "scheduler.group_size=1"
    )


TAUGHT = "algorithm.adv_estimator=distill teacher.path=teacher"
PAIRED = " ".join(PAIRS)
REFUSED = {  # overrides, divided by spaces, and a part of the sentence that refuses them
    "critic.lr=1e-3": "algorithm.adv_estimator is 'gae' or 'gae_turn'",
    "algorithm.lam=0.9": "algorithm.adv_estimator is 'gae' or 'gae_turn'",
    "algorithm.kl_target=0.1": "algorithm.use_kl_in_reward is true",
    "algorithm.adv_estimator=distill": "learns from a teacher: name its folder in teacher.path",
    "algorithm.opd_kl_coef=0.5": "algorithm.opd_kl_coef=0.5 learns from a teacher",
    f"{TAUGHT} algorithm.prox_logp_method=rollout": "the nearest valid algorithm.prox_logp_method is 'recompute'",
    "algorithm.loss_mode=gkd": "'gkd' is with 'distill', and 'rows' has other losses",
    f"{TAUGHT} engine.name=demonstrations": "'gkd' is with 'distill', and 'rows' has other losses",
    f"{TAUGHT} algorithm.kl_coef=0.5": "would be ignored",
    "algorithm.loss_mode=dro": "algorithm.loss_mode='dro' with algorithm.old_kl_coef=0.0 is 'gpg'; 0.1 is usual",
    "algorithm.adv_estimator=gdpo": "algorithm.gdpo_reward_keys=() must name at least one",
    "algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=['a','b'] algorithm.gdpo_reward_weights=[1]": "algorithm."
    "gdpo_reward_weights=(1.0,) must be empty or have one number for each",
    "algorithm.adv_estimator=gae algorithm.lam_value=-0.5": "algorithm.lam_value=-0.5 must be -1",
    "algorithm.loss_mode=clip_cov algorithm.clip_cov_lb=6": "algorithm.clip_cov_lb=6.0 must be below algorithm.clip_cov_ub=5.0",
    "algorithm.loss_mode=kl_cov scheduler.stream=4": "algorithm.loss_mode='kl_cov' ranks all tokens of a round",
    "algorithm.rollout_rs=m2po scheduler.stream=4": "algorithm.rollout_rs='m2po' ranks all tokens of a round",
    "algorithm.top_entropy_quantile=0.2 scheduler.stream=4": "quantile=0.2 ranks all tokens of a round",
}
REFUSED_AT_THE_END = {  # overrides, and how the sentence ends that refuses them
    "algorithm.loss_mode=luspo": "nearest valid algorithm.loss_agg_mode is 'seq-mean-token-mean'",
    f"{PAIRED} scheduler.group_size=4": "is no pair; the nearest valid scheduler.group_size is 2",
    f"{PAIRED} scheduler.ppo_epochs=2": "the nearest valid scheduler.ppo_epochs is 1",
    f"{PAIRED} scheduler.mini_batches=2": "the nearest valid scheduler.mini_batches is 1",
    f"{PAIRED} algorithm.loss_agg_mode=token-mean": "the nearest valid algorithm.loss_agg_mode is 'seq-mean-token-sum'",
    f"{PAIRED} engine.name=rows": "and 'rows' has other losses",
    f"{PAIRED} algorithm.loss_mode=gpg": "and 'rows' has other losses",
    f"{PAIRED} algorithm.adv_estimator=grpo": "and 'rows' has other losses",
}


def test_what_an_estimator_or_a_loss_does_not_go_with():
    assert unlike(REFUSED) == {}
    found = {overrides: error(*overrides.split()) for overrides in REFUSED_AT_THE_END}
    assert not [said for overrides, said in found.items() if not said.endswith(REFUSED_AT_THE_END[overrides])]


def test_what_they_go_with():
    """A teacher needs no group, and may teach what the data wrote; luspo and pairs have a mean of their own."""
    for overrides in (
        f"{TAUGHT} scheduler.group_size=1",
        f"{TAUGHT} algorithm.loss_mode=gkd engine.name=demonstrations",
        "algorithm.loss_mode=luspo algorithm.loss_agg_mode=seq-mean-token-mean",
        PAIRED,
    ):
        resolve(default(), ["model.preset=tiny", *overrides.split()])
