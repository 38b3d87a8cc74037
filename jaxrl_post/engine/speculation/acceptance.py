"""Acceptance rates of draft classes, and the value of rows given to drafts: decaying counts.

Invariant: rates and values follow from the added counts and their order, in float64 on the host. So every process has
the same ones, and no clock matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Float, Int

SPAN = 1024  # steps of a slot (or of a clone) after which older counts weigh 1/e
FIRST_STEPS = 32  # prior of `Value`: so many steps in which every slot was offered one draft of chance 1/2
FIRST_GAIN = 0.1  # prior of the tokens that a step of a clone wins
LEAST_GAIN = 0.1  # drafts that win fewer tokens a step of a slot do not pay: no table of costs is as exact as that
LEAST_RATE = 1 / 16  # nor do drafts of which fewer are right: no row is free
SURMISED = 8.0  # prior of the calibration: so many right drafts where as many were expected
AGAIN, MOST_QUIET = 256, 4096  # steps without drafts before a trial: at first, and at most after trials in vain


class Estimates:
    """Decaying counts of C classes, and their acceptance rates.

    A class starts at its prior, which weighs as much as `strength` drafts. Adding n drafts of a class scales its old
    counts by span / (span + n). Every machine rounds this factor alike. After about `span` drafts a count weighs 1/e.
    """

    def __init__(self, priors: Float[np.ndarray, " C"], *, strength: float = 16.0, span: float = 4096.0):
        if not (np.all((priors > 0) & (priors < 1)) and strength > 0 and span > 0):
            raise ValueError(
                f"estimates: priors must lie between 0 and 1 and strength {strength} and span {span} above 0"
            )
        self._priors, self._strength, self._span = priors.astype(np.float64), strength, span
        self._counts = np.zeros((2, priors.size))

    def add(self, counts: Int[np.ndarray, "2 C"]) -> None:
        """Adds counts. Row 0: judged drafts of a class; row 1: right ones."""
        self._counts = self._counts * (self._span / (self._span + counts[0])) + counts

    def rates(self) -> Float[np.ndarray, " C"]:
        """Returns f32[C], strictly between 0 and 1: the chance that a draft of the class is right."""
        seen, right = self._counts
        return ((right + self._priors * self._strength) / (seen + self._strength)).astype(np.float32)

    def state_dict(self) -> dict:
        return {"counts": self._counts.copy()}

    def load_state_dict(self, state: Mapping) -> None:
        """Restores the counts of a checkpoint.

        Raises:
          ValueError: the saved counts have another number of classes.
        """
        if state["counts"].shape != self._counts.shape:
            raise ValueError(
                f"estimates: the saved counts have {state['counts'].shape[1]} classes, this drafter "
                f"{self._counts.shape[1]}; resume with the drafter of the saved run"
            )
        self._counts = np.array(state["counts"], np.float64)


class Value:
    """The value of a row given to a draft or to a clone, and when to try drafts that do not seem to pay.

    Counts the drafts offered to a slot in a step, in bins of equal width by estimated chance. Also counts the tokens
    that a step of a clone wins. Each unsuccessful trial doubles the wait for the next one.

    Chances are estimates from first drafts. Of the drafts that got rows it is counted how many were right, beside how
    many were expected, and expectations are scaled by that share. Drafts of the lowest bin are worth nothing.
    """

    def __init__(self, ranges: int):
        self._offers, self._steps, self.clone_gain = np.zeros(ranges), float(FIRST_STEPS), FIRST_GAIN
        self._offers[ranges // 2] = FIRST_STEPS
        self._quiet, self._wait = 0, AGAIN
        self._right, self._expected = 0.0, 0.0
        self._rank()

    @property
    def calibration(self) -> float:
        """Returns right drafts over expected ones, at most 1."""
        return min(1.0, (self._right + SURMISED) / (self._expected + SURMISED))

    def _rank(self) -> None:
        """Sorts the bins by chance, the highest first, with the drafts that a slot is offered in a step."""
        offers = [*enumerate((self._offers / self._steps).tolist())]
        self._ranked = [((i + 0.5) / len(offers), offered) for i, offered in reversed(offers) if offered > 0]

    @property
    def offered(self) -> float:
        """Returns the drafts that a slot is offered in a step."""
        return sum(offered for _, offered in self._ranked)

    def drafts(self, rows: float, running: int) -> float:
        """Returns the expected right drafts a step among `rows` drafts, the most promising ones offered to `running`
        slots. It is 0 where they do not pay whatever a table says: below LEAST_GAIN for each slot, or LEAST_RATE for
        each draft."""
        ranked = [(chance, offered * running) for chance, offered in self._ranked]
        taken = min(self.offered * running, rows)
        right = self._hoped(ranked, rows) * self.calibration
        return right if right >= max(LEAST_GAIN * min(running, rows), LEAST_RATE * taken) else 0.0

    def _hoped(self, ranked: Iterable[tuple[float, float]], rows: float) -> float:
        """Returns the right drafts that chances promise for `rows` rows, which the most promising drafts get."""
        right, lowest = 0.0, 1.0 / self._offers.size
        for chance, offered in ranked:
            taken = min(offered, rows)
            right, rows = right + taken * chance * (chance > lowest), rows - taken
        return right

    def record_outcome(
        self,
        offers: np.ndarray,
        slot_steps: int,
        clone_steps: int,
        won: int,
        tried: bool,
        given: int = 0,
        right: int = 0,
    ) -> None:
        """Adds the outcome of a dispatch that drafted.

        `offers`: offered drafts by bin, over `slot_steps` steps of running slots. `won`: tokens that `clone_steps`
        steps of clones won. `tried`: the dispatch was a trial. `given`: drafts that got rows; `right`: those that were
        accepted."""
        keep = SPAN / (SPAN + slot_steps)
        bins = [((i + 0.5) / offers.size, float(n)) for i, n in reversed([*enumerate(offers)])]
        self._right = keep * self._right + right
        self._expected = keep * self._expected + self._hoped(bins, given)
        self._offers, self._steps = keep * self._offers + offers, keep * self._steps + slot_steps
        self.clone_gain = (SPAN * self.clone_gain + won) / (SPAN + clone_steps)
        self._rank()
        self._wait = min(2 * self._wait, MOST_QUIET) if tried else AGAIN
        self._quiet = 0

    def quiet(self, steps: int) -> None:
        self._quiet += steps

    def due(self, apart: int) -> bool:
        """Returns whether it is time for a trial. `apart`: least steps between two trials."""
        return self._quiet >= max(self._wait, apart)

    def state_dict(self) -> dict:
        return {
            "offers": self._offers.copy(),
            "steps": self._steps,
            "clone_gain": self.clone_gain,
            "quiet": self._quiet,
            "wait": self._wait,
            "right": self._right,
            "expected": self._expected,
        }

    def load_state_dict(self, state: Mapping) -> None:
        self._offers, self._steps = np.array(state["offers"], np.float64), float(state["steps"])
        self.clone_gain, self._quiet, self._wait = float(state["clone_gain"]), int(state["quiet"]), int(state["wait"])
        self._right, self._expected = float(state.get("right", 0.0)), float(state.get("expected", 0.0))
        self._rank()
