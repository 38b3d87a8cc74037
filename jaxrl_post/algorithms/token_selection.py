"""Which tokens of a round a rule picks: by covariance, entropy or second moment. Host code, float64.

Every rule ranks all trained tokens of the round at once. So the choice does not depend on how the round is packed, split or
sharded, and stays the same over its optimizer steps. Log-probs and entropies are the engine's, which cost no further pass.

Each argument is a list with one vector per rollout. `masks` are True at trained tokens. Each rule returns one bool vector
per rollout, False outside the masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

Vectors = Sequence[Float[np.ndarray, " _"]]
Masks = Sequence[Bool[np.ndarray, " _"]]
Chosen = list[Bool[np.ndarray, " _"]]


def clip_cov(
    advantages: Vectors, logprobs: Vectors, masks: Masks, ratio: float, bounds: tuple[float, float], seed: int
) -> Chosen:
    """Returns a random `ratio` of all tokens, among those whose covariance lies strictly between the bounds.

    The covariance of a token is (A - mean A) (log pi - mean log pi). At least one token is chosen where there is a candidate.
    The source is Clip-Cov (arXiv 2505.22617; as verl).

    Args:
      seed: of the choice.
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
