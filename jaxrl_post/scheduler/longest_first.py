"""Requests that are bound to a replica only when a slot is free there, in order of admission or the longest first.

Seer (arXiv 2511.14617, section 3): groups are divided, one answer of each goes ahead as a probe, and what is known of a group
by its longest finished answer orders the rest. A prompt with a past needs no probe.

What of it changes device time: everything, on one program over all replicas (lock-step) as with replicas of their own, as
soon as there are more requests than slots; else nothing. Invariant: no placement changes a token. A group's answers may lie
in several replicas, each of which computes the prompt once.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxrl_post.history import Past
from jaxrl_post.types import Capacity, Request, Rollout, RolloutId

Key = tuple[int, str]  # epoch and prompt
UNKNOWN = float("inf")
OLDEST_EVERY = 16  # of so many answers one is the oldest that waits: nobody starves


class Divided:
    """A Placement: a request goes to the replica with the most free slots, then pages, in order of admission."""

    def __init__(self):
        self._waiting: dict[RolloutId, Request] = {}  # by admission

    def place(self, groups: Sequence[Sequence[Request]], round: int) -> None:
        for group in groups:
            self._waiting |= {request.rollout_id: request for request in group}

    def release(self, capacity: Capacity) -> list[Request]:
        """As many as there are free slots."""
        free = [(-slots, -pages, replica) for replica, (slots, pages) in enumerate(zip(capacity.slots, capacity.pages))
                if slots > 0]
        heapq.heapify(free)
        out = []
        while free and self._waiting:
            slots, pages, replica = free[0]
            out.append(dataclasses.replace(self._waiting.pop(self._next()), replica=replica))
            heapq.heapreplace(free, (slots + 1, pages, replica))
            if free[0][0] == 0:  # none has one any more
                break
        return out

    def _next(self) -> RolloutId:
        """Of those that wait."""
        return next(iter(self._waiting))

    def learn(self, rollout: Rollout) -> tuple[RolloutId, ...]:
        return ()

    def moved(self, rollouts: Sequence[Rollout]) -> None:
        assert not rollouts, f"nobody asked to park {[rollout.id for rollout in rollouts]}"

    def withdraw(self, ids: Iterable[RolloutId]) -> None:
        for id in ids:
            self._waiting.pop(id, None)

    def state_dict(self) -> dict:
        assert not self._waiting, f"{len(self._waiting)} requests are placed and not released"
        return {}

    def load_state_dict(self, state: Mapping) -> None:
        self._waiting = {}


class LongestFirst(Divided):
    """Probes first, then the groups with the longest estimate: the longest answer that is known of this round and of the
    past; a group of which none is known may be as long as any.

    Args:
      past: of a prompt's id, what is known, newest first (history.History.of).
      probes: answers of a group without a past that go ahead.
    """

    def __init__(self, *, past: Callable[[str], Sequence[Past]], probes: int = 1):
        super().__init__()
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
        if not self._waiting:
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
        return ()

    def state_dict(self) -> dict:
        return super().state_dict() | {"turn": self._turn}

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self._clear()
        self._turn = state["turn"]


def _key(id: RolloutId) -> Key:
    return id.epoch, id.prompt_id
