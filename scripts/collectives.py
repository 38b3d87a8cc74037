"""Counts the collectives of a compiled program from its text: kind, shape, bytes, how often, and in which loops.

Invariant: a loop's body counts as often as the compiler says that the loop turns. A loop whose count it does not say
counts once, and `unknown` names it. Bytes are those of the result on one device; of a reduce-scatter, of what goes in.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|branch_computations|called_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?")
_TURNS = re.compile(r'known_trip_count[^\d]*"?(\d+)"?')


@dataclass(frozen=True)
class Collective:
    """One collective of the text. `shapes`: dtype and sizes of each array. `turns`: how often it runs. `loops`: bodies."""

    kind: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    turns: int
    loops: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Of one run."""
        return sum(_bytes(*shape) for shape in self.shapes)

    def has_size(self, *sizes: int) -> bool:
        """Whether an array has one of these sizes along an axis."""
        return any(size in dims for _, dims in self.shapes for size in sizes)


def count(text: str) -> tuple[list[Collective], list[str]]:
    """Returns every collective that the program runs, and the loops whose number of turns is unknown."""
    lines = dict(_computations(text))
    entry = next(name for name, (is_entry, _) in lines.items() if is_entry)
    found: list[Collective] = []
    unknown: list[str] = []
    _walk(lines, entry, 1, (), found, unknown)
    return found, unknown


def _walk(lines: Mapping, name: str, turns: int, loops: tuple[str, ...], found: list, unknown: list) -> None:
    shapes = {}
    for result, made, operation, rest in lines[name][1]:
        shapes[result] = made
        kind = operation.removesuffix("-start")
        if kind in KINDS:
            found.append(Collective(kind, _moved(kind, operation, made, rest, shapes), turns, loops))
        inner = [one.strip().lstrip("%") for part in _CALLED.findall(rest) for one in part.split(",")]
        if operation == "while":
            told = _TURNS.search(rest)
            body = re.search(r"body=%?([\w.\-]+)", rest)[1]
            unknown += [] if told else [body]
            _walk(lines, body, turns * int(told[1] if told else 1), (*loops, body), found, unknown)
        elif not operation.endswith("-done") and kind not in KINDS:
            for one in inner:
                if one in lines:
                    _walk(lines, one, turns, loops, found, unknown)


def _moved(kind: str, operation: str, made: str, rest: str, shapes: Mapping[str, str]) -> tuple:
    """Returns the arrays that count: results, of a reduce-scatter the arguments. A start holds arguments and results."""
    arrays = _arrays(made)
    if kind == "reduce-scatter" or not arrays:
        given = [shapes.get(one, "") for one in re.findall(r"%([\w.\-]+)", rest.split("), ")[0])]
        return tuple(array for one in given for array in _arrays(one)) or tuple(arrays)
    if operation.endswith("-start") and made.startswith("("):
        largest = max(arrays, key=lambda array: _bytes(*array))
        return (largest,) if len(arrays) <= 4 else tuple(arrays[len(arrays) // 2 :])
    return tuple(arrays)


def _arrays(made: str) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (dtype, tuple(int(size) for size in dims.split(",") if size))
        for dtype, dims in _SHAPE.findall(made)
        if dtype in SIZES
    ]


def _bytes(dtype: str, dims: tuple[int, ...]) -> int:
    size = SIZES[dtype]
    for dim in dims:
        size *= dim
    return size


def _computations(text: str) -> Iterator[tuple[str, tuple[bool, list]]]:
    """Yields each computation: its name, whether it is the program's entry, and its instructions."""
    name, entry, inside = "", False, []
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head and " = " not in line.split("(")[0]:
            name, entry, inside = head[2], bool(head[1]), []
        elif line.startswith("}"):
            yield name, (entry, inside)
        elif hit := _LINE.match(line):
            inside.append(hit.groups())


def by_shape(found: list[Collective]) -> Counter:
    """Returns bytes of all runs by kind and shapes."""
    out: Counter = Counter()
    for one in found:
        words = " ".join(f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in one.shapes)
        out[f"{one.kind} {words} in {len(one.loops)} loops"] += one.bytes * one.turns
    return out
