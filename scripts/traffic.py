"""Counts what a compiled program computes and moves on one device: FLOPs, bytes of its memory, and of collectives.

- FLOPs: products alone, two for a multiplication and its addition, wherever they stand. XLA's own analysis counts a loop
  once; here its body counts as often as it turns (compiled_text).
- Bytes: what each line that runs on its own reads and writes. A fusion that takes a part of an array reads that part, and
  one that changes a part in place writes that part. What lies in a chip's own memory (a TPU's space 1) is free.
- A kernel is a box: `Kernel` says its FLOPs and bytes from the shapes around it. One without a formula is named in
  `unknown`, and so is a loop without a count. A fusion may hold a kernel, which then reads and writes parts of larger arrays.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import collectives
import compiled_text
from compiled_text import Array, Computation, Instruction, Program, Run

Kernel = Callable[[Sequence[Array], Sequence[Array]], tuple[float, float]]  # operands, results -> FLOPs, bytes
FREE = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "while", "conditional", "call", "after-all"}
FREE |= {"partition-id", "replica-id", "opt-barrier", "optimization-barrier", "iota", "domain", "add-dependency"}
FREE_CALLS = {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding", "SPMDFullToShardShape"}
OURS = r"mosaic_gpu|tpu_custom_call|triton"  # targets of kernels; a compiler marks lines inside of fusions by calls of other names
ASYNC_CALLS = {collectives.BEGINS, collectives.ENDS}  # the collective beside them counts
SLICES = ("dynamic-slice", "slice", "gather")
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # what changes a part in place: which operand holds the new part


@dataclass(frozen=True)
class Cost:
    """What one line costs in all its turns. `scope`: names of functions and scopes that the program's author gave."""

    scope: str
    operation: str
    flops: float
    bytes: float
    loops: tuple[str, ...]


@dataclass(frozen=True)
class Traffic:
    """The costs of a program's lines, its collectives, and what could not be counted."""

    costs: tuple[Cost, ...]
    collectives: tuple[collectives.Collective, ...]
    unknown: tuple[str, ...]

    def flops(self, scope: str = "") -> float:
        """Returns FLOPs of the lines whose scope matches."""
        return sum(one.flops for one in self.costs if re.search(scope, one.scope))

    def bytes(self, scope: str = "") -> float:
        """Returns bytes of the device's memory of the lines whose scope matches."""
        return sum(one.bytes for one in self.costs if re.search(scope, one.scope))

    @property
    def linked(self) -> float:
        """Bytes of all collectives."""
        return sum(one.bytes * one.turns for one in self.collectives)


def launched(program: Program) -> Iterator[Run]:
    """Yields what a device runs: each instruction but those that only name, hold or order things."""
    yield from (run for run in program.runs() if run.line.operation not in FREE)


def count(text: str, kernels: Mapping[str, Kernel] | None = None) -> Traffic:
    """Returns what a compiled program costs on one device.

    Args:
      kernels: pattern of a kernel's name, target and scope -> its formula.
    """
    program = compiled_text.read(text)
    costs, unknown = [], []
    for run in program.runs():
        inside = (run, *program.within(run))
        boxes = [_kernel(one, kernels or {}, unknown) for one in inside if _is_kernel(one.line, inner=one is not run)]
        flops, size = map(sum, zip(*boxes)) if boxes else (0.0, _moved(program, run))
        flops += sum(map(products, inside))
        if flops or size:
            costs.append(Cost(run.line.scope, run.line.operation, flops * run.turns, size * run.turns, run.loops))
    found, loops = collectives.count(text)
    return Traffic(tuple(costs), tuple(found), tuple(dict.fromkeys((*loops, *unknown))))


def moved(program: Program, run: Run, kernels: Mapping[str, Kernel]) -> float:
    """Returns the bytes of the device's memory that one line moves in one turn.

    Raises:
      ValueError: a kernel without a formula.
    """
    unknown: list[str] = []
    size = _kernel(run, kernels, unknown)[1] if _is_kernel(run.line) else _moved(program, run)
    if unknown:
        raise ValueError(f"kernels without a formula: {unknown}")
    return size


