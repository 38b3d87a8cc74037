"""How often a draft of each class proved right, and what rows given to drafts brought: counts, from which the next are valued.

Invariant: rates and values follow from the counts that were added and their order, in float64 on the host: the same on every
process, whatever a clock says.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int

SPAN = 1024  # steps of a slot (of a clone) after which older counts weigh 1/e
FIRST_STEPS = (
    32  # before any count, what so many steps weigh in which every slot was offered one draft of an even chance
)
FIRST_GAIN = 0.1  # tokens that a clone's step is taken to bring before any was counted
AGAIN, MOST_QUIET = 256, 4096  # steps without drafts before one tries them: at first, and after tries that were in vain


class Estimates:
    """Decaying counts of C classes. A class starts at its prior, which weighs as much as `strength` drafts; a count weighs
    1/e after about `span` more drafts of its class: each addition of n drafts shrinks what was there by span / (span + n),
    which every machine rounds alike."""

    def __init__(self, priors: Float[np.ndarray, " C"], *, strength: float = 16.0, span: float = 4096.0):
        if not (np.all((priors > 0) & (priors < 1)) and strength > 0 and span > 0):
            raise ValueError(
                f"estimates: priors must lie between 0 and 1 and strength {strength} and span {span} above 0"
            )
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
            raise ValueError(
                f"estimates: the saved counts have {state['counts'].shape[1]} classes, this drafter "
                f"{self._counts.shape[1]}; resume with the drafter of the saved run"
            )
        self._counts = np.array(state["counts"], np.float64)


class Value:
    """What a row brings that is given to a draft or to a clone: drafts offered a step and slot, by ranges of equal width of
    their estimated chance, and tokens a clone's step wins. And when to try drafts that do not seem to pay: each try in vain
    doubles the wait for the next."""

    def __init__(self, ranges: int):
        self._offers, self._steps, self.clone_gain = np.zeros(ranges), float(FIRST_STEPS), FIRST_GAIN
        self._offers[ranges // 2] = FIRST_STEPS
        self._quiet, self._wait = 0, AGAIN
        self._rank()

    def _rank(self) -> None:
        """The chances of what is offered, the highest first, with how many a slot is offered in a step."""
        offers = [*enumerate((self._offers / self._steps).tolist())]
        self._ranked = [((i + 0.5) / len(offers), offered) for i, offered in reversed(offers) if offered > 0]

    @property
    def offered(self) -> float:
        """Drafts that a slot is offered in a step."""
        return sum(offered for _, offered in self._ranked)

    def drafts(self, rows: float, running: int) -> float:
        """Right ones expected of `rows` drafts a step, the most promising of those offered to `running` slots."""
        right = 0.0
        for chance, offered in self._ranked:
            taken = min(offered * running, rows)
            right, rows = right + taken * chance, rows - taken
        return right

    def record_outcome(self, offers: np.ndarray, slot_steps: int, clone_steps: int, won: int, tried: bool) -> None:
        """After a dispatch that drafted: the drafts offered, by range, over so many steps of running slots; and what
        `clone_steps` steps of clones won. `tried`: it drafted because it was time for a try."""
        keep = SPAN / (SPAN + slot_steps)
        self._offers, self._steps = keep * self._offers + offers, keep * self._steps + slot_steps
        self.clone_gain = (SPAN * self.clone_gain + won) / (SPAN + clone_steps)
        self._rank()
        self._wait = min(2 * self._wait, MOST_QUIET) if tried else AGAIN
        self._quiet = 0

    def quiet(self, steps: int) -> None:
        """After so many steps without drafts."""
        self._quiet += steps

    def due(self, apart: int) -> bool:
        """Whether it is time for a try; `apart`: steps that must lie between two."""
        return self._quiet >= max(self._wait, apart)

    def state_dict(self) -> dict:
        return {
            "offers": self._offers.copy(),
            "steps": self._steps,
            "clone_gain": self.clone_gain,
            "quiet": self._quiet,
            "wait": self._wait,
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Goes on as the one that gave the state."""
        self._offers, self._steps = np.array(state["offers"], np.float64), float(state["steps"])
        self.clone_gain, self._quiet, self._wait = float(state["clone_gain"]), int(state["quiet"]), int(state["wait"])
        self._rank()
