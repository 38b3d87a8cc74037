"""The relations between the options of training: losses, corrections, the optimizer and LoRA. See rules.py."""

from __future__ import annotations

import difflib

from jaxrl_post.config.relations import relation

_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "all-linear")


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


_LOSSES = (
    relation(
        "algorithm.clip_ratio_c",
        need=lambda ratio: ratio == 0 or ratio > 1,
        says="{algorithm.clip_ratio_c} must be 0 (off) or above 1; 3 is usual",
    ),
    relation(
        "algorithm.prox_logp_method",
        "algorithm.use_kl_in_reward",
        "algorithm.rollout_rs",
        need=lambda method, in_reward, rejects: method == "recompute" or (not in_reward and rejects == "none"),
        says="{algorithm.prox_logp_method} makes no pass for old log-probs, which {algorithm.use_kl_in_reward} and "
        "{algorithm.rollout_rs} need",
        nearest=lambda method, in_reward, rejects: "recompute",
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
        "algorithm.overlong_buffer",
        "sampling.max_tokens",
        need=lambda buffer, tokens: buffer <= tokens,
        says="{algorithm.overlong_buffer} is above {sampling.max_tokens}",
        nearest=lambda buffer, tokens: tokens,
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
)

_GATES = tuple(
    relation(
        f"algorithm.{name}",
        "scheduler.updates",
        "mesh.engine",
        when="scheduler.name=sync",
        need=lambda bound, updates, engine: bound == 0 or updates > 1 or engine > 0,
        says=f"{{algorithm.{name}}} would be ignored: a batch whose tokens are all of the weights in use always moves them, and "
        "scheduler.name='sync' with one optimizer step a round and shared devices has no other",
        nearest=lambda bound, updates, engine: 0.0,
    )
    for name in ("min_ess", "max_rollout_kl")
)

_MOMENTS = tuple(
    relation(
        f"optimizer.{name}",
        when="optimizer.moments_dtype=bfloat16",
        need=lambda decay: decay <= 0.99,
        says=f"{{optimizer.{name}}} moves a moment by less than the rounding of {{optimizer.moments_dtype}}: it must be at "
        "most 0.99",
        nearest=lambda decay: 0.99,
    )
    for name in ("b1", "b2")
)

_LORA = (
    relation(
        "lora.targets",
        need=lambda targets: targets and not _unknown(targets),
        culprit=lambda targets: _unknown(targets)[0] if targets else "nothing",
        says=f"{{lora.targets}}: {{culprit}} is not one of {', '.join(_MODULES)}",
        nearest=lambda targets: _known(targets),
    ),
    *(
        relation(
            name,
            when="lora.rank>0",
            need=lambda value: not value,
            says=f"{{{name}}} moves all weights to other devices, and with lora.rank above 0 the engine's are merged in place",
            nearest=lambda value, none=none: none,
        )
        for name, none in (("engine.layouts", ()), ("scheduler.lend", 0.0))
    ),
)

LEARNING = (*_LOSSES, *_GATES, *_MOMENTS, *_LORA)