def _is_kernel(line: Instruction, *, inner: bool = False) -> bool:
    """Returns whether a line calls a kernel. inner: it stands inside of a fusion."""
    calls = line.operation.startswith("custom-call") and line.target not in FREE_CALLS | ASYNC_CALLS
    return calls and (not inner or bool(re.search(OURS, line.target)))


def _kernel(run: Run, kernels: Mapping[str, Kernel], unknown: list) -> tuple[float, float]:
    name = f"{run.line.name} {run.line.target} {run.line.scope}"
    for pattern, formula in kernels.items():
        if re.search(pattern, name):
            given = [array for line in run.inside.given(run.line) for array in line.arrays]
            return formula(given, run.line.arrays)
    unknown.append(name)
    return 0.0, 0.0


def products(run: Run) -> float:
    """Returns the FLOPs of a product, else nothing."""
    if run.line.operation == "dot":
        return 2.0 * _size(run.line.arrays[0].dims) * _contracted(run)
    if run.line.operation == "convolution":
        return _convolved(run)
    return 0.0


def _contracted(run: Run) -> int:
    dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", run.line.rest)
    left = run.inside.given(run.line)[0].arrays[0].dims
    return _size([left[int(at)] for at in dims[1].split(",")] if dims and dims[1] else [])


def _convolved(run: Run) -> float:
    """Counts the pairs of input and kernel that meet; TPUs write every product as a convolution."""
    lhs, rhs, out = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", run.line.rest).groups()
    left, right = (line.arrays[0].dims for line in run.inside.given(run.line)[:2])
    made = run.line.arrays[0].dims
    window = re.search(r"window=\{([^}]*)\}", run.line.rest)
    met = 1
    for label in (letter for letter in out if letter.isdigit()):
        at = [int(letter) for letter in sorted(letter for letter in out if letter.isdigit())].index(int(label))
        field = _window(window[1] if window else "", at)
        met *= _pairs(left[lhs.index(label)], right[rhs.index(label)], made[out.index(label)], field)
    return 2.0 * made[out.index("b")] * made[out.index("f")] * right[rhs.index("i")] * met


def _window(text: str, at: int) -> dict[str, int]:
    """Returns the settings of one spatial dimension of a window."""
    told = dict(part.split("=") for part in text.split())
    pad = told.get("pad", "").split("x")[at] if "pad" in told else "0_0"
    out = {"low": int(pad.split("_")[0])}
    for name, key in (("stride", "stride"), ("lhs_dilate", "base"), ("rhs_dilate", "spread")):
        out[key] = int(told[name].split("x")[at]) if name in told else 1
    return out


def _pairs(inputs: int, kernel: int, outputs: int, window: Mapping[str, int]) -> int:
    """Counts pairs (output, kernel position) whose input is there, neither padding nor a hole of dilation."""
    if kernel == 1 and outputs == inputs and window["low"] == 0 and window["base"] == window["stride"] == 1:
        return outputs
    span = (inputs - 1) * window["base"] + 1
    met = 0
    for position in range(kernel):
        for output in range(outputs):
            at = output * window["stride"] + position * window["spread"] - window["low"]
            met += 0 <= at < span and at % window["base"] == 0
    return met


def _moved(program: Program, run: Run) -> float:
    """Returns bytes that a line reads and writes in one turn."""
    line = run.line
    if line.operation in FREE or line.operation.endswith("-done") or line.target in FREE_CALLS | ASYNC_CALLS:
        return 0.0
    given = run.inside.given(line)
    if line.operation in ("copy-start", "slice-start"):
        return _copied(line.arrays[0 if line.operation == "copy-start" else 1], given[0].arrays[0])
    body = next((program.computations[name] for name in line.called if name in program.computations), None)
    if body is not None and line.operation in ("fusion", "fusion-start", "async-start"):
        return _fused(_opened(program, body), given, line)
    if line.operation in UPDATES:
        return 2.0 * _near(given[UPDATES[line.operation]].arrays[0])
    if line.operation in SLICES:
        return 2.0 * sum(map(_near, line.arrays))
    results = collectives.moved(run) if collectives.kind_of(line.operation) else line.arrays
    return float(sum(map(_near, (*(array for one in given for array in one.arrays), *results))))


def _near(array: Array) -> int:
    """Returns the bytes of an array in the device's memory, nothing where it lies elsewhere."""
    return 0 if array.place else array.bytes


