"""Losses of preference pairs, as what each rollout of a pair contributes: DPO and IPO. Host code, float64.

A pair is a group whose first rollout was chosen and whose second was rejected. Its loss is a function of two numbers, the
log-ratios of policy and reference. So its gradient is that of -A log pi, where A is minus the loss's slope at the policy of
the round's start. `Compared` holds that slope. It is exact for the first optimizer step of a round, and a round has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jaxrl_post.config import AlgorithmConfig
from jaxrl_post.types import Group

LOGPS = ("chosen", "rejected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A pair. `logps` f[2]: summed log-probs of both. `gaps` f[2]: policy minus reference. `slopes` f[2]: of the loss.

    `masks`: the tokens of each rollout, bool[T], whose log-probs are summed. Of a reward model (reward_model.py) the first
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


def describe(pairs: Sequence[Compared], beta: float) -> dict[str, float]:
    """Returns means over pairs under TRL's names. A reward is beta times a gap. `actor/preference_loss` is TRL's loss."""
    if not pairs:
        return {}
    rewards, logps = beta * np.array([pair.gaps for pair in pairs]), np.array([pair.logps for pair in pairs])
    margins = rewards[:, 0] - rewards[:, 1]
    return {
        **{f"rewards/{name}": float(rewards[:, i].mean()) for i, name in enumerate(LOGPS)},
        "rewards/accuracies": float((margins > 0).mean()),
        "rewards/margins": float(margins.mean()),
        **{f"logps/{name}": float(logps[:, i].mean()) for i, name in enumerate(LOGPS)},
        "actor/preference_loss": float(np.mean([pair.loss for pair in pairs])),
    }


def sigmoid_of(z: float) -> float:
    """Returns 1 / (1 + exp(-z)), without overflow."""
    return float(np.exp(-np.logaddexp(0, -z)))
