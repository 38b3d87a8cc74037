"""Requests that are bound to a replica only when a slot is free there, in order of admission or the longest first.

Seer (arXiv 2511.14617, section 3): groups are divided, one answer of each goes ahead as a probe, and what is known of a group
by its longest finished answer orders the rest. A prompt with a past needs no probe.

What of it changes device time: with more requests than slots the order does, in one program over all replicas (lock-step) as
with replicas of their own; else it does nothing in lock-step, where a step lasts as long as that of the busiest replica, but
for the rows and the KV of that one. Replicas of their own gain from taking over even then (scripts/results/placements.json).
Invariant: no placement changes a token. A group's answers may lie in several replicas, each of which computes the prompt once.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from jaxrl_post.history import Past
from jaxrl_post.scheduler.placement.placement import went_on
from jaxrl_post.types import Capacity, Request, Rollout, RolloutId

Key = tuple[int, str]  # epoch and prompt
UNKNOWN = float("inf")
STEAL = 0.75
OLDEST_EVERY = 64  # of so many answers one is the oldest that waits: nobody starves


class Divided:
    """A Placement: a request goes to the replica with the most free slots, then pages, in order of admission. When nobody
    waits, a replica that runs out of work takes an answer over from the one with the most.

    Args:
      steal: at which share of the most loaded replica's answers that happens; 0: never.
    """

    def __init__(self, *, steal: float = STEAL):
        self._steal = steal
        self._waiting: dict[RolloutId, Request] = {}  # by admission
        self._running: dict[int, dict[RolloutId, Request]] = {}  # by replica, in order of release
        self._at: dict[RolloutId, int] = {}
        self._stolen: set[RolloutId] = set()

    def place(self, groups: Sequence[Sequence[Request]], round: int) -> None:
        for group in groups:
            self._waiting |= {request.rollout_id: request for request in group}

    def release(self, capacity: Capacity) -> list[Request]:
        """As many as there are free slots."""
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
        """Of those that wait."""
        return next(iter(self._waiting))

    def learn(self, rollout: Rollout) -> tuple[RolloutId, ...]:
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
        """One that had not moved."""
        return tuple(islice((id for id in reversed(running) if id not in self._stolen), 1))

    def moved(self, rollouts: Sequence[Rollout]) -> None:
        """They go on before all others."""
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
        assert not self._waiting and not self._at, (
            f"{len(self._waiting)} answers wait, {len(self._at)} are on their way"
        )
        return {}

    def load_state_dict(self, state: Mapping) -> None:
        self._waiting, self._running, self._at, self._stolen = {}, {}, {}, set()


class LongestFirst(Divided):
    """Probes first, then the groups with the longest estimate: the longest answer that is known of this round and of the
    past; a group of which none is known may be as long as any.

    Args:
      past: of a prompt's id, what is known, newest first (history.History.of).
      probes: answers of a group without a past that go ahead.
    """

    def __init__(self, *, past: Callable[[str], Sequence[Past]], probes: int = 1, steal: float = STEAL):
        super().__init__(steal=steal)
        self._past, self._probes = past, probes
        self._clear()
        self._turn = 0

    def _clear(self) -> None:
        self._ahead: list[RolloutId] = []  # probes, the first one last
        self._groups: dict[Key, list[RolloutId]] = {}  # the others of a group, the first one last
        self._estimates: dict[Key, float] = {}
        self._ranks: dict[Key, int] = {}  # of admission
        self._order: list[tuple[float, int, Key]] = []  # a heap; an entry of another estimate is out of date

    def place(self, groups: Sequence[Sequence[Request]], round: int) -> None:
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
        key = _key(rollout.id)
        known = self._estimates.get(key)
        if known is not None and (known == UNKNOWN or len(rollout) > known):
            self._estimate(key, float(len(rollout)))
        return super().learn(rollout)

    def moved(self, rollouts: Sequence[Rollout]) -> None:
        super().moved(rollouts)
        self._ahead += [rollout.id for rollout in reversed(rollouts)]

    def _spare(self, running: Mapping[RolloutId, Request]) -> tuple[RolloutId, ...]:
        """Of those that had not moved, the one that may still be longest."""
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