def _copied(made: Array, given: Array) -> float:
    """Returns the bytes of a copy: of its size where it is read, and where it is written."""
    return float(made.bytes * ((not made.place) + (not given.place)))


def _opened(program: Program, body: Computation) -> Computation:
    """Returns a fusion's lines. A fusion in it that changes a part in place stands there by its own lines."""
    lines: list[Instruction] = []
    for line in body.lines:
        inner = next((program.computations[name] for name in line.called if name in program.computations), None)
        changes = line.operation == "fusion" and inner is not None and inner.root.operation in UPDATES
        lines.extend(_in_place_of(line, inner) if changes else [line])
    return Computation(name=body.name, is_entry=False, lines=tuple(lines))


def _in_place_of(fusion: Instruction, inner: Computation) -> Iterator[Instruction]:
    """Yields a fusion's lines under names of their own. What it is given stands there as bitcasts."""
    names = {one.name: f"{fusion.name}.{one.name}" for one in inner.lines} | {inner.root.name: fusion.name}
    for one in inner.lines:
        operation, rest = one.operation, re.sub(r"%([\w.\-]+)", lambda at: f"%{names.get(at[1], at[1])}", one.rest)
        if operation == "parameter":
            operation, rest = "bitcast", f"%{fusion.operands[int(rest.split(')')[0])]})"
        root = fusion.root and one is inner.root
        yield Instruction(name=names[one.name], made=one.made, operation=operation, rest=rest, root=root)


def _fused(body: Computation, given: Sequence[Instruction], fusion: Instruction) -> float:
    """Returns the bytes of a fusion: of each argument the parts that it takes, of each result the part that it changes."""
    numbers = {line.name: int(line.rest.split(")")[0]) for line in body.lines if line.operation == "parameter"}
    free = _passed(body, fusion)
    size = 0.0
    for name, number in numbers.items():
        if number < len(given):
            size += sum(_taken(body, name, array, free) for array in given[number].arrays)
    roots, made = _roots(body), fusion.arrays
    places = made if len(made) == len(roots) else [array for root in roots for array in root.arrays[:1]]
    written = (root for root, array in zip(roots, places, strict=False) if not array.place and root.name not in free)
    return size + sum(_changed(body, root) for root in written)


def _roots(body: Computation) -> list[Instruction]:
    """Returns the lines that make a fusion's results; of a collective that begins here, its own line."""
    if body.root.operation == "tuple" or body.root.target == collectives.BEGINS:
        return body.given(body.root)
    return [body.root]


def _passed(body: Computation, fusion: Instruction) -> set[str]:
    """Returns the lines that move nothing: what hands arguments on in their places, and collectives begun elsewhere."""
    calls = [line for line in body.lines if line.target in ASYNC_CALLS]
    if body.root in calls and body.root.target == collectives.BEGINS:
        return {body.root.name}
    kept = [line for at, line in enumerate(_roots(body)) if at in fusion.aliased]
    ends = [line for call in calls for line in body.given(call)]
    going = {line.name for line in (*kept, *ends) if collectives.kind_of(line.operation)}
    return going | {line.name for line in kept if line.operation == "parameter"} | {line.name for line in calls}


def _taken(body: Computation, name: str, array: Array, free: set[str]) -> float:
    """Returns the bytes of an argument that a fusion reads. Lines that are `free` read nothing."""
    size, left = 0.0, [name]
    while left and not array.place:
        own = left.pop()
        for line in (line for line in body.lines if own in line.operands and line.name not in free):
            first = line.operands[0] == own
            if line is body.root and line.operation == "tuple" and own in free:
                continue
            if line.operation == "bitcast":
                left.append(line.name)
            elif line.operation in SLICES and first:
                size += sum(one.bytes for one in line.arrays)
            elif not (line.operation in UPDATES and first):
                return float(array.bytes)
    return min(size, float(array.bytes))


def _changed(body: Computation, root: Instruction) -> float:
    """Returns the bytes of a result that a fusion writes."""
    line = root
    while line.operation == "bitcast" and body.given(line):
        line = body.given(line)[0]
    new = body.given(line)[UPDATES[line.operation]] if line.operation in UPDATES else root
    return float(sum(array.bytes for array in new.arrays))


def _size(dims: Sequence[int]) -> int:
    return math.prod(dims)
