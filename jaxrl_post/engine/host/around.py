"""An engine around another one. A subclass changes what it is there for, and everything else is the inner engine's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl_post.types import Capacity, Layout, Prompt, Request, Rollout, RolloutId


class AroundEngine:
    """A protocols.Engine that hands every call to `_engine`."""

    _engine: Any  # an Engine, and where a subclass knows more, that

    @property
    def capacity(self) -> Capacity:
        """Returns free slots and pages; see protocols.Engine."""
        return self._engine.capacity

    @property
    def clock(self) -> int:
        """Returns the engine steps of training rollouts so far."""
        return self._engine.clock

    @property
    def version(self) -> int:
        """Returns the version of the weights."""
        return self._engine.version

    @property
    def pending(self) -> int:
        """Returns the number of requests in the engine; see protocols.Engine."""
        return self._engine.pending

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; see protocols.Engine."""
        self._engine.submit(requests)

    def park(self, ids: Iterable[RolloutId]) -> list[Rollout]:
        """Takes rollouts out; see protocols.Engine."""
        return self._engine.park(ids)

    def step(self) -> list[Rollout]:
        """Runs one dispatch; see protocols.Engine."""
        return self._engine.step()

    def swap(self, params: Any, version: int) -> None:
        """Uses new weights; see protocols.Engine."""
        self._engine.swap(params, version)

    def relayout(self, layout: Layout) -> None:
        """Uses another layout; see protocols.Engine."""
        self._engine.relayout(layout)

    def state_dict(self) -> Mapping:
        """Returns what the engine holds; see protocols.Engine."""
        return self._engine.state_dict()

    def load_state_dict(self, state: Mapping, prompts: Mapping[str, Prompt]) -> None:
        """Restores what `state_dict` gave."""
        self._engine.load_state_dict(state, prompts)
