"""Which replica a request goes to, and when: the contract of placements, and the least loaded replica.

Invariant: where and when a rollout is generated never changes its tokens. So any placement goes with any round policy.
The samples of a group share their prompt's pages within a replica. A placement that binds samples one by one lets each
replica compute the prompt.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from jaxrl_post.ring.types import Capacity, Request, Rollout, RolloutId


class Placement(Protocol):
    """Stands between a round policy and the engine. The engine starts waiting requests in order of submission."""

    def place(self, groups: Sequence[Sequence[Request]], round: int) -> None:
        """Takes the requests of a wave.

        Args:
          groups: requests by group, groups in order of admission.
          round: the number of the round, from 0.
        """

    def release(self, capacity: Capacity) -> list[Request]:
        """Returns requests to submit now, with `replica` set, in the order in which the engine shall start them."""

    def learn(self, rollout: Rollout) -> tuple[RolloutId, ...]:
        """Records a finished rollout. Returns ids of running rollouts to park, so that they continue in another
        replica.
        """

    def moved(self, rollouts: Sequence[Rollout]) -> None:
        """Takes parked rollouts. They continue in another replica with their tokens as prefix. The weights are the
        same, so no token changes.
        """

    def withdraw(self, ids: Iterable[RolloutId]) -> None:
        """Removes rollouts that are asked to stop. Requests that were not released never will be. Unknown ids are
        ignored.
        """

    def state_dict(self) -> Mapping:
        """Returns everything that later decisions depend on, as plain values and arrays."""

    def load_state_dict(self, state: Mapping) -> None:
        """Restores the state that `state_dict` gave."""


class LeastLoaded:
    """A Placement that releases all requests at once.

    Each group goes to the replica with the fewest unfinished requests. Among equals it takes the lowest number. This
    placement moves no rollout. Where the engine itself migrates rollouts within a round, the placement does not know
    it.
    """

    def __init__(self, replicas: int):
        self._empty(replicas)

    def _empty(self, replicas: int) -> None:
        self._load = [0] * replicas
        self._ranked = [
            (0, replica) for replica in range(replicas)
        ]  # a heap of (load, replica); entries with another load are stale
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
        """Distributes waiting requests again, after the engine changed its layout between rounds. No request is running
        then.
        """
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
    """Returns the request with which a parked rollout continues elsewhere under the same weights. Its tokens are
    forced.
    """
    return dataclasses.replace(request, prefix=rollout if len(rollout) else None, prefix_mode="recompute")
