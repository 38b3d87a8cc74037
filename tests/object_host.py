"""A row host that serves its slots one object at a time: the plain form of what host/slot_table.py does with arrays.

Tests compare both on equal devices. Nothing here has a table: a sequence keeps all its numbers itself.
"""

from __future__ import annotations

import numpy as np

from jaxrl_post.engine.host import packing
from jaxrl_post.engine.host import wire as c
from jaxrl_post.engine.host.admission import Admission
from jaxrl_post.engine.host.replica import Pages, Replica
from jaxrl_post.engine.host.row_host import RowHost
from jaxrl_post.engine.host.sequence import Settled
from jaxrl_post.ring.types import Capacity


class NoTable:
    """Takes over nothing."""

    def __init__(self, sizes):
        self.placed = np.zeros((sizes.replicas, sizes.slots), bool)

    def enter(self, one, replica):
        pass

    leave = store = lambda self, *_: None


class PlainPages(Pages):
    """Takes and releases page by page."""

    def take(self, count):
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._counts[taken] = 1
        return taken

    def release(self, ids):
        for i in ids:
            assert self._counts[i] > 0, "page released twice"
            self._counts[i] -= 1
            if self._counts[i] == 0:
                self._free.append(i)


class PlainReplica(Replica):
    """Looks through its slots."""

    def __init__(self, slots, pages, page):
        super().__init__(slots, pages, page)
        self.pages = self.prompts.pages = PlainPages(pages, page)

    @property
    def free(self):
        return self.slots.count(None)

    def runs(self, purpose):
        return any(one.request.purpose == purpose for one in self.running)

    def seat(self, sequence, entry, key):
        first = self.slots.index(None)
        out = super().seat(sequence, entry, key)
        assert out is None or sequence.slot == first
        return out

    def victim(self, sequence, purpose, version):
        others = [
            o for o in self.running if o is not sequence and (o.age > sequence.age or o.request.purpose != purpose)
        ]
        current = [o for o in others if all(v == version for v in o.column("versions"))]
        youngest = (current or others)[-1:]
        return youngest[0] if youngest else None


class PlainAdmission(Admission):
    """Maps pages one sequence after another."""

    def __init__(self, sizes, version, drafting):
        super().__init__(sizes, version, drafting)
        self.replicas = [PlainReplica(sizes.slots, sizes.pages, sizes.page_size) for _ in range(sizes.replicas)]
        self.table = NoTable(sizes)

    def watched(self, live):
        return self.table.packed[..., c.WATCH]

    @property
    def capacity(self):
        waiting = [sum(one.request.replica == d for one in self.waiting) for d in range(len(self.replicas))]
        return Capacity(
            slots=tuple(max(r.free - w, 0) for r, w in zip(self.replicas, waiting)),
            pages=tuple(r.pages.free for r in self.replicas),
        )

    def map_pages(self, purpose, growth):
        for replica in self.replicas:
            for one in replica.running:
                if one.slot >= 0 and one.request.purpose == purpose:
                    positions = min(one.num_tokens + growth, one.limit - 1)
                    replica.grow(one, positions, purpose, self.version, self._preempt)


class ObjectHost(RowHost):
    """A RowHost that packs and collects object by object, without drafts."""

    def __init__(self, device, sizes, **given):
        super().__init__(device, sizes, **given)
        self.admission = PlainAdmission(sizes, self.version, self.drafting)

    @property
    def pending(self):
        return sum(one.request.purpose == self._purpose for one in self.sequences.values())

    @property
    def _purpose(self):
        return "eval" if any(one.request.purpose == "eval" for one in self.sequences.values()) else "train"

    def _run(self, purpose):
        """Packs first and then does as RowHost does, with a table that answers from the objects."""
        packed, sequences = self._pack(purpose)
        self.admission.table = Answers(self, packed, sequences)
        try:
            return super()._run(purpose)
        finally:
            self.admission.table = NoTable(self.sizes)

    def _pack(self, purpose):
        packed, sequences = packing.blank(self.sizes), []
        awaited = self.admission.awaited()
        for d, replica in enumerate(self.admission.replicas):
            packed[d, :, c.ORDER] = [one.slot for one in replica.running] + [
                i for i, one in enumerate(replica.slots) if one is None
            ]
            free = replica.free > 0
            for one in replica.running:
                if one.request.purpose == purpose:
                    watched = free and (d, self.admission.prompt_key(one)) in awaited
                    packing.describe(one, packed[d, one.slot], replica, watched)
                    sequences.append(one)
        return packed, sequences

    def _collect(self, live, out, order):
        told = settled(out, order.packed, order.clock)
        done = (self._add(one, told[one.request.replica][one.slot]) for one in self.admission.table.sequences)
        return [rollout for rollout in done if rollout is not None]

    def _add(self, one, more):
        replica, checked = self.admission.replicas[one.request.replica], len(one.tokens)
        self.swap_policy.record_outcome(one.candidates, more.tokens)
        one.extend(more, self.version)
        one.num_computed = more.num_computed
        if one.num_computed >= one.shared:
            replica.prompts.finish(one.slot)
        ending = one.ending()
        length = one.stopped_at(self._decode, checked) if self._decode else None
        if length is not None:
            self.counters.add("rows/stop_string_overrun", one.cut(length))
            ending = one.ending(stopped=True)
        if ending is None:
            return None
        self.admission.leave(one)
        self._pop(one.request.rollout_id)
        return one.rollout(ending, int(one.column("clocks")[-1]))


class Answers(NoTable):
    """What RowHost._run asks a table for, of sequences that were packed."""

    def __init__(self, host, packed, sequences):
        super().__init__(host.sizes)
        self.packed, self.sequences = packed, sequences

    def mask(self, purpose):
        return self.packed[..., c.ACTIVE] > 0

    def view(self, live):
        return self.packed.copy()


def settled(out, packed, clock):
    """Returns, by replica and slot, the tokens that a dispatch settled."""
    new = out[..., c.OUT_NUM_TOKENS] - packed[..., c.NUM_TOKENS]
    blocks = out[..., c.OUT_WINDOW :].reshape(*out.shape[:2], 5, -1)[..., : max(int(new.max()), 0)]
    tokens, logprobs, entropies, stamps, argmax_tokens = (blocks[:, :, i] for i in range(5))
    clocks = clock + 1 + stamps.astype(np.int64) // 2
    floats = (block.view(np.float32) for block in (logprobs, entropies))
    lists = [column.tolist() for column in (tokens, *floats, stamps % 2 == 1, clocks, argmax_tokens)]
    return [
        [
            Settled(computed, *(column[replica][slot][:count] for column in lists))
            for slot, (computed, count) in enumerate(zip(*ends))
        ]
        for replica, ends in enumerate(zip(out[..., c.OUT_NUM_COMPUTED].tolist(), new.tolist()))
    ]
