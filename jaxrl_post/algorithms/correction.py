"""What becomes of tokens that another policy than the learner's sampled: weights by importance sampling, rejection, masks.

rho = pi_old / mu. pi_old comes from the learner's log-probs at the start of the round. mu comes from the engine's
log-probs of the sampling distribution. One weight per token multiplies the policy loss: rollout_is computes the
weight, and rollout_rs sets it to 0. A rejected token leaves the numerator of every term of the loss, and is still
counted (aggregation.py). Names and bounds are verl's. Host code but for `off_policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_post.algorithms.advantages import Masks, Vector, Vectors
from jaxrl_post.algorithms.logprobs import LOG_RATIO_BOUND, assert_alike, sequence_mean

LEVELS: dict[str, Callable] = {"token": lambda stats: stats, "seq_sum": np.sum, "seq_mean": np.mean, "seq_max": np.max}
DIVERGENCES = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: np.exp(d) - 1.0 - d}
EXTREME = 1.25  # a ratio from which on a token counts as extreme
Pair = tuple[Vector, Vector]


def importance(log_ratio: Vector, mode: str, versions: Int[np.ndarray, " T"]) -> Vector:
    """Returns rho of each token, before any bound. Logs are clamped to +-20.

    Modes:
    - none: 1.
    - token: the token's own ratio.
    - span: the product over the rollout's tokens with the same version of the weights.
    - sequence: the product over the rollout.
    """
    if mode == "none":
        return np.ones(log_ratio.shape)
    if mode == "token":
        return bounded_exp(log_ratio)
    spans = np.unique(versions, return_inverse=True)[1] if mode == "span" else np.zeros(log_ratio.shape, int)
    return bounded_exp(np.bincount(spans, weights=log_ratio)[spans] if log_ratio.size else log_ratio)


def bounded_exp(log_ratio: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    """Returns exp of log-ratios clamped to +-20."""
    return np.exp(np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def prox_weights(versions: Int[np.ndarray, " T"], step: int) -> Vector:
    """Returns where on the line from log mu to log pi the proximal policy is expected.

    The proximal policy is taken as one optimizer step behind pi. A token that is d > 0 steps old gets (d - 1) / d. Any
    other token gets 1. The source is A-3PO (arXiv 2512.06547, section 3), which AReaL calls loglinear.
    """
    age = step - versions.astype(float)
    return np.where(age > 0, (age - 1.0) / np.maximum(age, 1.0), 1.0)


def bounded(ratios: Vector, threshold: Sequence[float]) -> Vector:
    """Returns rho with a bound applied.

    - threshold (upper,): min(rho, upper), truncated importance sampling (TIS).
    - threshold (lower, upper): rho, and 0 outside the bounds, masked importance sampling (MIS, IcePop).
    """
    if len(threshold) == 1:
        return np.minimum(ratios, threshold[0])
    return np.where(_within(ratios, *threshold), ratios, 0.0)


def kept(log_ratio: Vector, mode: str, threshold: Sequence[float]) -> Bool[np.ndarray, " T"]:
    """Returns which tokens rejection keeps.

    mode none keeps every token. Other modes are LEVEL_DIVERGENCE. Level token judges each token alone. The seq levels
    judge the whole rollout, by the sum, mean or largest of its tokens' divergences.

    - k1 = log mu - log pi_old must be between the logs of threshold (lower, upper). A single threshold (upper,) stands
      for (1/upper, upper). seq_mean_k1 is the geometric mean.
    - k2 = k1^2 / 2 and k3 = rho - 1 - log rho must be at most threshold (upper,).
    """
    if mode == "none":
        return np.ones(log_ratio.shape, bool)
    level, _, divergence = mode.rpartition("_")
    safe = np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    found = LEVELS[level](DIVERGENCES[divergence](safe)) if log_ratio.size else log_ratio
    low, high = -np.inf, threshold[-1]
    if divergence == "k1":
        low, high = np.log(threshold[0] if len(threshold) == 2 else 1.0 / threshold[0]), np.log(threshold[-1])
    return np.broadcast_to(_within(found, low, high), log_ratio.shape)


def describe(ratios: Vectors, weights: Vectors, keeps: Masks, threshold: Sequence[float]) -> dict[str, float]:
    """Returns rollout_corr/ metrics over the tokens of n >= 1 non-empty rollouts.

    - rollout_is_{mean, std, min, max}: of the weights as applied, before rejection.
    - rollout_is_eff_sample_size: (mean w)^2 / mean w^2, 1 when all weights are equal.
    - rollout_is_ratio_fraction_{high, low}: share of rho above the upper bound and below the lower bound. The lower
      bound is 1/upper where none is given.
    - rollout_rs_masked_fraction: share of tokens that were rejected.
    - rollout_rs_seq_masked_fraction: share of rollouts with a rejected token.
    """
    raw, w, keep = (np.concatenate(side) for side in (ratios, weights, keeps))
    low = threshold[0] if len(threshold) == 2 else 1.0 / threshold[0]
    square = float(np.mean(w * w))
    figures = {
        "is_mean": w.mean(),
        "is_std": w.std(),
        "is_min": w.min(),
        "is_max": w.max(),
        "is_eff_sample_size": w.mean() ** 2 / square if square > 0 else 0.0,
        "is_ratio_fraction_high": np.mean(raw > threshold[-1]),
        "is_ratio_fraction_low": np.mean(raw < low),
        "rs_masked_fraction": 1.0 - keep.mean(),
        "rs_seq_masked_fraction": np.mean([not part.all() for part in keeps]),
    }
    return {f"rollout_corr/rollout_{name}": float(value) for name, value in figures.items()}


def off_policy(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    delta: float,
) -> Bool[Array, "B T"]:
    """Returns True where A < 0 and the rollout's mean of log pi_old - log pi is above `delta`, in nats per token.

    The source is off-policy sequence masking (OPSM, DeepSeek-V3.2, arXiv 2512.02556, section 3.1; as slime). The paper's old
    policy is the engine's, which is prox_logp_method "rollout". Such a token has no gradient, and is still counted.
    """
    assert_alike(logprobs, old_logprobs, advantages)
    return (advantages < 0) & (sequence_mean(old_logprobs - logprobs, mask, segment_ids) > delta) & mask


def mismatch(pairs: Sequence[Pair]) -> dict[str, float]:
    """Returns metrics of (old, rollout) log-probs of the sampled tokens of each rollout, T >= 1, under verl's names.

    mu is the engine's policy, and rho = pi_old / mu.

    - rollout_probs_diff_*: differences of probabilities, |exp - exp|.
    - rollout_logprobs_abs_diff_*: differences of log-probs in nats.
    - kl: the mean over tokens of log mu - log pi_old, which is k1 of KL(mu || pi_old).
    - k3_kl: the same KL by k3 (joschu.net/blog/kl-approx.html).
    - chi2_token, chi2_seq: the mean of rho^2 - 1, with rho of a token or of a whole rollout.
    - *_ppl* (perplexities and the differences of their logs): means over rollouts.
    - ess: (mean rho)^2 / mean rho^2 over tokens (PipelineRL, arXiv 2509.19128, section 5). This share of the tokens
      would suffice if they were on-policy.
    - tv: mean |rho - 1| / 2, an estimate of the total variation between a token's two distributions.
    """
    old, rollout = (np.concatenate(side).astype(float) for side in zip(*pairs, strict=True))
    probs, gap = np.abs(np.exp(old) - np.exp(rollout)), old - rollout
    ratio = bounded_exp(gap)
    # of each rollout
    old_means, rollout_means = (
        np.array([one.astype(float).mean() for one in side]) for side in zip(*pairs, strict=True)
    )
    sums = np.array([(a.astype(float) - b.astype(float)).sum() for a, b in pairs])
    return {
        "training/rollout_probs_diff_mean": float(probs.mean()),
        "training/rollout_probs_diff_max": float(probs.max()),
        "training/rollout_probs_diff_std": float(probs.std(ddof=1)) if probs.size > 1 else 0.0,
        "training/rollout_logprobs_abs_diff_mean": float(np.abs(gap).mean()),
        "training/rollout_logprobs_abs_diff_max": float(np.abs(gap).max()),
        "rollout_corr/kl": float(-gap.mean()),
        "rollout_corr/k3_kl": float(np.mean(ratio - 1.0 - np.clip(gap, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))),
        "rollout_corr/chi2_token": float(np.mean(ratio**2) - 1.0),
        "rollout_corr/ess": float(ratio.mean() ** 2 / np.mean(ratio**2)),
        "rollout_corr/tv": float(np.mean(np.abs(ratio - 1.0)) / 2),
        "rollout_corr/training_ppl": float(np.exp(-old_means).mean()),
        "rollout_corr/rollout_ppl": float(np.exp(-rollout_means).mean()),
        "rollout_corr/log_ppl_diff": float((rollout_means - old_means).mean()),
        "rollout_corr/log_ppl_abs_diff": float(np.abs(rollout_means - old_means).mean()),
        "rollout_corr/ppl_ratio": float(np.exp(rollout_means - old_means).mean()),
        "rollout_corr/chi2_seq": float(np.mean(bounded_exp(sums) ** 2) - 1.0),
    }


def mismatch_by_cause(pairs: Sequence[Pair], current: Masks) -> dict[str, float]:
    """Returns how far engine and learner differ, for each of two causes. A cause without tokens is left out.

    Tokens that the weights of pi_old sampled differ by `formats` alone: the engine's number formats, and other orders of sums. Those
    of older weights differ by `staleness` too.

    - k3_kl_CAUSE: KL(mu || pi_old) per token, by k3
    - extreme_CAUSE: share of tokens whose rho is not from 1 / EXTREME to EXTREME

    Args:
      pairs: as of `mismatch`.
      current: of the same tokens, whether the weights of pi_old sampled them.
    """
    gap = np.concatenate([old.astype(float) - rollout.astype(float) for old, rollout in pairs])
    mine, out = np.concatenate(list(current)), {}
    for cause, some in (("formats", gap[mine]), ("staleness", gap[~mine])):
        if some.size:
            safe = np.clip(some, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            out[f"rollout_corr/k3_kl_{cause}"] = float(np.mean(np.expm1(safe) - safe))
            out[f"rollout_corr/extreme_{cause}"] = float(np.mean(np.abs(some) > np.log(EXTREME)))
    return out


def _within(values: np.ndarray, low: float, high: float) -> np.ndarray:
    return (values >= low) & (values <= high)
