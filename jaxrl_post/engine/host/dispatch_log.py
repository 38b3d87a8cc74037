"""What an engine tells of its dispatches: one JSON line of dispatches.jsonl for each, and counters by metric name.

A line has clock, rows, steps and row uses. Invariant: it is a function of the requests and of the device's results. It has no
time of day and no machine name.
With this log and the rollout log, a run that drafted is replayed without a model (scripts/models/twin.py).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxrl_post.engine.host.wire import USES, DispatchResult
from jaxrl_post.ring import written


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """One dispatch, summed over replicas. Only one that drafts has what follows `drafts`."""

    purpose: str
    clock: int  # of `purpose` before the first step
    rows: int  # of each step
    steps: int
    uses: tuple[int, ...]  # rows by use, in the order of wire.USES
    drafts: bool = False
    offers: tuple[int, ...] = ()  # drafts by estimated chance
    counts: tuple[tuple[int, ...], ...] = ()  # judged and right drafts of each class
    won: int = 0  # tokens that sequences took over from their clones

    def line(self) -> str:
        """Returns one line of JSON, with its newline. Fields of drafting appear only where the dispatch drafted."""
        fields = asdict(self)
        if not self.drafts:
            fields = {name: fields[name] for name in _PLAIN}
        return json.dumps(fields, separators=(",", ":")) + "\n"


_DRAFTING = dict.fromkeys(Dispatch.__dataclass_fields__)
_PLAIN = dict.fromkeys(("purpose", "clock", "rows", "steps", "uses"))


def of(purpose: str, clock: int, rows: int, drafts: bool, result: DispatchResult) -> Dispatch:
    drafting: dict[str, Any] = (
        {
            "drafts": True,
            "offers": tuple(result.offers.sum(axis=0).tolist()),
            "won": int(result.won.sum()),
            "counts": tuple(map(tuple, result.counts.sum(axis=0).tolist())),
        }
        if drafts
        else {}
    )
    return Dispatch(
        purpose=purpose,
        clock=clock,
        rows=rows,
        steps=int(result.steps),
        uses=tuple(result.uses.sum(axis=0).tolist()),
        **drafting,
    )


@contextlib.contextmanager
def logged(engines: Iterable[Any], path: Path) -> Iterator[None]:
    """Appends a line to the file for every dispatch of every engine that reports, until the context ends.

    An engine reports when it has an attribute `report`. Without such an engine no file is made."""
    reporting = [engine for engine in engines if hasattr(engine, "report")]
    if not reporting:
        yield
        return
    with written.Log(path) as file:
        for engine in reporting:
            engine.report = lambda dispatch: file.write(dispatch.line())
        try:
            yield
        finally:
            for engine in reporting:
                engine.report = None


def read(line: str) -> Dispatch:
    """Returns the Dispatch of a line.

    Raises:
      ValueError: the line is not one of dispatches.jsonl.
    """
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a line of dispatches.jsonl ({error}): {line!r}") from None
    if not isinstance(fields, dict) or fields.keys() not in (_PLAIN.keys(), _DRAFTING.keys()):
        raise ValueError(
            f"not a line of dispatches.jsonl, which has {', '.join(_PLAIN)} and, where it drafted, "
            f"{', '.join(list(_DRAFTING)[5:])}: {line!r}"
        )
    if len(fields["uses"]) != len(USES):
        raise ValueError(
            f"a line of dispatches.jsonl has {len(fields['uses'])} uses of rows, not {len(USES)}: {line!r}"
        )
    fields |= {name: tuple(fields[name]) for name in ("uses", "offers") if name in fields}
    return Dispatch(**fields | {"counts": tuple(map(tuple, fields.get("counts", ())))})


class Counters:
    """Sums over dispatches since the last `metrics`, by metric name."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def add(self, name: str, amount: float) -> None:
        self._counts[name] = self._counts.get(name, 0) + amount

    def dispatch(self, purpose: str, size: int, steps: int, uses: Mapping[str, int], won: int) -> float:
        """Counts a dispatch of `steps` steps with `size` rows.

        Args:
          uses: rows by use (wire.USES).
          won: tokens that sequences took over from their clones.

        Returns:
          The tokens that one decode row settled on average, at least 1.
        """
        accepted = uses["draft_accepted"] + won
        if purpose == "train":
            self.add("spec/num_drafted", uses["draft_accepted"] + uses["draft_rejected"] + uses["clone"])
            self.add("spec/num_accepted", accepted)
        prefix = "rows" if purpose == "train" else f"{purpose}/rows"
        for use, count in uses.items():
            self.add(f"{prefix}/{use}", count)
        self.add(f"{prefix}/steps", steps)
        self.add(f"{prefix}/dispatches", 1)
        self.add(f"{prefix}/size_{size}", steps)
        return 1.0 + accepted / max(1, uses["decode"])

    def prefill(self, purpose: str, size: int, result: DispatchResult) -> int:
        """Counts passes of the wide prompt program with `size` rows. Returns the rows that computed a position."""
        uses = dict(zip(USES, result.uses.sum(axis=0).tolist()))
        self.dispatch(purpose, size, result.steps, uses, 0)
        return uses["prefill"]

    def metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, {}
        return {name: counts[name] for name in sorted(counts)}

    def state_dict(self) -> dict[str, float]:
        return dict(self._counts)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._counts = dict(state)
