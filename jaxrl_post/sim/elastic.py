"""A simulated engine that can lie in several ways, one simulated engine for each; between two rounds it changes over.

Invariant: clock, version, seconds and counters go on. It refuses to change while anything is on its way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_post.sim.engine import SimEngine
from jaxrl_post.types import Layout


class SimElastic:
    """A protocols.Engine over one for each layout; the first is where it begins. `move_s`: seconds of a relayout."""

    def __init__(self, engines: Mapping[Layout, SimEngine], *, move_s: float = 0.0):
        self._engines, self._move_s = dict(engines), move_s
        self.layout = next(iter(engines))
        self._relayouts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engines[self.layout], name)

    def relayout(self, layout: Layout) -> None:
        if layout == self.layout:
            return
        if layout not in self._engines:
            raise ValueError(
                f"simulated engine: {layout} was asked for, there are {', '.join(map(str, self._engines))}"
            )
        if self.pending:
            raise ValueError(
                f"simulated engine: {self.pending} answers are on their way; it changes between two rounds only"
            )
        self._engines[layout].take_over(self._engines[self.layout], self._move_s)
        self.layout, self._relayouts = layout, self._relayouts + 1

    def metrics(self) -> dict[str, float]:
        relayouts, self._relayouts = self._relayouts, 0
        return self._engines[self.layout].metrics() | {
            "sim/num_relayouts": float(relayouts),
            "sim/tensor": float(self.layout.tensor),
        }
