"""The contract between RowHost and the device that computes its rows.

Two devices satisfy it: compiled programs on a mesh (engine/row_engine.py) and numpy with known
rollouts (scripts/models/twin.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxrl_post.engine.host.sequence import SequenceState
from jaxrl_post.engine.host.wire import DispatchResult, Entry
from jaxrl_post.ring.types import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOrder:
    """One dispatch."""

    packed: np.ndarray  # int32[replicas, S, columns] (host/wire.py)
    rows: int  # of a step
    drafts: bool  # whether the drafter drafts
    clones: bool  # whether some slots are clones
    freed: int  # finished slots of one replica that end the dispatch
    sequences: Sequence[Sequence[SequenceState | None]]  # in each slot, by replica and slot; None for a free slot
    purpose: str  # of the sequences
    clock: int  # before the first step
    version: int  # of the weights


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
        """Starts a pass of the wide prompt program: computes what layers keep of prompt positions.

        tiles: int32[replicas, tiles, columns] (host/packing.py). Texts are in their slots already."""

    def dispatch(self, order: DispatchOrder) -> Callable[[], DispatchResult]:
        """Starts up to `EngineSettings.steps_per_dispatch` steps. Returns a function that waits for the result.

        The dispatch ends early once `order.freed` slots of one replica have finished, or a watched prompt is computed.
        It also ends when nothing is left to do, or a slot has no mapped page for its next row."""

    def exchange(self, params: Any, finite: Any = None) -> None:
        """Replaces the weights. `finite`: as in protocols.Engine.swap.

        Raises:
          ValueError: the weights do not fit; then the old weights stay.
        """

    def relayout(self, layout: Layout) -> None:
        """Accepts the device's own layout.

        Raises:
          ValueError: any other layout.
        """
