"""An engine beside which a judge works: its questions run in slots that the policy leaves free.

After each dispatch of the policy the judge may make one of its own, on the same devices. Invariant: whether it does
depends on free slots and waiting questions alone, never on time. Neither engine reads the other's state, so a rollout and a
verdict are what they would be apart. Without a judge a run uses the engine itself.
"""

from __future__ import annotations

from jaxrl_post.engine.host.around import AroundEngine
from jaxrl_post.protocols import Engine, Judge
from jaxrl_post.types import Rollout


class Judging(AroundEngine):
    """A protocols.Engine over another one, which gives a judge its turn after every dispatch.

    Slots, clock, weights and saved state are the policy's. Open questions are asked again after a resume.
    """

    def __init__(self, engine: Engine, judge: Judge):
        self._engine, self._judge = engine, judge

    def step(self) -> list[Rollout]:
        """Runs one dispatch of the policy, then lets the judge work in the slots that are free."""
        finished = self._engine.step()
        self._judge.work(sum(self._engine.capacity.slots))
        return finished
