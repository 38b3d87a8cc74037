"""On-policy distillation as a part of the advantage: how much likelier a teacher finds each sampled token. Host code.

The gain of a token is log teacher - log pi_old, where pi_old sampled it. Its mean is minus the reverse KL of the policy from
the teacher. With it as the advantage, the policy gradient is that of the KL of every token's law (arXiv 2306.13649). slime and
Tinker have it so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from jaxrl_post.config import AlgorithmConfig
from jaxrl_post.types import Group, RolloutId

LogProbs = Mapping[RolloutId, np.ndarray]
REVERSE_KL = "rollout/opd_reverse_kl"  # the metric, as in slime


def gains(
    groups: Sequence[Group], algorithm: AlgorithmConfig, old: LogProbs, teacher: LogProbs
) -> dict[RolloutId, Float[np.ndarray, " T"]]:
    """Returns log teacher - log old of each sampled token of a scored rollout, 0 elsewhere. Empty without a teacher.

    Args:
      old, teacher: log-probs over the rollout, by rollout id.
    """
    if not algorithm.teacher_coef:
        return {}
    return {
        rollout.id: np.where(rollout.sampled & scored, teacher[rollout.id].astype(float) - old[rollout.id], 0.0)
        for group in groups
        for rollout, scored in zip(group.rollouts, group.scored, strict=True)
    }


def taught(
    estimated: Sequence[Sequence[np.ndarray]],
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    old: LogProbs,
    teacher: LogProbs,
) -> tuple[Sequence[Sequence[np.ndarray]], list[float]]:
    """Returns advantages float[T] plus the coefficient times the gains, and the reverse KL of every scored rollout.

    Without a teacher the advantages stay, and there is no KL.
    """
    gained = gains(groups, algorithm, old, teacher)
    if not gained:
        return estimated, []
    return [
        [made + algorithm.teacher_coef * gained[r.id] for r, made in zip(group.rollouts, own, strict=True)]
        for group, own in zip(groups, estimated, strict=True)
    ], reverse_kls(groups, gained)


def reverse_kls(groups: Sequence[Group], gained: Mapping[RolloutId, np.ndarray]) -> list[float]:
    """Returns the estimate of the reverse KL, nats per token, of every scored rollout."""
    return [
        -float(gained[r.id][r.sampled].mean())
        for group in groups
        for r, scored in zip(group.rollouts, group.scored, strict=True)
        if scored and r.sampled.any()
    ]


def describe(found: Sequence[float]) -> dict[str, float]:
    """Returns the mean of the rollouts' reverse KLs."""
    return {REVERSE_KL: float(np.mean(found))} if found else {}
