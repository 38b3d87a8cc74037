"""RAE: the baseline of a rollout is a running mean of the rewards of its role. Host code.

A role is the source of a prompt, for example one side of a game. In self-play the mean of a group says nothing, because
what one side wins the other loses. Each role has its own mean instead.

Invariant: rollouts count in the order of groups and samples, so all processes and a resumed run have the same means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float

from jaxrl_post.algorithms.advantages import finite


class RoleBaseline:
    """Holds one mean for each role. Each begins at 0.

    `decay`: what a mean keeps of itself when a reward arrives.
    """

    def __init__(self, decay: float):
        self._decay = decay
        self.of: dict[str, float] = {}

    def estimate(
        self, rewards: Sequence[Float[np.ndarray, " _"]], masks: Sequence[Bool[np.ndarray, " _"]], role: str
    ) -> list[Float[np.ndarray, " _"]]:
        """Returns R_i - b of the role, at every token of the mask, and moves b by each R_i after its use.

        b becomes decay b + (1 - decay) R_i. The source is RAE (SPIRAL, arXiv 2506.24119; in the order of
        prime-rl).

        Args:
          rewards, masks: one vector per rollout of a group. The mask of an unscored rollout is False everywhere.
        """
        out = []
        for reward, mask in zip(rewards, masks, strict=True):
            total, mean = finite(reward, mask).sum(), self.of.get(role, 0.0)
            out.append(np.where(mask, total - mean, 0.0))
            if mask.any():
                self.of[role] = float(self._decay * mean + (1.0 - self._decay) * total)
        return out

    def state_dict(self) -> dict:
        return {"of": dict(self.of)}

    def load_state_dict(self, state: Mapping) -> None:
        self.of = dict(state["of"])
