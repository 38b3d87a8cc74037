"""Rules on single tokens of a round, by covariance, entropy or second moment, and what they do with its advantages.

Every rule ranks all trained tokens of the round at once. So the choice does not depend on how the round is packed, split or
sharded, and stays the same over its optimizer steps. Log-probs and entropies are the engine's, which cost no further pass.
Host code, float64.

Each argument of a rule is a list with one vector per rollout. `masks` are True at trained tokens. Each rule returns one bool
vector per rollout, False outside the masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float

from jaxrl_post.algorithms.advantages import Masks, Vectors
from jaxrl_post.config import AlgorithmConfig
from jaxrl_post.ring.types import Finish, Group, Rollout, RolloutId

Estimated = list[list[np.ndarray]]
ByRollout = Mapping[RolloutId, np.ndarray]
Chosen = list[Bool[np.ndarray, " _"]]


def ranks_tokens(algorithm: AlgorithmConfig) -> bool:
    """Returns whether some rule ranks all tokens of a round."""
    return algorithm.loss_mode in ("clip_cov", "kl_cov") or algorithm.top_entropy_quantile < 1


def with_scored(groups: Sequence[Group]) -> list[tuple[Rollout, bool]]:
    """Returns the rollouts of all groups in order, each with whether it is scored."""
    return [pair for group in groups for pair in zip(group.rollouts, group.scored, strict=True)]


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
    values = [value for made in estimated for value in made]
    if "held" in algorithm.marks:
        held = kl_cov(values, [r.logprobs for r in rollouts], masks, algorithm.kl_cov_ratio)
        for rollout, one in zip(rollouts, held, strict=True):
            out[rollout.id]["held"] = one.astype(float)
    each = iter(_kept(rollouts, values, masks, algorithm))
    return [[next(each) for _ in group.rollouts] for group in groups], out


def small_moment(groups: Sequence[Group], algorithm: AlgorithmConfig, old: Mapping[RolloutId, np.ndarray]) -> ByRollout:
    """Returns, by rollout id, which sampled tokens M2PO keeps. Empty where the config has another rejection."""
    if algorithm.rollout_rs != "m2po":
        return {}
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    masks = [mask for group in groups for mask in masks_of(group, algorithm.overlong_filtering)]
    gaps = [old[rollout.id].astype(float) - rollout.logprobs for rollout in rollouts]
    kept = second_moment(gaps, masks, algorithm.rollout_rs_threshold[-1])
    return {rollout.id: one[rollout.sampled] for rollout, one in zip(rollouts, kept, strict=True)}


def _kept(rollouts: Sequence[Rollout], values: Vectors, masks: Masks, algorithm: AlgorithmConfig) -> Vectors:
    """Returns advantages with 0 at tokens that Clip-Cov or the bound on entropies takes the gradient from."""
    if algorithm.top_entropy_quantile < 1:
        high = high_entropy([r.entropies for r in rollouts], masks, algorithm.top_entropy_quantile)
        values = [np.where(one, value, 0.0) for one, value in zip(high, values, strict=True)]
    if algorithm.loss_mode == "clip_cov":
        bounds = algorithm.clip_cov_lb, algorithm.clip_cov_ub
        # The seed of a round's random choice follows from its first rollout.
        seed = int.from_bytes(rollouts[0].id.seed().tobytes(), "little") if rollouts else 0
        chosen = clip_cov(values, [r.logprobs for r in rollouts], masks, algorithm.clip_cov_ratio, bounds, seed)
        values = [np.where(one, 0.0, value) for one, value in zip(chosen, values, strict=True)]
    return values


def clip_cov(
    advantages: Vectors, logprobs: Vectors, masks: Masks, ratio: float, bounds: tuple[float, float], seed: int
) -> Chosen:
    """Returns a random `ratio` of all tokens, among those whose covariance lies strictly between the bounds.

    The covariance of a token is (A - mean A) (log pi - mean log pi). At least one token is chosen where there is a candidate.
    The source is Clip-Cov (arXiv 2505.22617; as verl).

    `seed`: of the choice.
    """
    found = _covariances(advantages, logprobs, masks)
    candidates = np.flatnonzero((found > bounds[0]) & (found < bounds[1]))
    count = max(int(ratio * found.size), 1)
    return _spread(np.random.default_rng(seed).permutation(candidates)[:count], masks)


def kl_cov(advantages: Vectors, logprobs: Vectors, masks: Masks, ratio: float) -> Chosen:
    """Returns the `ratio` of all tokens with the largest covariances, at least one (KL-Cov, arXiv 2505.22617; as verl)."""
    found = _covariances(advantages, logprobs, masks)
    return _spread(np.argsort(-found, kind="stable")[: max(int(ratio * found.size), 1)], masks)


def high_entropy(entropies: Vectors, masks: Masks, share: float) -> Chosen:
    """Returns the tokens whose entropy is at least the (1 - share) quantile of all (arXiv 2506.01939; as TRL)."""
    joined = _joined(entropies, masks)
    if not joined.size:
        return _spread(np.arange(0), masks)
    return _spread(np.flatnonzero(joined >= np.quantile(joined, 1.0 - share)), masks)


def second_moment(log_ratios: Vectors, masks: Masks, bound: float) -> Chosen:
    """Returns as many tokens as have a mean squared log-ratio of at most `bound`, those with the smallest first.

    The source is M2PO (arXiv 2510.01161). As AReaL, which keeps one token where none fits.
    """
    squares = _joined(log_ratios, masks) ** 2
    order = np.argsort(squares, kind="stable")
    means = np.cumsum(squares[order]) / np.arange(1, squares.size + 1)
    return _spread(order[: int((means <= bound).sum())], masks)


def _covariances(advantages: Vectors, logprobs: Vectors, masks: Masks) -> Float[np.ndarray, " n"]:
    gains, logps = _joined(advantages, masks), _joined(logprobs, masks)
    return (gains - gains.mean()) * (logps - logps.mean()) if gains.size else gains


def _joined(values: Vectors, masks: Masks) -> Float[np.ndarray, " n"]:
    """Returns the masked tokens of all rollouts in one vector."""
    picked = [value[mask].astype(float) for value, mask in zip(values, masks, strict=True)]
    return np.concatenate(picked) if picked else np.zeros(0)


def _spread(places: np.ndarray, masks: Masks) -> Chosen:
    """Returns True at these places of the joined vector, cut into rollouts."""
    flat = np.concatenate(masks) if len(masks) else np.zeros(0, bool)
    out = np.zeros(flat.shape, bool)
    out[np.flatnonzero(flat)[places]] = True
    return np.split(out, np.cumsum([mask.size for mask in masks])[:-1]) if len(masks) else []
