"""Reads and writes safetensors files one tensor at a time: 8 bytes of length, a JSON header, then the bytes.

Invariants:
- No file is mapped into memory, and only the requested part of a tensor is read. So reading needs the memory of that
  part alone.
- The whole header is checked before any tensor is read. Its tensors must fill the file without gaps and overlaps, to
  the last byte.

The safetensors library maps whole files, and writes only tensors that are all in memory at once.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_post.ring import json_text
from jaxrl_post.ring.json_text import said, shown

FLOATS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": jnp.dtype(jnp.bfloat16),
}
_READ = FLOATS | {"U8": np.dtype(np.uint8)}
_NAMES = {dtype: name for name, dtype in FLOATS.items()}
_NAMED = {
    8: ("F64", "I64", "U64"),
    4: ("F32", "I32", "U32"),
    2: ("F16", "BF16", "I16", "U16"),
    1: ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
}
_BYTES = {name: size for size, names in _NAMED.items() for name in names}
_LIMIT = 100_000_000  # most bytes of a header, by the format
_BLOCK = 1 << 24
_FARTHEST = 1 << 62  # largest size or offset


Box = tuple[slice, ...]  # start and stop in each dimension


class Entry(NamedTuple):
    """One tensor of a file. `type` is the format's name of its dtype, `start` its first byte in the file."""

    file: Path
    type: str
    shape: tuple[int, ...]
    start: int
    bytes: int


