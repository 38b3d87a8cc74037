"""From the rewards of one group to one advantage per rollout. Host code: numpy in, numpy out, float64 inside.

Invariant: an unscored rollout is left out of every baseline and gets 0. What it refuses: rewards that are not finite.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

EPSILON = 1e-6  # added to the standard deviation, as verl does (TRL 1e-4, OpenRLHF 1e-9)


def grpo(rewards: Float[np.ndarray, " G"], scored: Bool[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """(R_i - mean) / (std + 1e-6), std with n-1 (arXiv 2402.03300, section 4.1.2; constants as verl).

    A group with fewer than two scored rollouts has nothing to compare and gets 0 (verl hands on the raw reward there).
    """
    values = _scored(rewards, scored)
    if values.size < 2:
        return np.zeros(rewards.shape)
    return np.where(scored, (rewards.astype(float) - values.mean()) / (values.std(ddof=1) + EPSILON), 0.0)


def dr_grpo(rewards: Float[np.ndarray, " G"], scored: Bool[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """R_i - mean (arXiv 2503.20783, section 3.1): no division, so that easy and hard prompts weigh the same."""
    values = _scored(rewards, scored)
    if values.size < 2:
        return np.zeros(rewards.shape)
    return np.where(scored, rewards.astype(float) - values.mean(), 0.0)


def rloo(rewards: Float[np.ndarray, " G"], scored: Bool[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """R_i - mean of the others = n/(n-1) (R_i - mean) over the n scored (arXiv 2402.14740)."""
    n = int(scored.sum())
    return dr_grpo(rewards, scored) * (n / (n - 1) if n > 1 else 0.0)


def ones(rewards: Float[np.ndarray, " G"], scored: Bool[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """1 for every scored rollout: supervised training, where every demonstration counts alike."""
    _scored(rewards, scored)
    return scored.astype(float)


ADVANTAGES = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "ones": ones}


def _scored(rewards: np.ndarray, scored: np.ndarray) -> np.ndarray:
    values = rewards[scored].astype(float)
    if not np.all(np.isfinite(values)):
        raise ValueError(f"advantages: scored rewards must be finite, got {values.tolist()}; leave such a "
                         f"rollout unscored")
    return values
