"""An engine beside which a judge works: its questions run in slots that the policy leaves free.

After each dispatch of the policy the judge may make one of its own, on the same devices. Invariant: whether it does
depends on free slots and waiting questions alone, never on time. Neither engine reads the other's state, so a rollout and a
verdict are what they would be apart. Without a judge a run uses the engine itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl_post.protocols import Engine, Judge
from jaxrl_post.types import Capacity, Layout, Prompt, Request, Rollout, RolloutId


class Judging:
    """A protocols.Engine over another one, which gives a judge its turn after every dispatch."""

    def __init__(self, engine: Engine, judge: Judge):
        self._engine, self._judge = engine, judge

    @property
    def capacity(self) -> Capacity:
        """Returns free slots and pages. Questions to the judge take none of them."""
        return self._engine.capacity

    @property
    def clock(self) -> int:
        """Returns the engine steps of training rollouts so far. The judge's steps do not advance it."""
        return self._engine.clock

    @property
    def version(self) -> int:
        """Returns the version of the policy's weights."""
        return self._engine.version

    @property
    def pending(self) -> int:
        """Returns the number of requests in the policy's engine; see protocols.Engine."""
        return self._engine.pending

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; see protocols.Engine."""
        self._engine.submit(requests)

    def park(self, ids: Iterable[RolloutId]) -> list[Rollout]:
        """Takes rollouts out; see protocols.Engine."""
        return self._engine.park(ids)

    def step(self) -> list[Rollout]:
        """Runs one dispatch of the policy, then lets the judge work in the slots that are free."""
        finished = self._engine.step()
        self._judge.work(sum(self._engine.capacity.slots))
        return finished

    def swap(self, params: Any, version: int) -> None:
        """Uses new weights of the policy; see protocols.Engine. The judge's stay."""
        self._engine.swap(params, version)

    def relayout(self, layout: Layout) -> None:
        """Uses another layout; see protocols.Engine."""
        self._engine.relayout(layout)

    def state_dict(self) -> Mapping:
        """Returns what the policy's engine holds. Open questions are asked again after a resume."""
        return self._engine.state_dict()

    def load_state_dict(self, state: Mapping, prompts: Mapping[str, Prompt]) -> None:
        """Restores what `state_dict` gave."""
        self._engine.load_state_dict(state, prompts)
