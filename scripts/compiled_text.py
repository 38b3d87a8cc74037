"""Reads a compiled program's text: its computations, their instructions, and how often each instruction runs.

Invariant: a loop's body counts as often as the compiler says that the loop turns. Where it does not say, the loop's own
condition does: a counter that begins at a constant, rises by a constant, and is compared with one. A loop whose count
neither says counts once, and is named. Every branch of a conditional counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "f32": 4}
SIZES |= {"s64": 8, "u64": 8, "f64": 8, "s4": 1, "u4": 1}
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(r"(?:calls|to_apply|body|branch_computations|called_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%?[\w.\-]+))")
_TURNS = re.compile(r'known_trip_count[^\d]*"?(\d+)"?')
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclass(frozen=True)
class Array:
    """One array of a type. `place`: its memory space; 0 is the device's memory, 1 on a TPU the chip's own."""

    dtype: str
    dims: tuple[int, ...]
    place: int = 0

    @property
    def dtype_bytes(self) -> int:
        return SIZES[self.dtype]

    @property
    def bytes(self) -> int:
        size = self.dtype_bytes
        for dim in self.dims:
            size *= dim
        return size


@dataclass(frozen=True)
class Instruction:
    """One line. `rest`: what stands behind the operation's name. `operands`: names of what goes in."""

    name: str
    made: str
    operation: str
    rest: str
    root: bool = False

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        return arrays(self.made)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(re.findall(r"%([\w.\-]+)", _inside(self.rest)))

    @property
    def called(self) -> list[str]:
        """Names of computations."""
        names = [one.strip().lstrip("%") for part in _CALLED.findall(self.rest) for one in part.split(",")]
        branches = [
            one.strip().lstrip("%") for pair in _BRANCHES.findall(self.rest) for one in ",".join(pair).split(",")
        ]
        return list(dict.fromkeys(name for name in (*names, *branches) if name))

    @property
    def scope(self) -> str:
        """The names of functions and scopes that the program's author gave, or nothing."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def channel(self) -> str:
        """Of a collective, or nothing."""
        found = re.search(r"\bchannel_id=(\d+)", self.rest)
        return found[1] if found else ""

    @cached_property
    def aliased(self) -> frozenset[int]:
        """Numbers of the results that take the place of an operand in memory; of a lone result, 0."""
        told = re.search(r"output_to_operand_aliasing=\{((?:[^{}]|\{[^{}]*\}|\([^()]*\))*)\}", self.rest)
        if told is None:
            return frozenset()
        pairs = re.findall(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}", told[1])
        assert len(pairs) == told[1].count(":"), f"compiled_text: {self.name} has aliases that are not read: {told[1]}"
        return frozenset(int(at or 0) for at, _, part in pairs if "," not in at and not part)

    @property
    def target(self) -> str:
        """Of a custom call."""
        found = re.search(r'custom_call_target="([^"]*)"', self.rest)
        return found[1] if found else ""


@dataclass(frozen=True)
class Computation:
    """Instructions in order."""

    name: str
    is_entry: bool
    lines: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {line.name: line for line in self.lines}

    def given(self, line: Instruction) -> list[Instruction]:
        """Returns what goes into a line, in order."""
        return [self.by_name[name] for name in line.operands if name in self.by_name]

    @cached_property
    def root(self) -> Instruction:
        return next((line for line in self.lines if line.root), self.lines[-1])


@dataclass(frozen=True)
class Run:
    """One instruction, how often it runs, and the loops around it, by their bodies' names."""

    line: Instruction
    inside: Computation
    turns: int
    loops: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """The computations of a text by name."""

    computations: Mapping[str, Computation]
    unknown: list[str] = field(default_factory=list)

    def runs(self) -> Iterator[Run]:
        """Yields what runs on its own, loops and branches followed, fusions not entered. Fills `unknown`."""
        entry = next(one for one in self.computations.values() if one.is_entry)
        self.unknown.clear()
        yield from self._walk(entry, 1, ())

    def _walk(self, inside: Computation, turns: int, loops: tuple[str, ...]) -> Iterator[Run]:
        for line in inside.lines:
            yield Run(line, inside, turns, loops)
            if line.operation == "while":
                body, times = self._body(line), self.turns(line, inside)
                self.unknown.extend([] if times else [body.name])
                yield from self._walk(body, turns * (times or 1), (*loops, body.name))
            elif line.operation in ("conditional", "call"):
                for name in line.called:
                    yield from self._walk(self.computations[name], turns, loops)

    def _body(self, loop: Instruction) -> Computation:
        return self.computations[re.search(r"body=%?([\w.\-]+)", loop.rest)[1]]

    def turns(self, loop: Instruction, outside: Computation) -> int:
        """Returns how often a loop turns, or 0 where neither the compiler nor the condition says."""
        if told := _TURNS.search(loop.rest):
            return int(told[1])
        condition = self.computations.get(re.search(r"condition=%?([\w.\-]+)", loop.rest)[1])
        if condition is None:
            return 0
        test = condition.root
        sides = condition.given(test)
        if test.operation != "compare" or len(sides) != 2 or "direction=LT" not in test.rest:
            return 0
        at, end = _index(sides[0]), _constant(sides[1])
        first = _constant(_element(outside, loop, at))
        step = self._step(self._body(loop), at)
        return -(-(end - first) // step) if None not in (at, end, first, step) else 0

    def _step(self, body: Computation, at: int | None) -> int | None:
        """Returns by how much a loop's counter rises in one turn."""
        raised = None if at is None else _element(body, body.root, at, of_tuple=True)
        if raised is None or raised.operation not in ("add", "fusion"):
            return None
        inside = body if raised.operation == "add" else self.computations[raised.called[0]]
        line = raised if raised.operation == "add" else inside.root
        steps = [_constant(one) for one in inside.given(line)] if line.operation == "add" else []
        return next((step for step in steps if step is not None), None)

    def within(self, run: Run) -> Iterator[Run]:
        """Yields the lines of the fusion that the run is, at every depth; none where it is no fusion."""
        if run.line.operation not in ("while", "conditional", "call") and not run.line.operation.endswith("-done"):
            for name in run.line.called:
                if name in self.computations:
                    for line in self.computations[name].lines:
                        inner = Run(line, self.computations[name], run.turns, run.loops)
                        yield inner
                        yield from self.within(inner)


def read(text: str) -> Program:
    """Returns the program of a text."""
    return Program({one.name: one for one in _computations(text)})


def arrays(made: str) -> tuple[Array, ...]:
    """Returns the arrays of a type, those of a tuple in order."""
    out = []
    for dtype, dims, layout in _ARRAY.findall(made):
        if dtype in SIZES:
            place = re.search(r"S\((\d+)\)", layout)
            sizes = tuple(int(size) for size in dims.split(",") if size)
            out.append(Array(dtype, sizes, int(place[1]) if place else 0))
    return tuple(out)


def _index(line: Instruction) -> int | None:
    """Returns which element of a tuple a line takes."""
    found = re.search(r"index=(\d+)", line.rest) if line.operation == "get-tuple-element" else None
    return int(found[1]) if found else None


def _constant(line: Instruction | None) -> int | None:
    found = re.match(r"(-?\d+)\)", line.rest) if line is not None and line.operation == "constant" else None
    return int(found[1]) if found else None


def _element(inside: Computation, line: Instruction, at: int | None, *, of_tuple: bool = False) -> Instruction | None:
    """Returns what makes one element of the tuple that goes into a line, or that the line is. Copies are followed."""
    if at is None:
        return None
    made = line if of_tuple else next(iter(inside.given(line)), None)
    if made is None or made.operation != "tuple" or len(made.operands) <= at:
        return None
    found = inside.by_name.get(made.operands[at])
    while found is not None and found.operation in ("copy", "copy-done", "copy-start", "bitcast"):
        found = next(iter(inside.given(found)), None)
    return found


def _inside(rest: str) -> str:
    """Returns the text up to the parenthesis that closes the operands."""
    depth = 1
    for at, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return rest[:at]
    return rest


def _computations(text: str) -> Iterator[Computation]:
    name, entry, inside = "", False, []
    for raw in text.splitlines():
        line = _COMMENT.sub("", raw)
        head = _HEAD.match(line)
        if head and " = " not in line.split("(")[0]:
            name, entry, inside = head[2], bool(head[1]), []
        elif line.startswith("}"):
            yield Computation(name, entry, tuple(inside))
        elif hit := _LINE.match(line):
            inside.append(Instruction(hit[2], hit[3], hit[4], hit[5], bool(hit[1])))
