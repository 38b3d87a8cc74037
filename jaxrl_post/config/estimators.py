"""The relations of estimators of advantages that need more than the rewards of a group: a critic, a greedy rollout, a teacher.

Each entry names the options, what must hold of their values, the sentence that refuses them, and where there is one the
nearest valid value. Options are named by section and name (relations.py).
"""

from __future__ import annotations

from jaxrl_post.config.relations import relation

ESTIMATORS = (
    relation(
        "scheduler.stream",
        when="algorithm.adv_estimator=gae|gae_turn",
        need=lambda stream: stream == 0,
        says="{algorithm.adv_estimator} needs a critic's values of a whole round before its first gradient, and {scheduler.stream} "
        "hands it on in pieces",
        nearest=lambda stream: 0,
    ),
    relation(
        "critic.warmup_steps",
        "steps",
        need=lambda warmup, steps: warmup < steps,
        says="{critic.warmup_steps} leaves the policy no step of {steps}",
        nearest=lambda warmup, steps: steps - 1,
    ),
    relation(
        "scheduler.group_size",
        when="algorithm.adv_estimator=pairs",
        need=lambda size: size == 2,
        says="algorithm.adv_estimator='pairs' compares a chosen with a rejected completion, and {scheduler.group_size} is no pair",
        nearest=lambda size: 2,
    ),
    *(
        relation(
            name,
            when="algorithm.adv_estimator=pairs",
            need=lambda count: count == 1,
            says="algorithm.adv_estimator='pairs' has the slope of the loss at the start of a round, and {"
            + name
            + "} takes "
            "further optimizer steps in it; train on fewer pairs a round instead",
            nearest=lambda count: 1,
        )
        for name in ("scheduler.mini_batches", "scheduler.ppo_epochs")
    ),
    relation(
        "algorithm.loss_agg_mode",
        when="algorithm.adv_estimator=pairs",
        need=lambda mode: mode == "seq-mean-token-sum",
        says="algorithm.adv_estimator='pairs' is the mean of the losses of pairs, which {algorithm.loss_agg_mode} is not",
        nearest=lambda mode: "seq-mean-token-sum",
    ),
    relation(
        "algorithm.loss_agg_mode",
        when="algorithm.loss_mode=luspo",
        need=lambda mode: mode == "seq-mean-token-mean",
        says="algorithm.loss_mode='luspo' is the mean over rollouts of gspo's loss times the length, which "
        "{algorithm.loss_agg_mode} is not",
        nearest=lambda mode: "seq-mean-token-mean",
    ),
    *(
        relation(
            name,
            when="algorithm.loss_mode=bradley_terry",
            need=lambda value: value == 0,
            says="algorithm.loss_mode='bradley_terry' trains a reward model, which " + why,
            nearest=lambda value: 0,
        )
        for name, why in (
            ("eval.prompts", "writes no tokens: {eval.prompts} cannot be evaluated"),
            ("algorithm.entropy_coef", "has no law of tokens: {algorithm.entropy_coef} means nothing"),
            ("algorithm.kl_loss_coef", "has no law of tokens: {algorithm.kl_loss_coef} means nothing"),
            ("lora.rank", "needs its new head trained: {lora.rank} leaves it frozen"),
        )
    ),
    relation(
        "algorithm.gdpo_reward_keys",
        "algorithm.gdpo_reward_weights",
        when="algorithm.adv_estimator=gdpo",
        need=lambda keys, weights: len(keys) >= 1 and len(weights) in (0, len(keys)),
        says="algorithm.adv_estimator='gdpo' normalises components of the reward: {algorithm.gdpo_reward_keys} must name at "
        "least one, and {algorithm.gdpo_reward_weights} must be empty or have one number for each",
    ),
    relation(
        "algorithm.old_kl_coef",
        when="algorithm.loss_mode=dro",
        need=lambda weight: weight > 0,
        says="algorithm.loss_mode='dro' with {algorithm.old_kl_coef} is 'gpg'; 0.1 is usual",
    ),
    relation(
        "algorithm.lam_value",
        need=lambda lam: lam == -1 or lam >= 0,
        says="{algorithm.lam_value} must be -1, which stands for algorithm.lam, or from 0 to 1",
    ),
    relation(
        "algorithm.clip_cov_lb",
        "algorithm.clip_cov_ub",
        need=lambda low, high: low < high,
        says="{algorithm.clip_cov_lb} must be below {algorithm.clip_cov_ub}",
    ),
    relation(
        "teacher.path",
        when="algorithm.adv_estimator=distill or algorithm.opd_kl_coef>0",
        need=bool,
        says="{algorithm.adv_estimator} with {algorithm.opd_kl_coef} learns from a teacher: name its folder in teacher.path",
    ),
    relation(
        "algorithm.prox_logp_method",
        when="algorithm.adv_estimator=distill or algorithm.opd_kl_coef>0",
        need=lambda method: method == "recompute",
        says="{algorithm.prox_logp_method} makes no pass for old log-probs, which a teacher's are compared with",
        nearest=lambda method: "recompute",
    ),
    relation(
        "scheduler.lend",
        when="algorithm.loss_mode=gkd",
        need=lambda lend: lend == 0,
        says="algorithm.loss_mode='gkd' needs the teacher where gradients are, and {scheduler.lend} computes some on lent devices",
        nearest=lambda lend: 0.0,
    ),
    relation(
        "scheduler.over_samples",
        when="algorithm.adv_estimator=remax",
        need=lambda over: over == 1,
        says="algorithm.adv_estimator='remax' needs the greedy rollout of every group, and {scheduler.over_samples} drops the "
        "slowest ones",
        nearest=lambda over: 1.0,
    ),
)
