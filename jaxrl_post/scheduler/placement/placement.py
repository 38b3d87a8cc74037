"""Which replica a request goes to, and when: the contract, and the least loaded replica.

Invariant: where and when a rollout is generated never changes its tokens, so any placement goes with any round policy. The
samples of a group share the prompt's pages in a replica; a placement that binds them one by one lets each replica compute it.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from jaxrl_post.types import Capacity, Request, Rollout, RolloutId


class Placement(Protocol):
    """Between what a round wants generated and the engine, which starts waiting requests in order of submission."""

    def place(self, groups: Sequence[Sequence[Request]], round: int) -> None:
        """Takes a wave in: requests by group, groups in order of admission. `round` counts from 0."""

    def release(self, capacity: Capacity) -> list[Request]:
        """What to submit now, with `replica` set, in the order in which the engine shall start them."""

    def learn(self, rollout: Rollout) -> tuple[RolloutId, ...]:
        """A rollout finished. Ids of running ones to be parked, so that they can go on elsewhere."""

    def moved(self, rollouts: Sequence[Rollout]) -> None:
        """Those, parked: they go on in another replica, their tokens as prefix. Same weights, so no token changes."""

    def withdraw(self, ids: Iterable[RolloutId]) -> None:
        """They are asked to stop: those not released yet never are, the others take no more room. Unknown ids are
        no-ops."""

    def state_dict(self) -> Mapping:
        """Everything that later decisions depend on, as plain values and arrays."""

    def load_state_dict(self, state: Mapping) -> None:
        """Decides from now on as the one that gave the state."""


class LeastLoaded:
    """A Placement that releases all at once, each group into the replica with the fewest requests on their way, the lowest
    of equals. It migrates nothing; where the engine does, in the midst of a round, that is the engine's matter."""

    def __init__(self, replicas: int):
        self._empty(replicas)

    def _empty(self, replicas: int) -> None:
        self._load = [0] * replicas
        self._ranked = [(0, replica) for replica in range(replicas)]  # a heap; an entry of another load is out of date
        self._of: dict[RolloutId, int] = {}
        self._waiting: list[Request] = []

    def place(self, groups: Sequence[Sequence[Request]], round: int) -> None:
        for group in groups:
            replica = self._least()
            for request in group:
                self._of[request.rollout_id] = replica
                self._waiting.append(dataclasses.replace(request, replica=replica) if replica else request)
            self._add(replica, len(group))

    def release(self, capacity: Capacity) -> list[Request]:
        if self._waiting and len(capacity.slots) != len(self._load):
            self._deal_again(len(capacity.slots))
        out, self._waiting = self._waiting, []
        return out

    def _deal_again(self, replicas: int) -> None:
        """The engine lies in another way since the last round: what waits, which is all there is, goes to new replicas."""
        groups: dict[tuple, list[Request]] = {}
        for request in self._waiting:
            groups.setdefault(request.rollout_id[:4], []).append(dataclasses.replace(request, replica=0))
        assert len(self._of) == len(self._waiting), "the replicas changed under a round"
        self._empty(replicas)
        self.place(list(groups.values()), 0)

    def learn(self, rollout: Rollout) -> tuple[RolloutId, ...]:
        self.withdraw([rollout.id])
        return ()

    def moved(self, rollouts: Sequence[Rollout]) -> None:
        assert not rollouts, f"nobody asked to park {[rollout.id for rollout in rollouts]}"

    def withdraw(self, ids: Iterable[RolloutId]) -> None:
        gone = [id for id in ids if id in self._of]
        for id in gone:
            self._add(self._of.pop(id), -1)
        if self._waiting:
            self._waiting = [request for request in self._waiting if request.rollout_id in self._of]

    def state_dict(self) -> dict:
        assert not self._waiting, f"{len(self._waiting)} requests are placed and not released"
        return {"replicas": len(self._load), "of": [[list(id), replica] for id, replica in self._of.items()]}

    def load_state_dict(self, state: Mapping) -> None:
        self._empty(state["replicas"])
        self._of = {RolloutId(*id): replica for id, replica in state["of"]}
        for replica in self._of.values():
            self._add(replica, 1)

    def _least(self) -> int:
        while self._ranked[0][0] != self._load[self._ranked[0][1]]:
            heapq.heappop(self._ranked)
        return self._ranked[0][1]

    def _add(self, replica: int, count: int) -> None:
        self._load[replica] += count
        if len(self._ranked) < 4 * len(self._load):
            heapq.heappush(self._ranked, (self._load[replica], replica))
        else:
            self._ranked = sorted((load, replica) for replica, load in enumerate(self._load))


def went_on(request: Request, rollout: Rollout) -> Request:
    """The request of a rollout that was parked to go on elsewhere under the same weights: its tokens are forced."""
    return dataclasses.replace(request, prefix=rollout if len(rollout) else None, prefix_mode="recompute")
