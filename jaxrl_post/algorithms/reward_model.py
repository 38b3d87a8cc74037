"""The loss of a reward model on a pair: Bradley-Terry. Host code, float64.

A pair is a group whose first rollout was chosen and whose second was rejected. The reward of a rollout is what the model's
head gives its last token. Like the losses of preferences.py, this loss enters training by its slope at the round's start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jaxrl_post.algorithms.preferences import Compared, sigmoid_of
from jaxrl_post.config import AlgorithmConfig
from jaxrl_post.types import Group

MARGIN = "margin"  # the column that says by how much the chosen completion must be better, as in TRL


def bradley_terry(
    rewards: Float[np.ndarray, " pair"], margin: float, center: float
) -> tuple[float, Float[np.ndarray, " pair"]]:
    """Returns -log sigmoid(r0 - r1 - margin) + center (r0 + r1)^2, and its slope by each reward.

    Sources are InstructGPT (arXiv 2203.02155, equation 1), for the margin Llama 2 (arXiv 2307.09288, equation 2), and for
    `center` arXiv 2312.09244. As TRL's RewardTrainer.
    """
    z, total = rewards[0] - rewards[1] - margin, rewards[0] + rewards[1]
    slope = -sigmoid_of(-z)
    return float(np.logaddexp(0, -z) + center * total**2), np.array([slope, -slope]) + 2 * center * total


def compare(group: Group, algorithm: AlgorithmConfig, scores: Sequence[np.ndarray]) -> Compared:
    """Returns a pair whose rollouts have these rewards at their tokens, float[T] each."""
    masks = [np.arange(len(rollout)) == len(rollout) - 1 for rollout in group.rollouts]
    rewards = np.array([values[mask].sum(dtype=float) for values, mask in zip(scores, masks, strict=True)])
    margin = float(group.prompt.extra.get(MARGIN) or 0.0)
    loss, slopes = bradley_terry(rewards, margin, algorithm.center_rewards_coefficient)
    return Compared(logps=rewards, gaps=rewards, loss=loss, slopes=slopes, masks=masks)


def describe(pairs: Sequence[Compared]) -> dict[str, float]:
    """Returns statistics over pairs under the names of TRL's RewardTrainer, below rewards/. A margin is r0 - r1."""
    if not pairs:
        return {}
    rewards = np.array([pair.gaps for pair in pairs])
    margins = rewards[:, 0] - rewards[:, 1]
    return {
        "rewards/accuracy": float((margins > 0).mean()),
        "rewards/margin": float(margins.mean()),
        "rewards/mean_reward": float(rewards.mean()),
        "rewards/min_reward": float(rewards.min()),
        "rewards/max_reward": float(rewards.max()),
        "actor/preference_loss": float(np.mean([pair.loss for pair in pairs])),
    }
