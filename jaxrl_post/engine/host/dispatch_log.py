"""The log of dispatches: one JSON line of dispatches.jsonl for each dispatch, with its clock, rows, steps and row uses.

Invariant: a line is a function of the requests and of the device's results. It has no time of day and no machine name.
With this log and the rollout log, a run that drafted is replayed without a model (sim/twin.py).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxrl_post import written
from jaxrl_post.engine.host.wire import USES, DispatchResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """One dispatch, summed over replicas.

    clock: clock of `purpose` before the first step. steps, rows: number of steps, and rows of each. uses: rows by use,
    in the order of wire.USES. Only of a dispatch that drafts: offers, drafts by estimated chance; counts, judged and
    right drafts of each class; won, tokens that sequences took over from their clones."""

    purpose: str
    clock: int
    rows: int
    steps: int
    uses: tuple[int, ...]
    drafts: bool = False
    offers: tuple[int, ...] = ()
    counts: tuple[tuple[int, ...], ...] = ()
    won: int = 0

    def line(self) -> str:
        """Returns one line of JSON, with its newline. Fields of drafting appear only where the dispatch drafted."""
        fields = asdict(self)
        if not self.drafts:
            fields = {name: fields[name] for name in _PLAIN}
        return json.dumps(fields, separators=(",", ":")) + "\n"


_DRAFTING = dict.fromkeys(Dispatch.__dataclass_fields__)
_PLAIN = dict.fromkeys(("purpose", "clock", "rows", "steps", "uses"))


def of(purpose: str, clock: int, rows: int, drafts: bool, result: DispatchResult) -> Dispatch:
    """Returns the Dispatch of a device's result."""
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
