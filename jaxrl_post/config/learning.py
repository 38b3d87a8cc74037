"""The relations between the options of training: losses, estimators of advantages, corrections, the optimizer and LoRA.

Each entry names the options, what must hold of their values, the sentence that refuses them, and where there is one the
nearest valid value. Options are named by section and name (relations.py).
"""

from __future__ import annotations

import difflib

from jaxrl_post.config.relations import relation, rows

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
_DELTA_RULE = ("in_proj_qkv", "in_proj_qkvz", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_ba", "out_proj")
_MODULES = (*_ATTENTION, *_FEED_FORWARD, *_DELTA_RULE, "all-linear")


def _unknown(targets: tuple) -> list:
    return [name for name in targets if name not in _MODULES]


def _known(targets: tuple) -> tuple:
    """Returns targets whose unknown names are replaced by the nearest known ones."""
    near = [difflib.get_close_matches(str(name), _MODULES, n=1, cutoff=0.0)[0] for name in targets]
    return tuple(dict.fromkeys(near)) or (_MODULES[-1],)


def _rising(threshold: tuple, most: int) -> bool:
    """Whether a threshold is [upper], or where `most` is 2 also [lower, upper], above 0 and rising."""
    whole = 1 <= len(threshold) <= most and all(bound > 0 for bound in threshold)
    return whole and list(threshold) == sorted(threshold)


_CORRECTED = "algorithm.use_kl_in_reward=true or algorithm.rollout_rs!=none"
_TAUGHT = "algorithm.adv_estimator=distill or algorithm.opd_kl_coef>0"

_ROWS = rows(
    {
        f"{_CORRECTED} -> algorithm.prox_logp_method is recompute": "{algorithm.prox_logp_method} makes no pass for old "
        "log-probs, which {algorithm.use_kl_in_reward} and {algorithm.rollout_rs} need",
        "algorithm.overlong_buffer <= sampling.max_tokens": "{algorithm.overlong_buffer} is above {sampling.max_tokens}",
        "algorithm.adv_estimator=gae|gae_turn -> scheduler.stream is 0": "{algorithm.adv_estimator} needs a critic's "
        "values of a whole round before its first gradient, and {scheduler.stream} hands it on in pieces",
        "critic.warmup_steps < steps": "{critic.warmup_steps} leaves the policy no step of {steps}",
        "algorithm.adv_estimator=pairs -> scheduler.group_size is 2": "algorithm.adv_estimator='pairs' compares a chosen "
        "with a rejected completion, and {scheduler.group_size} is no pair",
        "algorithm.adv_estimator=pairs -> algorithm.loss_agg_mode is seq-mean-token-sum": "algorithm.adv_estimator='pairs' "
        "is the mean of the losses of pairs, which {algorithm.loss_agg_mode} is not",
        "algorithm.loss_mode=luspo -> algorithm.loss_agg_mode is seq-mean-token-mean": "algorithm.loss_mode='luspo' is "
        "the mean over rollouts of gspo's loss times the length, which {algorithm.loss_agg_mode} is not",
        f"{_TAUGHT} -> algorithm.prox_logp_method is recompute": "{algorithm.prox_logp_method} makes no pass for old "
        "log-probs, which a teacher's are compared with",
        "algorithm.loss_mode=gkd -> scheduler.lend is 0.0": "algorithm.loss_mode='gkd' needs the teacher where gradients "
        "are, and {scheduler.lend} computes some on lent devices",
        "algorithm.adv_estimator=remax -> scheduler.over_samples is 1.0": "algorithm.adv_estimator='remax' needs the "
        "greedy rollout of every group, and {scheduler.over_samples} drops the slowest ones",
        **{
            f"scheduler.name=sync and scheduler.updates=1 and mesh.engine=0 -> {name} is 0.0": f"{{{name}}} would be ignored: a "
            "batch whose tokens are all of the weights in use always moves them, and scheduler.name='sync' with one optimizer "
            "step a round and shared devices has no other"
            for name in ("algorithm.min_ess", "algorithm.max_rollout_kl")
        },
        **{
            f"optimizer.moments_dtype=bfloat16 -> {name} <= 0.99": f"{{{name}}} moves a moment by less than the rounding of "
            "{optimizer.moments_dtype}: it must be at most 0.99"
            for name in ("optimizer.b1", "optimizer.b2")
        },
        **{
            f"lora.rank>0 -> {name} is {none}": f"{{{name}}} moves all weights to other devices, and with lora.rank above 0 the "
            "engine's are merged in place"
            for name, none in (("engine.layouts", "()"), ("scheduler.lend", "0.0"))
        },
        **{
            f"algorithm.adv_estimator=pairs -> {name} is 1": "algorithm.adv_estimator='pairs' has the slope of the loss at the "
            f"start of a round, and {{{name}}} takes further optimizer steps in it; train on fewer pairs a round instead"
            for name in ("scheduler.mini_batches", "scheduler.ppo_epochs")
        },
        **{
            f"algorithm.loss_mode=bradley_terry -> {name} is 0": "algorithm.loss_mode='bradley_terry' trains a reward model, "
            f"which {why}"
            for name, why in (
                ("eval.prompts", "writes no tokens: {eval.prompts} cannot be evaluated"),
                ("algorithm.entropy_coef", "has no law of tokens: {algorithm.entropy_coef} means nothing"),
                ("algorithm.kl_loss_coef", "has no law of tokens: {algorithm.kl_loss_coef} means nothing"),
                ("lora.rank", "needs its new head trained: {lora.rank} leaves it frozen"),
            )
        },
    }
)

LEARNING = (
    *_ROWS,
    relation(
        "algorithm.clip_ratio_c",
        need=lambda ratio: ratio == 0 or ratio > 1,
        says="{algorithm.clip_ratio_c} must be 0 (off) or above 1; 3 is usual",
    ),
    relation(
        "algorithm.rollout_is",
        when="algorithm.prox_logp_method=rollout",
        need=lambda weighs: weighs == "none",
        says="algorithm.prox_logp_method='rollout' takes the engine's log-probs for pi_old, so pi_old / mu is 1: "
        "{algorithm.rollout_is} must be 'none'",
    ),
    relation(
        "algorithm.rollout_is",
        "algorithm.rollout_is_threshold",
        when="algorithm.prox_logp_method=loglinear",
        need=lambda weighs, threshold: weighs in ("none", "token") and len(threshold) == 1,
        says="algorithm.prox_logp_method='loglinear' weighs token by token on the device and truncates: {algorithm.rollout_is} "
        "must be 'token' or 'none', {algorithm.rollout_is_threshold} one number",
    ),
    relation(
        "algorithm.use_kl_in_reward",
        "algorithm.overlong_buffer",
        when="algorithm.adv_estimator=maxrl",
        need=lambda in_reward, buffer: not in_reward and buffer == 0,
        says="algorithm.adv_estimator='maxrl' needs rewards of at least 0: leave algorithm.use_kl_in_reward and "
        "algorithm.overlong_buffer at their defaults",
    ),
    relation(
        "algorithm.rollout_is_threshold",
        need=lambda threshold: _rising(threshold, 2),
        says="{algorithm.rollout_is_threshold} must be [upper] or [lower, upper], above 0 and rising, for {algorithm.rollout_is}",
    ),
    relation(
        "algorithm.rollout_rs_threshold",
        when="algorithm.rollout_rs=none|token_k1|seq_sum_k1|seq_mean_k1",
        need=lambda threshold: _rising(threshold, 2),
        says="{algorithm.rollout_rs_threshold} must be [upper] or [lower, upper], above 0 and rising, for {algorithm.rollout_rs}",
    ),
    relation(
        "algorithm.rollout_rs_threshold",
        when="algorithm.rollout_rs!=none|token_k1|seq_sum_k1|seq_mean_k1",
        need=lambda threshold: _rising(threshold, 1),
        says="{algorithm.rollout_rs_threshold} must be [upper], above 0, for {algorithm.rollout_rs}",
    ),
    relation(
        "lora.targets",
        need=lambda targets: targets and not _unknown(targets),
        culprit=lambda targets: _unknown(targets)[0] if targets else "nothing",
        says=f"{{lora.targets}}: {{culprit}} is not one of {', '.join(_MODULES)}",
        nearest=lambda targets: _known(targets),
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
        when=_TAUGHT,
        need=bool,
        says="{algorithm.adv_estimator} with {algorithm.opd_kl_coef} learns from a teacher: name its folder in teacher.path",
    ),
)
