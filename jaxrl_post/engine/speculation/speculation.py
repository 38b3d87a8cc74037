"""The host's side of drafting: which part of the tables a prompt has, what is in it, and how often drafts prove right.

A prompt's tables are built from its past before one of its answers drafts, and stay as long as nobody needs the room: while
drafting does not pay, it costs nothing.
Invariant: all of it follows from the groups recorded, the order of admission and counts of drafts, so that every process
of a job holds the same; and none of it can change a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_post.engine.host.wire import OFFERS, UPLOAD
from jaxrl_post.engine.speculation import interface
from jaxrl_post.engine.speculation.acceptance import Estimates, Value
from jaxrl_post.engine.speculation.corpus import Corpus
from jaxrl_post.engine.speculation.ngrams import Texts
from jaxrl_post.engine.speculation.registry import Drafter
from jaxrl_post.engine.speculation.table_cache import Region, Shared, Shelf
from jaxrl_post.history import Past
from jaxrl_post.types import Group, Prompt, RolloutId

MOST_BRANCHES = 7  # clones of one answer
LEAST = 0.5  # weight of drafts for an answer that is about to end


class Drafting:
    """Of one engine. `past`: what is known of a prompt, newest first; `shared`: entries of the table over all prompts;
    `clones`: whether free slots may try other drafts for running ones."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        replicas: int,
        slots: int,
        past: Callable[[str], Sequence[Past]],
        shared: int = 0,
        clones: bool = False,
    ):
        self.drafter, self._past, self.clones = drafter, past, clones and drafter.width > 0
        self.corpus = Corpus(shared) if shared else None
        self._first = -(-shared // UPLOAD) * UPLOAD
        self._replicas, self._slots = replicas, slots
        self.forced: bool | None = None  # a probe decides whether to draft, not what it is worth
        self.estimates = Estimates(drafter.priors) if drafter.classes else None
        self.reset()

    def reset(self) -> None:
        """As at the start, but for what was recorded."""
        self._shelves = [Shelf(self._first, self.drafter.entries) for _ in range(self._replicas)]
        self._shared = [Shared(self._slots) for _ in range(self._replicas)]
        self._pieces: list[tuple[int, int, tuple[np.ndarray, ...]]] = []
        self._shown = -1  # version of the table over all prompts that the device has
        self.value = Value(OFFERS)
        self.active = False  # whether the last dispatch drafted
        self._trying = False  # whether it was time to
        if self.estimates is not None:
            self.estimates = Estimates(self.drafter.priors)

    def record(self, group: Group) -> None:
        """Takes a scored group into the table over all prompts; the device sees it from the next dispatch that drafts."""
        if self.corpus is not None:
            self.corpus.add(
                Texts(
                    group.prompt.tokens,
                    [rollout.tokens for rollout in group.rollouts],
                    [rollout.favourites for rollout in group.rollouts],
                )
            )

    def open(self, replica: int, prompt: Prompt) -> tuple[np.ndarray, bool]:
        """An answer to the prompt, in a slot, is about to draft for the first time: its `place` int32[PLACE] (see
        engine/speculation/interface.py), and whether its row of the live table is new."""
        place = np.zeros(interface.PLACE, np.int32)
        region = self._region(replica, prompt)
        if region is not None:
            region.users += 1
            place[interface.OFFSET], place[interface.SIZE] = region.offset, region.size
        place[interface.ALL_SIZE] = 0 if self.corpus is None else self.corpus.size
        place[interface.ROW], fresh = self._shared[replica].enter(prompt.id)
        return place, fresh

    def leave(self, replica: int, prompt: Prompt, place: np.ndarray) -> None:
        """One that was opened gives its slot back."""
        self._shared[replica].leave(prompt.id)
        if place[interface.SIZE]:
            region = self._shelves[replica].regions.get(prompt.id)
            if region is not None and region.offset == place[interface.OFFSET]:
                region.users -= 1

    def _region(self, replica: int, prompt: Prompt) -> Region | None:
        """The prompt's part of the tables, built anew where its past has changed and nobody reads the old one."""
        past, shelf = self._past(prompt.id), self._shelves[replica]
        newest = tuple(p.epoch for p in past)
        region = shelf.regions.get(prompt.id)
        if region is not None and (region.newest == newest or region.users):
            shelf.regions.move_to_end(prompt.id)
            return region
        if region is not None:
            shelf.drop(prompt.id)
        arrays = self.drafter.index(past, prompt) if past else ()
        if not arrays or not arrays[0].size:
            return None
        region = shelf.take(prompt.id, arrays[0].size, newest)
        if region is not None:
            self._pieces.append((replica, region.offset, arrays))
        return region

    def uploads(self) -> list[tuple[int, int, tuple[np.ndarray, ...]]]:
        """(replica, offset, flat arrays) that the device has not seen, in order."""
        pieces, self._pieces = self._pieces, []
        if self.corpus is not None and self.corpus.version != self._shown:
            pieces += [(replica, 0, (self.corpus.entries,)) for replica in range(self._replicas)]
            self._shown = self.corpus.version
        return pieces

    # ---- what drafts are worth

    def weights(self, lengths: Mapping[RolloutId, int]) -> dict[RolloutId, np.float32]:
        """Where rows are short, drafts of the answer that will probably finish last count most: 1, and down to LEAST for one
        about to end. How long an answer gets is what the longest to its prompt was last time; one without a past, or beyond
        it, may last as long as any. By tokens that running answers have."""
        pasts = {name: self._past(name) for name in {id.prompt_id for id in lengths}}
        longest = {name: float(past[0].lengths.max()) if past else 0.0 for name, past in pasts.items()}
        left = {id: max(longest[id.prompt_id] - length, 0.0) for id, length in lengths.items()}
        most = max(left.values(), default=0.0)
        return {id: np.float32(LEAST + (1 - LEAST) * more / most if more else 1.0) for id, more in left.items()}

    def told(self, counts: np.ndarray, offers: np.ndarray, slot_steps: int, clone_steps: int, won: int) -> None:
        """After a dispatch that drafted: judged and right drafts of each class; the drafts offered by estimated chance, over
        so many steps of running slots; and what `clone_steps` steps of clones won."""
        self.estimates.add(counts)
        self.value.told(offers, slot_steps, clone_steps, won, self._trying)
        self.active = True

    def quiet(self, steps: int) -> None:
        """After a dispatch of so many steps that did not draft."""
        self.value.quiet(steps)
        self.active = False

    def due(self, apart: int) -> bool:
        """Whether it is time to try drafting, whatever it seems to be worth; `apart`: steps between two tries. If
        so, the dispatch that `told` tells of next was a try."""
        self._trying = self.drafter.width > 0 and self.value.due(apart)
        return self._trying if self.forced is None else self.forced

    def worth(self, rows: float, running: int, free: int = 0) -> float:
        """Tokens that so many rows a step beside those of `running` answers are expected to bring: the most promising drafts
        first, then clones in `free` slots."""
        if self.forced is False or not self.drafter.width:
            return 0.0
        return self.value.drafts(rows, running) + self.clones_of(rows, running, free) * self.value.clone_gain

    def clones_of(self, rows: float, running: int, free: int) -> int:
        """Clones that fit into the rows which the drafts of running answers leave: each takes one row and drafts like them."""
        if not self.clones:
            return 0
        offered = self.value.offered
        return min(free, MOST_BRANCHES * running, max(0, int((rows - offered * running) / (1.0 + offered))))

    def metrics(self) -> dict[str, float]:
        """Prompts that have a part of the tables, and the accepted drafts that a slot's step is expected to bring."""
        if not self.drafter.width:
            return {}
        return {
            "spec/num_prompts_indexed": float(sum(len(shelf.regions) for shelf in self._shelves)),
            "spec/expected_accepted": self.worth(float(1 << 20), 1),
        }

    def state_dict(self) -> dict:
        """Plain values and arrays; tables are built again from what was recorded."""
        return {
            "corpus": {} if self.corpus is None else self.corpus.state_dict(),
            "estimates": {} if self.estimates is None else self.estimates.state_dict(),
            "value": self.value.state_dict(),
        }

    def rest(self) -> None:
        """A boundary: what a resumed run could not know is forgotten here too."""
        assert not any(shared.users for shared in self._shared), "a slot still drafts"
        estimates, value = self.estimates, self.value
        self.reset()
        self.estimates, self.value = estimates, value

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        if self.corpus is not None:
            self.corpus.load_state_dict(state["corpus"])
        if self.estimates is not None:
            self.estimates.load_state_dict(state["estimates"])
        self.value.load_state_dict(state["value"])
