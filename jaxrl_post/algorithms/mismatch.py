"""How far the engine's log-probs are from the learner's on the same tokens. Host code: numpy in, floats out."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float


def mismatch(old_logprobs: Float[np.ndarray, " n"], rollout_logprobs: Float[np.ndarray, " n"]) -> dict[str, float]:
    """Metrics over n >= 1 sampled tokens, under verl's names where verl has one.

    rollout_corr/kl is the mean of log mu - log pi_old (k1 of KL(mu || pi_old), mu the engine), k3_kl its k3
    (joschu.net/blog/kl-approx.html); probabilities differ by |exp - exp|, log-probs in nats.
    """
    old, rollout = old_logprobs.astype(float), rollout_logprobs.astype(float)
    probs, gap = np.abs(np.exp(old) - np.exp(rollout)), old - rollout
    return {
        "training/rollout_probs_diff_mean": float(probs.mean()),
        "training/rollout_probs_diff_max": float(probs.max()),
        "training/rollout_probs_diff_std": float(probs.std(ddof=1)) if probs.size > 1 else 0.0,
        "training/rollout_logprobs_abs_diff_mean": float(np.abs(gap).mean()),
        "training/rollout_logprobs_abs_diff_max": float(np.abs(gap).max()),
        "rollout_corr/kl": float(-gap.mean()),
        "rollout_corr/k3_kl": float(np.mean(np.exp(np.clip(gap, -20, 20)) - 1.0 - np.clip(gap, -20, 20))),
    }
