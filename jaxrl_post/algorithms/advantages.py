"""From rewards to advantages. Host code: numpy in, numpy out, float64 inside.

Two kinds, in two dicts. ADVANTAGES: functions of one group, one advantage per rollout. WHOLE_ROUND: functions of all
rollouts of a round at once, one advantage per token, for what is whitened over the batch; they cannot be used where
groups are trained on as they come. Invariant: an unscored rollout is left out of every statistic and gets 0. What is
refused: rewards that are not finite. PARITY.md says whose convention each follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

EPSILON = 1e-6  # added to the standard deviation, as verl does (TRL 1e-4, OpenRLHF 1e-9)
VARIANCE_EPSILON = 1e-8  # added to the variance when whitening, as verl does


def grpo(
    rewards: Float[np.ndarray, " G"], scored: Bool[np.ndarray, " G"], lengths: Int[np.ndarray, " G"]
) -> Float[np.ndarray, " G"]:
    """(R_i - mean) / (std + 1e-6), std with n-1 (arXiv 2402.03300, section 4.1.2; constants as verl).

    A group with fewer than two scored rollouts has nothing to compare and gets 0 (verl hands on the raw reward there).
    """
    values = _scored(rewards, scored)
    if values.size < 2:
        return np.zeros(rewards.shape)
    return np.where(scored, (rewards.astype(float) - values.mean()) / (values.std(ddof=1) + EPSILON), 0.0)


def dr_grpo(
    rewards: Float[np.ndarray, " G"], scored: Bool[np.ndarray, " G"], lengths: Int[np.ndarray, " G"]
) -> Float[np.ndarray, " G"]:
    """R_i - mean (arXiv 2503.20783, section 3.1): no division, so that easy and hard prompts weigh the same."""
    values = _scored(rewards, scored)
    if values.size < 2:
        return np.zeros(rewards.shape)
    return np.where(scored, rewards.astype(float) - values.mean(), 0.0)


def rloo(
    rewards: Float[np.ndarray, " G"], scored: Bool[np.ndarray, " G"], lengths: Int[np.ndarray, " G"]
) -> Float[np.ndarray, " G"]:
    """R_i - mean of the others = n/(n-1) (R_i - mean) over the n scored (arXiv 2402.14740)."""
    n = int(scored.sum())
    return dr_grpo(rewards, scored, lengths) * (n / (n - 1) if n > 1 else 0.0)


def opo(
    rewards: Float[np.ndarray, " G"], scored: Bool[np.ndarray, " G"], lengths: Int[np.ndarray, " G"]
) -> Float[np.ndarray, " G"]:
    """R_i - sum(T_j R_j) / sum(T_j): the baseline weighs answers by their sampled tokens (OPO, arXiv
    2505.23585; as verl).

    Fewer than two scored rollouts give 0.
    """
    values = _scored(rewards, scored)
    if values.size < 2:
        return np.zeros(rewards.shape)
    baseline = np.sum(values * lengths[scored]) / max(int(lengths[scored].sum()), 1)
    return np.where(scored, rewards.astype(float) - baseline, 0.0)


def maxrl(
    rewards: Float[np.ndarray, " G"], scored: Bool[np.ndarray, " G"], lengths: Int[np.ndarray, " G"]
) -> Float[np.ndarray, " G"]:
    """(R_i - mean) / (mean + 1e-6): the rarer success, the more it weighs (arXiv 2602.02710; constants as SkyRL).

    The mean stands for the rate of success, so a negative reward is a ValueError. A group without any success gets 0.
    """
    values = _scored(rewards, scored)
    if np.any(values < 0):
        raise ValueError(
            f"algorithm.adv_estimator='maxrl' divides by the rate of success and needs rewards of at "
            f"least 0, got {values.min()}; the nearest estimator without that need is 'grpo'"
        )
    return dr_grpo(rewards, scored, lengths) / (values.mean() + EPSILON if values.size else 1.0)


def ones(
    rewards: Float[np.ndarray, " G"], scored: Bool[np.ndarray, " G"], lengths: Int[np.ndarray, " G"]
) -> Float[np.ndarray, " G"]:
    """1 for every scored rollout: supervised training, where every demonstration counts alike."""
    _scored(rewards, scored)
    return scored.astype(float)


ADVANTAGES = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "opo": opo, "maxrl": maxrl, "ones": ones}


def reinforce_plus_plus(
    rewards: Sequence[Float[np.ndarray, " _"]],
    masks: Sequence[Bool[np.ndarray, " _"]],
    groups: Int[np.ndarray, " n"],
    gamma: float,
) -> list[Float[np.ndarray, " _"]]:
    """whiten(G_t), G_t = r_t + gamma G_{t+1}, over all masked tokens of the round (REINFORCE++, arXiv
    2501.03262; as verl).

    Tokens outside the mask (observed, not sampled) hand the return on undiscounted; verl sets it to 0 there.

    Args:
      rewards, masks: one vector per rollout; the mask is empty where the rollout is unscored. groups: whose rollout it
      is.
    """
    return whiten([_returns(reward, mask, gamma) for reward, mask in zip(rewards, masks, strict=True)], masks)


def reinforce_plus_plus_baseline(
    rewards: Sequence[Float[np.ndarray, " _"]],
    masks: Sequence[Bool[np.ndarray, " _"]],
    groups: Int[np.ndarray, " n"],
    gamma: float,
) -> list[Float[np.ndarray, " _"]]:
    """whiten(R_i - mean of its group), R_i the sum of its rewards, over all masked tokens of the round (arXiv
    2501.03262; as verl). gamma is not read. A group with one scored rollout has the mean of that one, 0
    left (verl takes a mean of 0 there)."""
    live = np.array([bool(mask.any()) for mask in masks])
    sums = np.array([_finite(reward, mask).sum() for reward, mask in zip(rewards, masks, strict=True)])
    centred = np.zeros(len(masks))
    for group in np.unique(groups[live]):
        members = live & (groups == group)
        centred[members] = sums[members] - sums[members].mean()
    return whiten([np.full(mask.shape, value) for value, mask in zip(centred, masks, strict=True)], masks)


WHOLE_ROUND = {"reinforce_plus_plus": reinforce_plus_plus, "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline}


def whiten(
    values: Sequence[Float[np.ndarray, " _"]], masks: Sequence[Bool[np.ndarray, " _"]]
) -> list[Float[np.ndarray, " _"]]:
    """(x - mean) / sqrt(var + 1e-8) over every masked token of all vectors, var with n-1 (as verl); 0 outside the mask,
    and everywhere where fewer than two tokens are masked."""
    seen = np.concatenate([value[mask] for value, mask in zip(values, masks, strict=True)] or [np.zeros(0)])
    if seen.size < 2:
        return [np.zeros(mask.shape) for mask in masks]
    scale = 1.0 / np.sqrt(seen.var(ddof=1) + VARIANCE_EPSILON)
    return [np.where(mask, (value - seen.mean()) * scale, 0.0) for value, mask in zip(values, masks, strict=True)]


def _returns(rewards: np.ndarray, mask: np.ndarray, gamma: float) -> np.ndarray:
    values, after = _finite(rewards, mask), 0.0
    out = np.zeros(mask.shape)
    for t in reversed(range(mask.size)):
        if mask[t]:
            after = values[t] + gamma * after
        out[t] = after
    return out


def _finite(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The rewards, 0 outside the mask."""
    return np.where(mask, _refused_unless_finite(np.where(mask, rewards.astype(float), 0.0)), 0.0)


def _scored(rewards: np.ndarray, scored: np.ndarray) -> np.ndarray:
    return _refused_unless_finite(rewards[scored].astype(float))


def _refused_unless_finite(values: np.ndarray) -> np.ndarray:
    if not np.all(np.isfinite(values)):
        raise ValueError(
            f"advantages: scored rewards must be finite, got {values.tolist()}; leave such a rollout unscored"
        )
    return values
