"""The coefficient of the KL in the reward: fixed, or moved towards a target after every optimizer step. Host code.

Invariant: the coefficient follows from the KL of the rollouts alone. All pieces of a round get the same one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_post.config import AlgorithmConfig

MOST = 0.2  # of the relative error of one step, as InstructGPT's


class KlController:
    """Holds the coefficient. With kl_target 0 it never moves."""

    def __init__(self, algorithm: AlgorithmConfig):
        self._target, self._horizon = algorithm.kl_target, algorithm.kl_horizon
        self.value = algorithm.kl_coef

    def applied(self, algorithm: AlgorithmConfig) -> AlgorithmConfig:
        """Returns the algorithm with the present coefficient."""
        return dataclasses.replace(algorithm, kl_coef=self.value)

    def update(self, kls: Sequence[float]) -> None:
        """Moves the coefficient by the KL of n rollouts, in nats per token: value *= 1 + e n / kl_horizon.

        e = clip(mean KL / kl_target - 1, -0.2, 0.2). The source is arXiv 1909.08593, section 2.2, as in verl.
        """
        if not self._target or not kls:
            return
        error = np.clip(np.mean(kls) / self._target - 1.0, -MOST, MOST)
        self.value *= float(1.0 + error * len(kls) / self._horizon)

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping) -> None:
        self.value = state["value"]
