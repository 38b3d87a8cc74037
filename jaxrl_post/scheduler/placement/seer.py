"""Requests that are bound to a replica only when a slot is free there, in order of admission or longest first.

Seer (arXiv 2511.14617, section 3) divides groups. One rollout of each group goes ahead as a probe. The longest finished
rollout of a group is the estimate that orders the rest. A prompt with a history needs no probe.

When this changes device time:

- More requests than slots: the order changes it, with one program over all replicas (lock-step) and with independent
  replicas.
- Otherwise, lock-step: a step lasts as long as the step of the busiest replica, so only rows and KV cache of that
  replica count.
- Otherwise, independent replicas: they still gain from taking rollouts over (scripts/results/placements.json).

Invariant: no placement changes a token. The rollouts of a group may run in several replicas, and each of these computes
the prompt once.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from jaxrl_post.ring.history import Past
from jaxrl_post.ring.types import Capacity, Request, Rollout, RolloutId
from jaxrl_post.scheduler.placement.placement import went_on

Key = tuple[int, str]  # epoch and prompt
UNKNOWN = float("inf")
STEAL = 0.75
OLDEST_EVERY = 64  # every 64th request is the oldest waiting one, so that none starves


class Divided:
    """A Placement that fills free slots in order of admission.

    A request goes to the replica with the most free slots, then the most free pages. When no request waits, a replica
    that runs out of work takes over a rollout from the most loaded replica.

    Args:
      steal: a replica takes over a rollout once its load is at most this share of the largest load. 0: never.
    """

    def __init__(self, *, steal: float = STEAL):
        self._steal = steal
        self._waiting: dict[RolloutId, Request] = {}  # in order of admission
        self._running: dict[int, dict[RolloutId, Request]] = {}  # replica -> requests in order of release
        self._at: dict[RolloutId, int] = {}
        self._stolen: set[RolloutId] = set()

    def place(self, groups: Sequence[Sequence[Request]], round: int) -> None:
        for group in groups:
            self._waiting |= {request.rollout_id: request for request in group}

    def release(self, capacity: Capacity) -> list[Request]:
        """Returns as many requests as there are free slots."""
        self._running = {at: self._running.get(at, {}) for at in range(len(capacity.slots))}
        free = [
            (-slots, -pages, at) for at, (slots, pages) in enumerate(zip(capacity.slots, capacity.pages)) if slots > 0
        ]
        heapq.heapify(free)
        out = []
        while self._waiting and free and free[0][0] < 0:
            slots, pages, at = free[0]
            request = dataclasses.replace(self._waiting.pop(self._next()), replica=at)
            out.append(request)
            self._running[at][request.rollout_id], self._at[request.rollout_id] = request, at
            heapq.heapreplace(free, (slots + 1, pages, at))
        return out

    def _next(self) -> RolloutId:
        return next(iter(self._waiting))

    def learn(self, rollout: Rollout) -> tuple[RolloutId, ...]:
        """Removes a finished rollout. Returns the id of a rollout to move to the replica where it ran, if there is one."""
        at = self._at.get(rollout.id)
        if at is None:
            return ()
        self._forget(rollout.id)
        most = max(self._running, key=lambda other: (len(self._running[other]), -other))
        here, there = len(self._running[at]), len(self._running[most])
        if self._waiting or here + 2 > there or here > self._steal * there:
            return ()
        chosen = self._spare(self._running[most])
        self._stolen |= set(chosen)
        return chosen

    def _spare(self, running: Mapping[RolloutId, Request]) -> tuple[RolloutId, ...]:
        """Returns the id of the youngest rollout that has not moved yet."""
        return tuple(islice((id for id in reversed(tuple(running)) if id not in self._stolen), 1))

    def moved(self, rollouts: Sequence[Rollout]) -> None:
        """Puts parked rollouts before all other requests."""
        again = {}
        for rollout in rollouts:
            request = self._running[self._at[rollout.id]][rollout.id]
            again[rollout.id] = went_on(request, rollout)
            self._forget(rollout.id)
            self._stolen.add(rollout.id)
        self._waiting = again | self._waiting

    def withdraw(self, ids: Iterable[RolloutId]) -> None:
        for id in ids:
            self._waiting.pop(id, None)
            if id in self._at:
                self._forget(id)

    def _forget(self, id: RolloutId) -> None:
        del self._running[self._at.pop(id)][id]
        self._stolen.discard(id)

    def state_dict(self) -> dict:
        assert not self._waiting and not self._at, f"{len(self._waiting)} rollouts wait, {len(self._at)} are running"
        return {}

    def load_state_dict(self, state: Mapping) -> None:
        self._waiting, self._running, self._at, self._stolen = {}, {}, {}, set()


class LongestFirst(Divided):
    """A Placement that starts probes first, then the groups with the longest estimate.

    The estimate is the longest rollout known from this round and from the history. A group without known rollouts comes
    first, as it may be as long as any.

    Args:
      past: maps a prompt id to its records, newest first (history.History.of).
      probes: rollouts that go ahead, of a group without records.
      steal: as Divided.
    """

    def __init__(self, *, past: Callable[[str], Sequence[Past]], probes: int = 1, steal: float = STEAL):
        super().__init__(steal=steal)
        self._past, self._probes = past, probes
        self._clear()
        self._turn = 0

    def _clear(self) -> None:
        self._ahead: list[RolloutId] = []  # probes in reverse order
        self._groups: dict[Key, list[RolloutId]] = {}  # other requests of each group, in reverse order
        self._estimates: dict[Key, float] = {}
        self._ranks: dict[Key, int] = {}  # order of admission
        self._order: list[tuple[float, int, Key]] = []  # a heap; entries with another estimate are stale

    def place(self, groups: Sequence[Sequence[Request]], round: int) -> None:
        """Queues the requests of a wave, with the estimates of their groups."""
        if not self._waiting and not self._at:
            self._clear()
        super().place(groups, round)
        ahead = []
        for group in filter(len, groups):
            key, ids = _key(group[0].rollout_id), [request.rollout_id for request in group]
            past = self._past(group[0].prompt.id)
            probes = 0 if past else self._probes
            ahead += ids[:probes]
            self._groups[key] = ids[probes:][::-1]
            self._ranks[key] = len(self._ranks)
            self._estimate(key, float(past[0].lengths.max()) if past else UNKNOWN)
        self._ahead = [*reversed(ahead), *self._ahead]

    def _estimate(self, key: Key, length: float) -> None:
        self._estimates[key] = length
        heapq.heappush(self._order, (-length, self._ranks[key], key))

    def _next(self) -> RolloutId:
        """Returns a probe, else a request of the group with the longest estimate. Every `OLDEST_EVERY`-th call returns
        the oldest request.
        """
        self._turn += 1
        if self._turn % OLDEST_EVERY == 0:
            return super()._next()
        while self._ahead:
            if (id := self._ahead.pop()) in self._waiting:
                return id
        while True:
            length, _, key = self._order[0]
            ids = self._groups[key]
            while ids and ids[-1] not in self._waiting:
                ids.pop()
            if ids and self._estimates[key] == -length:
                return ids.pop()
            heapq.heappop(self._order)

    def learn(self, rollout: Rollout) -> tuple[RolloutId, ...]:
        """Raises the estimate of the rollout's group."""
        key = _key(rollout.id)
        known = self._estimates.get(key)
        if known is not None and (known == UNKNOWN or len(rollout) > known):
            self._estimate(key, float(len(rollout)))
        return super().learn(rollout)

    def moved(self, rollouts: Sequence[Rollout]) -> None:
        super().moved(rollouts)
        self._ahead += [rollout.id for rollout in reversed(rollouts)]

    def _spare(self, running: Mapping[RolloutId, Request]) -> tuple[RolloutId, ...]:
        """Returns the id of the rollout with the longest estimate that has not moved yet."""
        free = [id for id in running if id not in self._stolen]
        return tuple(sorted(free, key=lambda id: -self._estimates[_key(id)])[:1])

    def state_dict(self) -> dict:
        return super().state_dict() | {"turn": self._turn}

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self._clear()
        self._turn = state["turn"]


def _key(id: RolloutId) -> Key:
    return id.epoch, id.prompt_id