def entries(file: Path) -> dict[str, Entry]:
    """Returns every tensor of the file by name."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _LIMIT):
            raise ValueError(
                f"model {file}: not a whole safetensors file ({size} bytes, the first 8 promise a header of {length})"
            )
        head = opened.read(length)
    try:
        header = json_text.parsed(head.decode("utf-8"), "header")
        header.pop("__metadata__", None)
        out = {name: _entry(file, about, 8 + length) for name, about in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"model {file}: not a whole safetensors file ({_told(error)})") from error
    end = 8 + length
    for name, entry in sorted(out.items(), key=lambda item: (item[1].start, item[1].bytes)):
        if entry.start != end or entry.bytes != math.prod(entry.shape) * _BYTES[entry.type]:
            raise ValueError(
                f"model {file}: not a whole safetensors file (tensor {said(name)}, {entry.type}{shown(entry.shape)}, "
                f"has {entry.bytes} bytes from {entry.start}, expected from {end})"
            )
        end += entry.bytes
    if end != size:
        raise ValueError(f"model {file}: not a whole safetensors file ({size} bytes, its header asks for {end})")
    return out


def _entry(file: Path, about: Mapping, origin: int) -> Entry:
    (start, end), shape = about["data_offsets"], about["shape"]
    for number in (start, end, *shape):
        if type(number) is not int or not 0 <= number <= _FARTHEST:
            raise ValueError(f"{shown(number)} is no size or offset of a tensor")
    if about["dtype"] not in _BYTES:
        raise ValueError(f"no tensor is {shown(about['dtype'])}{shown(shape)}")
    shape = tuple(shape)
    return Entry(file, about["dtype"], shape, origin + start, end - start)


def _told(error: Exception) -> str:
    """Returns what is wrong with a header."""
    if isinstance(error, UnicodeDecodeError):
        return f"header: no UTF-8 text: {error.reason} at byte {error.start}"
    return f"header: {said(error) if type(error) is ValueError else said(repr(error))}"


def read(entry: Entry, box: Box | None = None) -> np.ndarray:
    """Returns the tensor, or a box of it, in memory of its own. Its type must be one of FLOATS, or bytes."""
    dtype, shape = _READ[entry.type], entry.shape
    box = box or tuple(slice(0, size) for size in shape)
    out = np.empty(tuple(side.stop - side.start for side in box), dtype)
    raw, done = out.reshape(-1).view(np.uint8), 0
    with open(entry.file, "rb", buffering=0) as opened:
        for start, count in _runs(shape, box):
            opened.seek(entry.start + start * dtype.itemsize)
            _fill(opened, raw[done : done + count * dtype.itemsize], entry.file)
            done += count * dtype.itemsize
    return out


def _runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """Returns offset and length of each stretch of neighbouring numbers in a box, in order."""
    whole = len(shape)  # dimensions from here on are whole, so that rows of the dimension before are neighbours
    while whole and (box[whole - 1].start, box[whole - 1].stop) == (0, shape[whole - 1]):
        whole -= 1
    strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    if not whole:
        yield 0, math.prod(shape)
        return
    side = box[whole - 1]
    first, count = side.start * strides[whole - 1], (side.stop - side.start) * strides[whole - 1]
    for place in itertools.product(*(range(part.start, part.stop) for part in box[: whole - 1])):
        yield first + sum(at * stride for at, stride in zip(place, strides)), count


class Finite:
    """Looks for numbers that are infinite or none in boxes of one tensor. Needs the memory of a block.

    The bits are compared: a number is not finite where its exponent has all bits set.
    """

    def __init__(self, where: str, name: str):
        self._where, self._name = where, name
        self._seen = self._wrong = 0
        self._first: tuple[tuple[int, ...], Any] | None = None  # place and number

    def add(self, value: np.ndarray, box: Box | None = None) -> None:
        """Looks through one box. `box`: where it lies in the tensor; None: it is the whole tensor."""
        words = np.dtype(f"u{value.dtype.itemsize}")
        exponent = np.full((), np.inf, value.dtype).view(words)
        bits = value.reshape(-1).view(words)
        self._dtype, self._seen = value.dtype, self._seen + bits.size
        first = None
        for start in range(0, bits.size, _BLOCK):
            bad = (bits[start : start + _BLOCK] & exponent) == exponent
            if bad.any():
                first = start + int(bad.argmax()) if first is None else first
                self._wrong += int(bad.sum())
        if first is not None:
            corner = [side.start for side in box] if box else [0] * value.ndim
            place = tuple(int(at) + more for at, more in zip(np.unravel_index(first, value.shape), corner))
            found = place, value.reshape(-1)[first]
            self._first = found if self._first is None else min(self._first, found, key=lambda one: one[0])

    def refuse(self) -> None:
        """Refuses a tensor with such a number."""
        if self._first is not None:
            place, number = self._first
            raise ValueError(
                f"{self._where}: tensor {self._name} holds {self._wrong} of {self._seen} numbers that are not finite "
                f"as {self._dtype}; the first is {number} at [{', '.join(map(str, place))}]"
            )


def refuse_other(entry: Entry, name: str, shape: tuple[int, ...]) -> None:
    """Refuses a tensor of another shape, or of a type that is not read."""
    if entry.shape != shape:
        raise ValueError(f"model {entry.file}: tensor {name} has shape {shown(entry.shape)}, expected {shape}")
    if entry.type not in FLOATS:
        raise ValueError(
            f"model {entry.file}: tensor {name} has type {entry.type}, expected one of {', '.join(sorted(FLOATS))}"
        )


def refuse_not_finite(where: str, name: str, value: np.ndarray) -> None:
    """Refuses a whole tensor with a number that is infinite or none; see Finite."""
    finite = Finite(where, name)
    finite.add(value)
    finite.refuse()


def same(one: Entry, other: Entry) -> bool:
    """Returns whether two tensors agree in type, shape and every byte. Compares them in blocks."""
    alike = (one.type, one.shape) == (other.type, other.shape)
    return alike and all(np.array_equal(*both) for both in zip(_blocks(one), _blocks(other), strict=True))


def _blocks(entry: Entry) -> Iterator[np.ndarray]:
    """Yields the bytes of a tensor, a block at a time."""
    with open(entry.file, "rb", buffering=0) as opened:
        opened.seek(entry.start)
        for done in range(0, entry.bytes, _BLOCK):
            raw = np.empty(min(_BLOCK, entry.bytes - done), np.uint8)
            _fill(opened, raw, entry.file)
            yield raw


def _fill(opened, raw: np.ndarray, file: Path) -> None:
    # One system call reads at most 2 GiB.
    view = memoryview(raw)
    while len(view):
        count = opened.readinto(view[: 1 << 30])
        if not count:
            raise ValueError(f"model {file}: not a whole safetensors file (it ended while it was read)")
        view = view[count:]


def write(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    values: Iterable[np.ndarray],
    copied: Mapping[str, Entry] = MappingProxyType({}),
) -> None:
    """Writes tensors of one dtype in order. Takes each from `values` only when it is written.

    `copied`: tensors of other files, which follow byte for byte. All tensors have to fill the file without gaps."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    own = {name: (_NAMES[dtype], shape, math.prod(shape) * dtype.itemsize) for name, shape in shapes.items()}
    for name, (kind, shape, size) in (own | {n: (e.type, e.shape, e.bytes) for n, e in copied.items()}).items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors start at multiples of 8
    with open(file, "wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for (name, shape), value in zip(shapes.items(), values, strict=True):
            assert value.shape == shape and value.dtype == dtype, (name, value.shape, shape, value.dtype)
            rows = max(_BLOCK // max(value[:1].nbytes, 1), 1) if value.ndim else 1
            for start in range(0, len(value) if value.ndim else 1, rows):
                # Contiguous first: the bytes of a transposed view would be in another order.
                block = np.ascontiguousarray(value[start : start + rows] if value.ndim else value)
                opened.write(memoryview(block.reshape(-1).view(np.uint8)))
        for entry in copied.values():
            for raw in _blocks(entry):
                opened.write(memoryview(raw))
