"""How often a draft of each class proved right: counts of whole drafts, from which the chance of the next one is estimated.

Invariant: rates follow from the counts that were added and their order, in float64 on the host: the same on every process,
whatever a clock says.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int


class Estimates:
    """Decaying counts of C classes. A class starts at its prior, which weighs as much as `strength` drafts; a count weighs
    1/e after about `span` more drafts of its class: each addition of n drafts shrinks what was there by span / (span + n),
    which every machine rounds alike."""

    def __init__(self, priors: Float[np.ndarray, " C"], *, strength: float = 16.0, span: float = 4096.0):
        if not (np.all((priors > 0) & (priors < 1)) and strength > 0 and span > 0):
            raise ValueError(f"estimates: priors must lie between 0 and 1 and strength {strength} and span {span} "
                             f"above 0")
        self._priors, self._strength, self._span = priors.astype(np.float64), strength, span
        self._counts = np.zeros((2, priors.size))

    def add(self, counts: Int[np.ndarray, "2 C"]) -> None:
        """Row 0: drafts of a class that could be judged; row 1: those that were right."""
        self._counts = self._counts * (self._span / (self._span + counts[0])) + counts

    def rates(self) -> Float[np.ndarray, " C"]:
        """f32[C], strictly between 0 and 1: the chance that a draft of the class is right."""
        seen, right = self._counts
        return ((right + self._priors * self._strength) / (seen + self._strength)).astype(np.float32)

    def state_dict(self) -> dict:
        return {"counts": self._counts.copy()}

    def load_state_dict(self, state: Mapping) -> None:
        """ValueError where the saved counts are of other classes."""
        if state["counts"].shape != self._counts.shape:
            raise ValueError(f"estimates: the saved counts have {state['counts'].shape[1]} classes, this drafter "
                             f"{self._counts.shape[1]}; resume with the drafter of the saved run")
        self._counts = np.array(state["counts"], np.float64)
