"""Counts the collectives of a compiled program from its text: kind, shape, bytes, how often, and in which loops.

Bytes are those of the result on one device; of a reduce-scatter, of what goes in. `compiled_text` says how often a line
runs. XLA:TPU writes a collective that runs beside other work into each of the fusions that it runs through. It counts
where it begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import compiled_text
from compiled_text import Array, Run

# Custom calls of the first and the last of several fusions.
BEGINS, ENDS = "AsyncCollectiveStart", "AsyncCollectiveDone"
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")


@dataclass(frozen=True)
class Collective:
    """One collective of the text. `shapes`: its arrays. `turns`: how often it runs. `loops`: bodies.

    `scope`: names of functions and scopes that the program's author gave."""

    kind: str
    shapes: tuple[Array, ...]
    turns: int
    loops: tuple[str, ...]
    scope: str = ""

    @property
    def bytes(self) -> int:
        return sum(shape.bytes for shape in self.shapes)

    def has_size(self, *sizes: int) -> bool:
        """Whether an array has one of these sizes along an axis."""
        return any(size in shape.dims for shape in self.shapes for size in sizes)


def count(text: str) -> tuple[list[Collective], list[str]]:
    """Returns every collective that the program runs, and the loops whose number of turns is unknown."""
    program = compiled_text.read(text)
    found, begun = [], set()
    for run in program.runs():
        for one in (run, *program.within(run)):
            kind = kind_of(one.line.operation)
            itself = (kind, one.line.channel, one.loops)
            if kind and itself not in begun:
                found.append(Collective(kind, moved(one), one.turns, one.loops, one.line.scope))
            if kind and _feeds(one, BEGINS):
                assert one.line.channel, f"collectives: {one.line.name} begins and has no channel to be known by"
                begun.add(itself)
            elif kind and _feeds(one, ENDS):
                begun.discard(itself)
    return found, program.unknown


def _feeds(run: Run, target: str) -> bool:
    return any(one.target == target and run.line.name in one.operands for one in run.inside.lines)


def kind_of(operation: str) -> str:
    """Returns the kind of collective that an operation is or starts, or nothing."""
    kind = operation.removesuffix("-start")
    return kind if kind in KINDS else ""


def moved(run: Run) -> tuple[Array, ...]:
    """Returns the arrays that count: results, of a reduce-scatter the arguments. A start holds arguments and results."""
    found = run.line.arrays
    if kind_of(run.line.operation) == "reduce-scatter" or not found:
        return tuple(array for line in run.inside.given(run.line) for array in line.arrays) or found
    if run.line.operation.endswith("-start") and run.line.made.startswith("("):
        largest = max(found, key=lambda array: array.bytes)
        return (largest,) if len(found) <= 4 else found[len(found) // 2 :]
    return found
