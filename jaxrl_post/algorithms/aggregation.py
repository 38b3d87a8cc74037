"""How token losses become one number: the weight of each token, and the count that divides the sum. Host code.

Every mode is sum(weight * loss) / count over the whole step. Each rollout has one weight and an integer count, and
counts add up over rollouts. Both depend only on how many tokens were sampled and scored. So they are known before any
clipping or rejection, however the step is packed, split or sharded. A rejected token lowers the sum, never the count.

Each function takes:
- lengths int[G] of one group: tokens of each rollout that are trained on, 0 for a masked rollout
- `max_tokens`: the longest rollout that the run allows

Each function returns weights float[G] and counts int[G].
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

Share = tuple[Float[np.ndarray, " G"], Int[np.ndarray, " G"]]


def token_mean(lengths: Int[np.ndarray, " G"], max_tokens: int) -> Share:
    """Weighs every token the same (DAPO, arXiv 2503.14476, equation 8)."""
    return np.ones(lengths.shape), lengths


def seq_mean_token_mean(lengths: Int[np.ndarray, " G"], max_tokens: int) -> Share:
    """Weighs every sequence the same, by the mean of its tokens (GRPO, arXiv 2402.03300, equation 3)."""
    return 1.0 / np.maximum(lengths, 1), _present(lengths)


def seq_mean_token_sum(lengths: Int[np.ndarray, " G"], max_tokens: int) -> Share:
    """Sums the tokens of a sequence and takes the mean over sequences (RLOO, arXiv 2402.14740).

    This is the policy gradient of whole rollouts.
    """
    return np.ones(lengths.shape), _present(lengths)


def seq_mean_token_sum_norm(lengths: Int[np.ndarray, " G"], max_tokens: int) -> Share:
    """Divides seq-mean-token-sum by `max_tokens`: no length bias (Dr. GRPO, arXiv 2503.20783, section 3.1).

    The divisor is one constant for all batches. verl takes loss_scale_factor, else the padded length of the current
    batch.
    """
    return np.full(lengths.shape, 1.0 / max_tokens), _present(lengths)


def prompt_mean(lengths: Int[np.ndarray, " G"], max_tokens: int) -> Share:
    """Weighs every prompt the same, by the mean over all its rollouts' tokens (ScaleRL, arXiv 2510.13786; as SkyRL)."""
    first = np.cumsum(lengths > 0) == 1
    return np.full(lengths.shape, 1.0 / max(int(lengths.sum()), 1)), _present(np.where(first, lengths, 0))


AGGREGATIONS = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
    "prompt-mean": prompt_mean,
}


def _present(lengths: np.ndarray) -> np.ndarray:
    return (lengths > 0).astype(lengths.dtype)
