"""What a dispatch did, as one line of dispatches.jsonl: when, how many steps of how many rows, what the rows were for.

Invariant: a line is a function of what the engine was asked and of what its device told: no time of day, no machine. With it
and the rollout log a run that drafted can be played again without a model (sim/twin.py).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxrl_post.engine.host.wire import USES, Told


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """`clock`: of `purpose`, before the first of `steps` steps of `rows` rows. Over all replicas, `uses`: rows by their use
    (columns.USES); and where it drafted, `offers`: drafts by estimated chance; `counts`: of each class of drafts those judged
    and those right; `won`: tokens that answers took over from their clones."""

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
        """JSON, with its newline; what only drafting has, only where it drafted."""
        fields = asdict(self)
        if not self.drafts:
            fields = {name: fields[name] for name in _PLAIN}
        return json.dumps(fields, separators=(",", ":")) + "\n"


_DRAFTING = dict.fromkeys(Dispatch.__dataclass_fields__)
_PLAIN = dict.fromkeys(("purpose", "clock", "rows", "steps", "uses"))


def of(purpose: str, clock: int, rows: int, drafts: bool, told: Told) -> Dispatch:
    """What a device told, summed over replicas."""
    drafting = (
        {
            "drafts": True,
            "offers": tuple(told.offers.sum(axis=0).tolist()),
            "won": int(told.won.sum()),
            "counts": tuple(map(tuple, told.counts.sum(axis=0).tolist())),
        }
        if drafts
        else {}
    )
    return Dispatch(
        purpose=purpose,
        clock=clock,
        rows=rows,
        steps=int(told.steps),
        uses=tuple(told.uses.sum(axis=0).tolist()),
        **drafting,
    )


@contextlib.contextmanager
def logged(engines: Iterable[Any], path: Path) -> Iterator[None]:
    """Until it is left, every dispatch of those that have a `report` becomes a line at the end of the file. None: no file."""
    reporting = [engine for engine in engines if hasattr(engine, "report")]
    if not reporting:
        yield
        return
    with open(path, "a", buffering=1, encoding="utf-8") as file:
        for engine in reporting:
            engine.report = lambda dispatch: file.write(dispatch.line())
        try:
            yield
        finally:
            for engine in reporting:
                engine.report = None


def read(line: str) -> Dispatch:
    """The dispatch of a line.

    Raises:
      ValueError: it is no such line.
    """
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"no line of dispatches.jsonl ({error}): {line!r}") from None
    if not isinstance(fields, dict) or fields.keys() not in (_PLAIN.keys(), _DRAFTING.keys()):
        raise ValueError(
            f"no line of dispatches.jsonl, which has {', '.join(_PLAIN)} and, where it drafted, "
            f"{', '.join(list(_DRAFTING)[5:])}: {line!r}"
        )
    if len(fields["uses"]) != len(USES):
        raise ValueError(
            f"a line of dispatches.jsonl has {len(fields['uses'])} uses of rows, not {len(USES)}: {line!r}"
        )
    fields |= {name: tuple(fields[name]) for name in ("uses", "offers") if name in fields}
    return Dispatch(**fields | {"counts": tuple(map(tuple, fields.get("counts", ())))})
