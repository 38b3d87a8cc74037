"""A simulated engine with several layouts: one SimEngine per layout, and relayouts between rounds.

Invariant: clock, version, seconds and counters continue over a relayout. A relayout is refused while rollouts are
running or waiting.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxrl_post.engine.host.around import AroundEngine
from jaxrl_post.sim.answers import Answers
from jaxrl_post.sim.engine import SimEngine
from jaxrl_post.types import Layout


class SimElastic(AroundEngine):
    """A protocols.Engine over one engine per layout. It starts with the first. `move_s`: seconds of a relayout."""

    def __init__(self, engines: Mapping[Layout, SimEngine], *, move_s: float = 0.0):
        self._engines, self._move_s = dict(engines), move_s
        self.layout = next(iter(engines))
        self._relayouts = 0

    @property
    def _engine(self) -> SimEngine:
        return self._engines[self.layout]

    @property
    def seconds(self) -> float:
        """Returns the simulated seconds since the start."""
        return self._engine.seconds

    @property
    def answers(self) -> Answers:
        """Returns the source of lengths and tokens."""
        return self._engine.answers

    def relayout(self, layout: Layout) -> None:
        if layout == self.layout:
            return
        if layout not in self._engines:
            raise ValueError(
                f"simulated engine: {layout} was asked for, there are {', '.join(map(str, self._engines))}"
            )
        if self.pending:
            raise ValueError(
                f"simulated engine: {self.pending} rollouts are running; it changes between two rounds only"
            )
        self._engines[layout].take_over(self._engines[self.layout], self._move_s)
        self.layout, self._relayouts = layout, self._relayouts + 1

    def metrics(self) -> dict[str, float]:
        relayouts, self._relayouts = self._relayouts, 0
        return self._engine.metrics() | {"sim/num_relayouts": float(relayouts), "sim/tensor": float(self.layout.tensor)}
