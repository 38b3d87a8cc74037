"""What rules of token_selection.py do with the advantages of a round. Host code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_post.algorithms import token_selection
from jaxrl_post.config import AlgorithmConfig
from jaxrl_post.types import Finish, Group, Rollout, RolloutId

Estimated = list[list[np.ndarray]]
ByRollout = Mapping[RolloutId, np.ndarray]


def ranks_tokens(algorithm: AlgorithmConfig) -> bool:
    """Returns whether some rule ranks all tokens of a round."""
    return algorithm.loss_mode in ("clip_cov", "kl_cov") or algorithm.top_entropy_quantile < 1


def in_loss(group: Group, filtering: bool) -> np.ndarray:
    """Returns whether each rollout is in the loss: scored, and with `filtering` not cut at its limit."""
    return group.scored & np.array([not (filtering and r.finish is Finish.LENGTH) for r in group.rollouts])


def masks_of(group: Group, filtering: bool) -> list[np.ndarray]:
    """Returns bool[T] for each rollout: the tokens that are trained on."""
    return [r.sampled & kept for r, kept in zip(group.rollouts, in_loss(group, filtering), strict=True)]


def marked(
    groups: Sequence[Group], estimated: Estimated, algorithm: AlgorithmConfig, corrected: ByRollout
) -> tuple[Estimated, dict[RolloutId, dict[str, np.ndarray | float]]]:
    """Returns the advantages that rules on single tokens leave, and the marks of every rollout.

    Tokens that are rejected, whose correction is 0, are not ranked (as verl).
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    out: dict[RolloutId, dict[str, np.ndarray | float]] = {rollout.id: {} for rollout in rollouts}
    if "positives" in algorithm.marks:
        for group in groups:
            for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
                out[rollout.id]["positives"] = float(reward > 0)
    if not ranks_tokens(algorithm):
        return estimated, out
    trained = [mask for group in groups for mask in masks_of(group, algorithm.overlong_filtering)]
    weights = [corrected.get(rollout.id, np.ones(rollout.sampled.shape)) for rollout in rollouts]
    masks = [mask & (weight > 0) for mask, weight in zip(trained, weights, strict=True)]
    if "held" in algorithm.marks:
        for rollout, one in zip(rollouts, _held(groups, estimated, masks, algorithm), strict=True):
            out[rollout.id]["held"] = one.astype(float)
    return _kept(groups, estimated, masks, algorithm), out


def small_moment(groups: Sequence[Group], algorithm: AlgorithmConfig, old: Mapping[RolloutId, np.ndarray]) -> ByRollout:
    """Returns, by rollout id, which sampled tokens M2PO keeps. Empty where the config has another rejection."""
    if algorithm.rollout_rs != "m2po":
        return {}
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    masks = [mask for group in groups for mask in masks_of(group, algorithm.overlong_filtering)]
    gaps = [old[rollout.id].astype(float) - rollout.logprobs for rollout in rollouts]
    kept = token_selection.second_moment(gaps, masks, algorithm.rollout_rs_threshold[-1])
    return {rollout.id: one[rollout.sampled] for rollout, one in zip(rollouts, kept, strict=True)}


def _kept(
    groups: Sequence[Group], estimated: Estimated, masks: Sequence[np.ndarray], algorithm: AlgorithmConfig
) -> Estimated:
    """Returns the advantages with 0 at tokens that Clip-Cov or the bound on entropies takes the gradient from.

    Args:
      estimated: float[T] per group and rollout.
      masks: the trained tokens of every rollout of all groups, in order.
    """
    rollouts, values = _flat(groups, estimated)
    if algorithm.top_entropy_quantile < 1:
        high = token_selection.high_entropy([r.entropies for r in rollouts], masks, algorithm.top_entropy_quantile)
        values = [np.where(one, value, 0.0) for one, value in zip(high, values, strict=True)]
    if algorithm.loss_mode == "clip_cov":
        bounds = algorithm.clip_cov_lb, algorithm.clip_cov_ub
        logps, seed = [r.logprobs for r in rollouts], _seed(rollouts)
        chosen = token_selection.clip_cov(values, logps, masks, algorithm.clip_cov_ratio, bounds, seed)
        values = [np.where(one, 0.0, value) for one, value in zip(chosen, values, strict=True)]
    each = iter(values)
    return [[next(each) for _ in group.rollouts] for group in groups]


def _held(
    groups: Sequence[Group], estimated: Estimated, masks: Sequence[np.ndarray], algorithm: AlgorithmConfig
) -> list[np.ndarray]:
    """Returns, for every rollout of all groups in order, bool[T]: the tokens that KL-Cov holds at the old policy."""
    rollouts, values = _flat(groups, estimated)
    return token_selection.kl_cov(values, [r.logprobs for r in rollouts], masks, algorithm.kl_cov_ratio)


def _flat(groups: Sequence[Group], estimated: Estimated) -> tuple[list[Rollout], list[np.ndarray]]:
    return [r for group in groups for r in group.rollouts], [value for made in estimated for value in made]


def _seed(rollouts: Sequence[Rollout]) -> int:
    """Returns the seed of a round's random choice, which follows from its first rollout."""
    return int.from_bytes(rollouts[0].id.seed().tobytes(), "little") if rollouts else 0
