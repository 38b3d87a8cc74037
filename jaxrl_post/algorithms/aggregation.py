"""How the losses of tokens become one number: what each token weighs, and what the sum is divided by. Host code.

Every mode is sum(weight * loss) / count over the whole step, with one weight per rollout and an integer count that adds
up over rollouts. Both depend only on how many tokens were sampled and scored: they are known before any clipping or
rejection, whoever packs, splits or shards the step, and a rejected token lowers the sum, never the count.

Each function takes lengths int[G] of one group (tokens of each rollout that are trained on, 0 for a masked one) and
`max_tokens`, the longest answer that the run allows; it returns weights float[G] and counts int[G].
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

Share = tuple[Float[np.ndarray, " G"], Int[np.ndarray, " G"]]


def token_mean(lengths: Int[np.ndarray, " G"], max_tokens: int) -> Share:
    """Every token weighs the same (DAPO, arXiv 2503.14476, equation 8)."""
    return np.ones(lengths.shape), lengths


def seq_mean_token_mean(lengths: Int[np.ndarray, " G"], max_tokens: int) -> Share:
    """Every sequence weighs the same, the mean of its tokens (GRPO, arXiv 2402.03300, equation 3)."""
    return 1.0 / np.maximum(lengths, 1), _present(lengths)


def seq_mean_token_sum(lengths: Int[np.ndarray, " G"], max_tokens: int) -> Share:
    """The sum of a sequence's tokens, the mean of the sequences: the policy gradient of whole answers (RLOO, arXiv
    2402.14740)."""
    return np.ones(lengths.shape), _present(lengths)


def seq_mean_token_sum_norm(lengths: Int[np.ndarray, " G"], max_tokens: int) -> Share:
    """As seq-mean-token-sum, divided by `max_tokens`: no length bias (Dr. GRPO, arXiv 2503.20783, section 3.1). One
    constant for all, where verl takes loss_scale_factor, else the padded length of the batch at hand."""
    return np.full(lengths.shape, 1.0 / max_tokens), _present(lengths)


def prompt_mean(lengths: Int[np.ndarray, " G"], max_tokens: int) -> Share:
    """Every prompt weighs the same, the mean over all tokens of its answers (ScaleRL, arXiv 2510.13786; as SkyRL)."""
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
