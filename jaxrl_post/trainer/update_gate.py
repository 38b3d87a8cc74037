"""The gate that decides whether a batch may change the weights. It closes when tokens come from a too distant policy.

A batch below the least effective sample size, or above the KL budget, is skipped. Then every batch is skipped until
one arrives whose tokens are all from the weights in use. This is the safety valve of PipelineRL's first version (arXiv
2509.19128). A skipped batch counts as an optimizer step without an update. So versions still advance, and the bound on
staleness holds.

Invariant: a decision depends on log-probs and versions alone, so every process of a job decides the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_post.algorithms import correction


class Gate:
    """Decides by two bounds; 0 means no bound.

    - min_ess: least effective sample size, as a share of the tokens
    - max_kl: most nats per token, by k3 of KL(mu || pi_old)
    """

    def __init__(self, min_ess: float = 0.0, max_kl: float = 0.0):
        self._min_ess, self._max_kl = min_ess, max_kl
        self._closed, self._moved = False, 0

    @property
    def watches(self) -> bool:
        return self._min_ess > 0 or self._max_kl > 0

    def lets(self, pairs: Sequence[correction.Pair], versions: Sequence[np.ndarray], step: int) -> bool:
        """Returns whether the batch may change the weights. If so, they are new from version step + 1 on.

        Args:
          pairs: (old, rollout) log-probs of the sampled tokens of each rollout.
          versions: of the same tokens.
          step: optimizer steps so far.
        """
        if not self.watches:
            return True
        fresh = all(mine.min() >= self._moved for mine in versions if mine.size)
        far = False
        if pairs:
            found = correction.mismatch(pairs)
            far = found["rollout_corr/ess"] < self._min_ess or 0 < self._max_kl < found["rollout_corr/k3_kl"]
        self._closed = not fresh and (self._closed or far)
        if not self._closed:
            self._moved = step + 1
        return not self._closed

    def state_dict(self) -> dict:
        return {"closed": self._closed, "moved": self._moved}

    def load_state_dict(self, state: Mapping) -> None:
        self._closed, self._moved = state["closed"], state["moved"]
