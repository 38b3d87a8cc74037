"""Whether a batch may move the weights: a gate that falls when tokens come from a policy too far from the learner's.

Below an effective sample size, or above a KL budget, a batch is left out, and so is every other one until one comes whose
tokens are all of the weights in use (the safety valve of PipelineRL's first version, arXiv 2509.19128). A batch that is left out
counts as an optimizer step that moves nothing, so versions go on and staleness stays bounded as it was.

Invariant: a decision follows from log-probs and versions alone, so every process of a job decides alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_post.algorithms import mismatch


class Gate:
    """`min_ess`: least share of the tokens that would do on-policy; `max_kl`: nats a token, by k3 of KL(mu || pi_old). 0: no
    bound."""

    def __init__(self, min_ess: float = 0.0, max_kl: float = 0.0):
        self._min_ess, self._max_kl = min_ess, max_kl
        self._closed, self._moved = False, 0

    @property
    def watches(self) -> bool:
        """Whether it ever falls."""
        return self._min_ess > 0 or self._max_kl > 0

    def lets(self, pairs: Sequence[mismatch.Pair], versions: Sequence[np.ndarray], step: int) -> bool:
        """Whether the batch may move the weights, which are then new from version step + 1 on.

        Args:
          pairs: (old, rollout) log-probs of the sampled tokens of each answer; versions: of those tokens.
          step: optimizer steps so far.
        """
        if not self.watches:
            return True
        fresh = all(mine.min() >= self._moved for mine in versions if mine.size)
        far = bool(pairs) and self._far(pairs)
        self._closed = not fresh and (self._closed or far)
        if not self._closed:
            self._moved = step + 1
        return not self._closed

    def _far(self, pairs: Sequence[mismatch.Pair]) -> bool:
        found = mismatch.mismatch(pairs)
        return found["rollout_corr/ess"] < self._min_ess or 0 < self._max_kl < found["rollout_corr/k3_kl"]

    def state_dict(self) -> dict:
        return {"closed": self._closed, "moved": self._moved}

    def load_state_dict(self, state: Mapping) -> None:
        self._closed, self._moved = state["closed"], state["moved"]
