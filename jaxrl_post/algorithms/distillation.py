"""On-policy distillation as a part of the advantage: how much likelier a teacher finds each sampled token. Host code.

The gain of a token is log teacher - log pi_old, where pi_old sampled it. Its mean is minus the reverse KL of the policy
from the teacher. With it as the advantage, the policy gradient is that of the KL of every token's distribution
(arXiv 2306.13649). slime and Tinker have it so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_post.algorithms.token_credit import with_scored
from jaxrl_post.config import AlgorithmConfig
from jaxrl_post.ring.types import Group, RolloutId

LogProbs = Mapping[RolloutId, np.ndarray]
REVERSE_KL = "rollout/opd_reverse_kl"  # the metric, as in slime


def taught(
    estimated: Sequence[Sequence[np.ndarray]],
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    old: LogProbs,
    teacher: LogProbs,
) -> tuple[Sequence[Sequence[np.ndarray]], list[float]]:
    """Returns advantages float[T] plus the coefficient times the gains, and the reverse KL of every scored rollout.

    The gain of a rollout without a score is 0. Without a teacher the advantages stay, and there is no KL.

    `old`, `teacher`: log-probs over the rollout, by rollout id.
    """
    if not algorithm.teacher_coef:
        return estimated, []
    gained = {
        rollout.id: np.where(rollout.sampled & scored, teacher[rollout.id].astype(float) - old[rollout.id], 0.0)
        for rollout, scored in with_scored(groups)
    }
    return [
        [made + algorithm.teacher_coef * gained[r.id] for r, made in zip(group.rollouts, own, strict=True)]
        for group, own in zip(groups, estimated, strict=True)
    ], [-kl for kl in token_means(groups, gained)]


def token_means(groups: Sequence[Group], values: LogProbs) -> list[float]:
    """Returns, for every scored rollout, the mean over its sampled tokens."""
    return [float(values[r.id][r.sampled].mean()) for r, scored in with_scored(groups) if scored and r.sampled.any()]
