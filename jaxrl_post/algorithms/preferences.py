"""Losses of preference pairs, as what each rollout of a pair contributes: DPO, IPO, and Bradley-Terry of a reward model.

A pair is a group whose first rollout was chosen and whose second was rejected. Its loss is a function of two numbers, the
log-ratios of policy and reference. So its gradient is that of -A log pi, where A is minus the loss's slope at the policy of
the round's start. `Compared` holds that slope. It is exact for the first optimizer step of a round, and a round has one. The reward
of a rollout under a reward model is what the model's head gives its last token. Host code, float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jaxrl_post.config import AlgorithmConfig
from jaxrl_post.ring.types import Group, RolloutId

LOGPS = ("chosen", "rejected")
MARGIN = "margin"  # the column that says by how much the chosen completion must be better, as in TRL


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A pair. `logps` f[2]: summed log-probs of both. `gaps` f[2]: policy minus reference. `slopes` f[2]: of the loss.

    `masks`: the tokens of each rollout, bool[T], whose log-probs are summed. Of a reward model the first
    two are rewards, and the masks are set at the last token.
    """

    logps: np.ndarray
    gaps: np.ndarray
    loss: float
    slopes: np.ndarray
    masks: Sequence[np.ndarray]


def sigmoid(
    gaps: Float[np.ndarray, " pair"], lengths: Float[np.ndarray, " pair"], beta: float, smoothing: float
) -> tuple[float, Float[np.ndarray, " pair"]]:
    """Returns -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), h = gaps[0] - gaps[1], and its slope by each gap.

    Sources are DPO (arXiv 2305.18290, equation 7), and for the smoothing s its conservative form (as TRL until 2025).
    """
    z = beta * (gaps[0] - gaps[1])
    loss = (1 - smoothing) * np.logaddexp(0, -z) + smoothing * np.logaddexp(0, z)
    slope = beta * (smoothing * sigmoid_of(z) - (1 - smoothing) * sigmoid_of(-z))
    return float(loss), np.array([slope, -slope])


def ipo(
    gaps: Float[np.ndarray, " pair"], lengths: Float[np.ndarray, " pair"], beta: float, smoothing: float
) -> tuple[float, Float[np.ndarray, " pair"]]:
    """Returns (h - 1 / (2 beta))^2 and its slope by each gap (IPO, arXiv 2310.12036, equation 17).

    h is the difference of the gaps per token, as TRL has it. Nothing is smoothed.
    """
    off = gaps[0] / lengths[0] - gaps[1] / lengths[1] - 1 / (2 * beta)
    return float(off**2), 2 * off / lengths * [1, -1]


PREFERENCES = {"dpo": sigmoid, "ipo": ipo}


def compare(
    group: Group, algorithm: AlgorithmConfig, old: Sequence[np.ndarray], reference: Sequence[np.ndarray]
) -> Compared:
    """Returns a pair whose rollouts have these log-probs, float[T] each, under policy and reference."""
    masks = [rollout.sampled for rollout in group.rollouts]
    logps, known = (
        np.array([values[mask].sum(dtype=float) for values, mask in zip(side, masks, strict=True)])
        for side in (old, reference)
    )
    lengths = np.maximum([float(mask.sum()) for mask in masks], 1.0)
    loss, slopes = PREFERENCES[algorithm.loss_mode](
        logps - known, lengths, algorithm.dpo_beta, algorithm.label_smoothing
    )
    return Compared(logps=logps, gaps=logps - known, loss=loss, slopes=slopes, masks=masks)


def compared(
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    old: Mapping[RolloutId, np.ndarray],
    reference: Mapping[RolloutId, np.ndarray],
) -> list[Compared]:
    """Returns the comparison of every pair. `old`, `reference`: log-probs by rollout id; of a reward model, rewards and nothing."""
    if algorithm.trains_reward_model:
        return [compare_rewards(group, algorithm, [old[r.id] for r in group.rollouts]) for group in groups]
    sides = [[[logps[r.id] for r in group.rollouts] for logps in (old, reference)] for group in groups]
    return [compare(group, algorithm, *side) for group, side in zip(groups, sides, strict=True)]


def describe(pairs: Sequence[Compared], algorithm: AlgorithmConfig) -> dict[str, float]:
    """Returns means over one pair or more. `actor/preference_loss` is TRL's loss.

    Names are TRL's: of a reward model those of its RewardTrainer, below rewards/, and a margin is r0 - r1. Else a reward is
    beta times a gap.
    """
    gaps, logps = (np.array([getattr(pair, name) for pair in pairs]) for name in ("gaps", "logps"))
    rewards = gaps if algorithm.trains_reward_model else algorithm.dpo_beta * gaps
    margins = rewards[:, 0] - rewards[:, 1]
    loss = {"actor/preference_loss": float(np.mean([pair.loss for pair in pairs]))}
    if algorithm.trains_reward_model:
        return {
            "rewards/accuracy": float((margins > 0).mean()),
            "rewards/margin": float(margins.mean()),
            "rewards/mean_reward": float(rewards.mean()),
            "rewards/min_reward": float(rewards.min()),
            "rewards/max_reward": float(rewards.max()),
            **loss,
        }
    return {
        **{f"rewards/{name}": float(rewards[:, i].mean()) for i, name in enumerate(LOGPS)},
        "rewards/accuracies": float((margins > 0).mean()),
        "rewards/margins": float(margins.mean()),
        **{f"logps/{name}": float(logps[:, i].mean()) for i, name in enumerate(LOGPS)},
        **loss,
    }


def sigmoid_of(z: float) -> float:
    """Returns 1 / (1 + exp(-z)), without overflow."""
    return float(np.exp(-np.logaddexp(0, -z)))


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


def compare_rewards(group: Group, algorithm: AlgorithmConfig, scores: Sequence[np.ndarray]) -> Compared:
    """Returns a pair whose rollouts have these rewards at their tokens, float[T] each."""
    masks = [np.arange(len(rollout)) == len(rollout) - 1 for rollout in group.rollouts]
    rewards = np.array([values[mask].sum(dtype=float) for values, mask in zip(scores, masks, strict=True)])
    margin = float(group.prompt.extra.get(MARGIN) or 0.0)
    loss, slopes = bradley_terry(rewards, margin, algorithm.center_rewards_coefficient)
    return Compared(logps=rewards, gaps=rewards, loss=loss, slopes=slopes, masks=masks)
