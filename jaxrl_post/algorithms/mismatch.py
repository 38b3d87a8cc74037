"""How far the engine's log-probs are from the learner's on the same tokens. Host code: numpy in, floats out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

LOG_RATIO_BOUND = 20.0  # log-ratios are clamped to +-20 before exp, as verl does

Pair = tuple[Float[np.ndarray, " _"], Float[np.ndarray, " _"]]


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
    } | _of_answers(pairs)


def bounded_exp(log_ratio: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    """Returns exp of log-ratios clamped to +-20."""
    return np.exp(np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def _of_answers(pairs: Sequence[Pair]) -> dict[str, float]:
    old, rollout = (np.array([side.astype(float).mean() for side in sides]) for sides in zip(*pairs, strict=True))
    sums = np.array([(a.astype(float) - b.astype(float)).sum() for a, b in pairs])
    return {
        "rollout_corr/training_ppl": float(np.exp(-old).mean()),
        "rollout_corr/rollout_ppl": float(np.exp(-rollout).mean()),
        "rollout_corr/log_ppl_diff": float((rollout - old).mean()),
        "rollout_corr/log_ppl_abs_diff": float(np.abs(rollout - old).mean()),
        "rollout_corr/ppl_ratio": float(np.exp(rollout - old).mean()),
        "rollout_corr/chi2_seq": float(np.mean(bounded_exp(sums) ** 2) - 1.0),
    }
