"""Admission and preemption: which waiting sequences get slots and KV-cache pages, and which sequences lose them.

The first sequence of a prompt computes the prompt's pages; the others wait and share them. Pages are mapped before a
dispatch for the expected growth. Where pages are short, the youngest sequence is preempted.

Invariant: admission follows from the requests and from earlier results alone. It decides when a token is computed,
never which token.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np

from jaxrl_post.engine.host.replica import Copy, PromptPages, Replica
from jaxrl_post.engine.host.sequence import SequenceState
from jaxrl_post.engine.host.slot_table import SlotTable
from jaxrl_post.engine.host.wire import EngineSettings
from jaxrl_post.ring.types import Capacity

Admitted = tuple[SequenceState, Copy]


class Admission:
    """Waiting sequences, and the slots and pages of every replica.

    Attributes:
      version: of the weights. Prompt pages are shared only under one version.
      drafting: the host side of speculative decoding, where a sequence with a slot may have a place.
      num_preempted: preemptions since the host counted them.
    """

    def __init__(self, sizes: EngineSettings, version: int, drafting: Any):
        self.version, self.drafting, self.num_preempted = version, drafting, 0
        self.replicas = [Replica(sizes.slots, sizes.pages, sizes.page_size) for _ in range(sizes.replicas)]
        self.table, self._recurrent = SlotTable(sizes), sizes.recurrent
        self.waiting: list[SequenceState] = []

    def reset(self) -> None:
        """Forgets waiting sequences and shared prompts. No sequence may have a slot."""
        assert not any(sequence for r in self.replicas for sequence in r.slots), "reset with requests in slots"
        self.drop_prompts()
        self.waiting, self.num_preempted = [], 0

    @property
    def capacity(self) -> Capacity:
        """Returns free slots that no waiting sequence will take, and free pages, of each replica."""
        waiting = Counter(one.request.replica for one in self.waiting)
        return Capacity(
            slots=tuple(max(r.free - waiting[d], 0) for d, r in enumerate(self.replicas)),
            pages=tuple(r.pages.free for r in self.replicas),
        )

    def prompt_key(self, sequence: SequenceState) -> tuple[str, str, int]:
        """Returns the key of shared prompt pages.

        Versions never share pages. Neither do purposes, because one purpose stands still while the other runs."""
        return sequence.request.purpose, sequence.request.prompt.id, self.version

    def awaited(self) -> set[tuple]:
        """Returns (replica, prompt key) of every waiting sequence."""
        return {(one.request.replica, self.prompt_key(one)) for one in self.waiting}

    def watched(self, live: np.ndarray) -> np.ndarray:
        """Returns int[replicas, S]: the positions of a prompt that others wait for, in the slot that computes it.

        The dispatch ends as soon as they are computed. It goes on where no slot is free for the others.
        """
        watched, awaited = np.zeros(live.shape, np.int32), None
        for d, replica in enumerate(self.replicas):
            for slot in replica.prompts.leaders() if replica.free else ():
                one = replica.slots[slot]
                awaited = self.awaited() if awaited is None else awaited
                if one is not None and live[d, slot] and (d, self.prompt_key(one)) in awaited:
                    watched[d, slot] = one.shared
        return watched

    # ---- slots

    def admit(self, purpose: str) -> list[Admitted]:
        """Gives slots and pages to waiting sequences of this purpose, oldest first."""
        self.waiting.sort(key=lambda one: one.age)
        admitted: list[Admitted] = []
        queues: list[list[SequenceState]] = [[] for _ in self.replicas]
        for one in self.waiting:
            if one.request.purpose == purpose:
                queues[one.request.replica].append(one)
        for replica, mine in zip(self.replicas, queues):
            replica.prompts.keep_only({self.prompt_key(one) for one in mine})
            if mine and not replica.free:
                self._evict(replica, purpose)
            # Where a state stands behind a prompt for one moment alone, those that wait for it have slots by then.
            held = 0
            for one in mine:
                if replica.free <= held:
                    break
                entry = replica.prompts.entries.get(self.prompt_key(one))
                if entry is not None and not entry.ready:
                    held += self._recurrent
                    continue
                copied = self.seat(replica, one, entry)
                while copied is None and self._evict(replica, purpose):
                    copied = self.seat(replica, one, replica.prompts.entries.get(self.prompt_key(one)))
                if copied is None:
                    break
                self.table.enter(one, replica)
                admitted.append((one, copied))
        seated = {id(one) for one, _ in admitted}
        self.waiting = [one for one in self.waiting if id(one) not in seated]
        return admitted

    def seat(self, replica: Replica, sequence: SequenceState, entry: PromptPages | None) -> Copy | None:
        return replica.seat(sequence, entry, self.prompt_key(sequence))

    def _evict(self, replica: Replica, purpose: str) -> bool:
        """Makes room for a purpose of which nothing runs. Returns whether anything was freed.

        Preempts the youngest sequence of the other purpose; without one, drops shared prompts."""
        if replica.runs(purpose):
            return False
        if replica.running:
            self._preempt(replica.running[-1])
            return True
        held = bool(replica.prompts.entries)
        replica.prompts.keep_only(set())
        return held

    def leave(self, sequence: SequenceState) -> None:
        """Takes slot, pages and the place in the drafter's tables from a sequence."""
        if sequence.place is not None:
            self.drafting.leave(sequence.request.replica, sequence.request.prompt, sequence.place)
        sequence.place = None
        self.table.leave(sequence)
        self.replicas[sequence.request.replica].leave(sequence)

    def requeue(self, sequence: SequenceState) -> None:
        self.leave(sequence)
        self.waiting.append(sequence)

    def _preempt(self, sequence: SequenceState) -> None:
        """Preempts a sequence. It resumes later with its tokens forced and its candidates kept."""
        self.num_preempted += 1
        self.requeue(sequence)

    def running(self, live: np.ndarray) -> list[SequenceState]:
        """Returns the sequences in the slots of `live`, by replica and age."""
        order = self.table.order()
        return [
            one
            for d, replica in enumerate(self.replicas)
            for one in map(replica.slots.__getitem__, order[d].tolist())
            if one is not None and live[d, one.slot]
        ]

    def open(self, sequence: SequenceState) -> None:
        """Gives a sequence with a slot a place in the drafter's tables."""
        sequence.place, fresh = self.drafting.open(sequence.request.replica, sequence.request.prompt)
        sequence.seen = 0 if fresh else sequence.prompt_length
        self.table.placed[sequence.request.replica, sequence.slot] = True

    def rest(self) -> None:
        """Moves every running sequence back to the waiting list and drops shared prompts."""
        for replica in self.replicas:
            for sequence in replica.running:
                self.requeue(sequence)
        self.drop_prompts()

    def drop_prompts(self) -> None:
        for replica in self.replicas:
            replica.prompts.keep_only(set())

    # ---- pages

    def map_pages(self, purpose: str, growth: int) -> None:
        """Maps pages for `growth` more positions of every running sequence of this purpose, oldest first."""
        replicas, slots, counts = self.table.short_of_pages(self.table.mask(purpose), growth)
        where = np.searchsorted(replicas, np.arange(len(self.replicas) + 1)).tolist()
        mapped: list[int] = []
        suffice = np.ones(len(replicas), bool)
        for replica, begin, end in zip(self.replicas, where, where[1:]):
            short = [one for one in map(replica.slots.__getitem__, slots[begin:end].tolist()) if one is not None]
            lacking = counts[begin:end].tolist()
            taken = replica.pages.take(sum(lacking))
            if taken is None:
                suffice[begin:end] = False
                self._squeeze(replica, short, purpose, growth)
                continue
            for one, stop, count in zip(short, itertools.accumulate(lacking), lacking):
                one.pages += taken[stop - count : stop]
            mapped += taken
        self.table.map_all(replicas[suffice], slots[suffice], counts[suffice], mapped)

    def _squeeze(self, replica: Replica, short: list[SequenceState], purpose: str, growth: int) -> None:
        """Maps pages where they do not suffice, one sequence after another: some are preempted for others."""
        for one in short:
            if one.slot >= 0:
                positions = min(one.num_tokens + growth, one.limit - 1)
                replica.grow(one, positions, purpose, self.version, self._preempt)
                if one.slot >= 0:
                    self.table.map(one)
