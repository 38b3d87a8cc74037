"""The contract between RowHost and the device that computes its rows.

Two devices satisfy it: compiled programs on a mesh (engine/row_engine.py) and numpy with known rollouts (sim/twin.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxrl_post.engine.host.sequence import SequenceState
from jaxrl_post.engine.host.wire import DispatchResult, Entry
from jaxrl_post.types import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOrder:
    """One dispatch.

    `packed`: int32[replicas, S, columns] (host/wire.py). `rows`: rows of a step. `drafts`: whether the drafter drafts.
    `clones`: whether some slots are clones. `freed`: finished slots of one replica that end the dispatch. `sequences`:
    the sequence in each slot, by replica and slot; None for a free slot. `purpose`, `clock`, `version`: of the
    sequences, before the first step."""

    packed: np.ndarray
    rows: int
    drafts: bool
    clones: bool
    freed: int
    sequences: Sequence[Sequence[SequenceState | None]]
    purpose: str
    clock: int
    version: int


class RowDevice(Protocol):
    """Computes rows. Nothing that a RowDevice returns may depend on slots, pages or the company of a sequence."""

    @property
    def watched(self) -> int:
        """Returns the positions of a slot whose argmax token the device keeps; 0 when the drafter does not learn it."""

    def put(self, entry: Entry, drafts: bool) -> None:
        """Writes texts into slots and copies pages. `drafts`: the drafter learns the texts too."""

    def teach(self, pieces: Sequence[tuple[int, int, tuple[np.ndarray, ...]]], rates: np.ndarray) -> None:
        """Writes `pieces` (replica, offset, flat arrays) into the drafter's tables, and sets the rates f32[C] of its
        classes."""

    def prefill(self, tiles: np.ndarray) -> None:
        """Starts a pass of the wide prompt program: computes keys and values of prompt positions.

        tiles: int32[replicas, tiles, columns] (host/prompt_tiles.py). Texts are in their slots already."""

    def dispatch(self, order: DispatchOrder) -> Callable[[], DispatchResult]:
        """Starts up to `Sizes.steps` steps. Returns a function that waits for the result.

        The dispatch ends early once `order.freed` slots of one replica have finished, or a watched prompt is computed.
        It also ends when nothing is left to do, or a slot has no mapped page for its next row."""

    def exchange(self, params: Any) -> None:
        """Replaces the weights.

        Raises:
          ValueError: the weights do not fit; then the old weights stay.
        """

    def relayout(self, layout: Layout) -> None:
        """Accepts the device's own layout.

        Raises:
          ValueError: any other layout.
        """
