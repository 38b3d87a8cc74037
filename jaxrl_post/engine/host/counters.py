"""Counters of an engine's host side, by metric name."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrl_post.engine.host.wire import USES, DispatchResult


class Counters:
    """Sums since the last `metrics`."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def add(self, name: str, amount: float) -> None:
        """Adds to a counter."""
        self._counts[name] = self._counts.get(name, 0) + amount

    def dispatch(self, purpose: str, size: int, steps: int, uses: Mapping[str, int], won: int) -> float:
        """Counts a dispatch of `steps` steps with `size` rows.

        Args:
          uses: rows by use (wire.USES).
          won: tokens that sequences took over from their clones.

        Returns:
          The tokens that one decode row settled on average, at least 1.
        """
        accepted = uses["draft_accepted"] + won
        if purpose == "train":
            self.add("spec/num_drafted", uses["draft_accepted"] + uses["draft_rejected"] + uses["clone"])
            self.add("spec/num_accepted", accepted)
        prefix = "rows" if purpose == "train" else f"{purpose}/rows"
        for use, count in uses.items():
            self.add(f"{prefix}/{use}", count)
        self.add(f"{prefix}/steps", steps)
        self.add(f"{prefix}/dispatches", 1)
        self.add(f"{prefix}/size_{size}", steps)
        return 1.0 + accepted / max(1, uses["decode"])

    def prefill(self, purpose: str, size: int, result: DispatchResult) -> int:
        """Counts passes of the wide prompt program with `size` rows. Returns the rows that computed a position."""
        uses = dict(zip(USES, result.uses.sum(axis=0).tolist()))
        self.dispatch(purpose, size, result.steps, uses, 0)
        return uses["prefill"]

    def metrics(self) -> dict[str, float]:
        """Returns the counters by name, and resets them."""
        counts, self._counts = self._counts, {}
        return {name: counts[name] for name in sorted(counts)}

    def state_dict(self) -> dict[str, float]:
        """Returns the counters for a checkpoint."""
        return dict(self._counts)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores the counters of a checkpoint."""
        self._counts = dict(state)
