"""Admission and preemption: which waiting sequences get slots and KV-cache pages, and which sequences lose them.

The first sequence of a prompt computes the prompt's pages; the others wait and share them. Pages are mapped before a
dispatch for the expected growth. Where pages are short, the youngest sequence is preempted.

Invariant: admission follows from the requests and from earlier results alone. It decides when a token is computed,
never which token.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from jaxrl_post.engine.host.pages import PromptPages
from jaxrl_post.engine.host.replica import Replica
from jaxrl_post.engine.host.sequence import SequenceState
from jaxrl_post.engine.host.wire import Sizes
from jaxrl_post.types import Capacity, RolloutId

Admitted = tuple[SequenceState, int, int]  # a sequence, the page to copy from and the page to copy to


class Admission:
    """Waiting sequences, and the slots and pages of every replica.

    Args:
      left: called with a sequence that is about to lose its slot.
      preempted: called after a preemption.

    `version`: of the weights. Prompt pages are shared only under one version."""

    def __init__(
        self, sizes: Sizes, version: int, left: Callable[[SequenceState], None], preempted: Callable[[], None]
    ):
        self.version = version
        self.replicas = [Replica(sizes.slots, sizes.pages, sizes.page) for _ in range(sizes.replicas)]
        self.waiting: list[SequenceState] = []
        self._left, self._preempted = left, preempted

    def reset(self) -> None:
        """Forgets waiting sequences and shared prompts. No sequence may have a slot."""
        assert not any(sequence for r in self.replicas for sequence in r.slots), "reset with requests in slots"
        self.drop_prompts()
        self.waiting = []

    @property
    def capacity(self) -> Capacity:
        """Returns free slots that no waiting sequence will take, and free pages, of each replica."""
        waiting = [sum(one.request.replica == d for one in self.waiting) for d in range(len(self.replicas))]
        return Capacity(
            slots=tuple(max(r.free - w, 0) for r, w in zip(self.replicas, waiting)),
            pages=tuple(r.pages.free for r in self.replicas),
        )

    def prompt_key(self, sequence: SequenceState) -> tuple[str, str, int]:
        """Returns the key of shared prompt pages.

        Versions never share pages. Neither do purposes, because one purpose stands still while the other runs."""
        return sequence.request.purpose, sequence.request.prompt.id, self.version

    def awaited(self) -> set[tuple]:
        """Returns (replica, prompt key) of every waiting sequence."""
        return {(one.request.replica, self.prompt_key(one)) for one in self.waiting}

    def waits(self, purpose: str) -> bool:
        """Returns whether a sequence of this purpose is waiting."""
        return any(one.request.purpose == purpose for one in self.waiting)

    # ---- slots

    def admit(self, purpose: str) -> list[Admitted]:
        """Gives slots and pages to waiting sequences of this purpose, oldest first."""
        self.waiting.sort(key=lambda one: one.age)
        admitted: list[Admitted] = []
        for index, replica in enumerate(self.replicas):
            mine = [w for w in self.waiting if w.request.replica == index and w.request.purpose == purpose]
            replica.prompts.keep_only({self.prompt_key(one) for one in mine})
            if mine and not replica.free:
                self._evict(replica, purpose)
            for one in mine:
                if not replica.free:
                    break
                entry = replica.prompts.entries.get(self.prompt_key(one))
                if entry is not None and not entry.ready:
                    continue
                copied = self.seat(replica, one, entry)
                while copied is None and self._evict(replica, purpose):
                    copied = self.seat(replica, one, replica.prompts.entries.get(self.prompt_key(one)))
                if copied is None:
                    break
                admitted.append((one, *copied))
        seated = {id(one) for one, _, _ in admitted}
        self.waiting = [one for one in self.waiting if id(one) not in seated]
        return admitted

    def seat(self, replica: Replica, sequence: SequenceState, entry: PromptPages | None) -> tuple[int, int] | None:
        """Gives the sequence a slot and pages, as `Replica.seat` does."""
        return replica.seat(sequence, entry, self.prompt_key(sequence))

    def _evict(self, replica: Replica, purpose: str) -> bool:
        """Makes room for a purpose of which nothing runs. Returns whether anything was freed.

        Preempts the youngest sequence of the other purpose; without one, drops shared prompts."""
        if any(one.request.purpose == purpose for one in replica.running):
            return False
        if replica.running:
            self._preempt(replica.running[-1])
            return True
        held = bool(replica.prompts.entries)
        replica.prompts.keep_only(set())
        return held

    def leave(self, sequence: SequenceState) -> None:
        """Takes slot and pages from a sequence."""
        self._left(sequence)
        self.replicas[sequence.request.replica].leave(sequence)

    def requeue(self, sequence: SequenceState) -> None:
        """Takes slot and pages from a sequence, which then waits again."""
        self.leave(sequence)
        self.waiting.append(sequence)

    def forget(self, ids: Set[RolloutId]) -> None:
        """Removes sequences from the waiting list."""
        self.waiting = [one for one in self.waiting if one.request.rollout_id not in ids]

    def _preempt(self, sequence: SequenceState) -> None:
        """Preempts a sequence. It resumes later with its tokens forced and its candidates kept."""
        self._preempted()
        self.requeue(sequence)

    def abandon(self, sequence: SequenceState) -> None:
        """Stops sharing the prompt pages that a running sequence has not finished computing."""
        self.replicas[sequence.request.replica].prompts.abandon(sequence.slot)

    def rest(self) -> None:
        """Moves every running sequence back to the waiting list and drops shared prompts."""
        for replica in self.replicas:
            for sequence in replica.running:
                self.requeue(sequence)
        self.drop_prompts()

    def drop_prompts(self) -> None:
        """Drops the shared prompts that are computed."""
        for replica in self.replicas:
            replica.prompts.keep_only(set())

    # ---- pages

    def map_pages(self, purpose: str, growth: int) -> None:
        """Maps pages for `growth` more positions of every running sequence of this purpose, oldest first."""
        for replica in self.replicas:
            for one in replica.running:
                if one.slot >= 0 and one.request.purpose == purpose:
                    positions = min(one.num_tokens + growth, one.limit - 1)
                    replica.grow(one, positions, purpose, self.version, self._preempt)
