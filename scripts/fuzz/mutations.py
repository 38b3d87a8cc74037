"""Damages valid inputs: bytes, text and trees of JSON values."""

from __future__ import annotations

import copy
import json
import random as randoms
from typing import Any

DEEP, NESTED, DIGITS, BEYOND = "@deep@", "@nested@", "@digits@", "@beyond@"
_SPELLED = {  # what json.dumps cannot write
    DEEP: "[" * 100_000 + "]" * 100_000,
    NESTED: '{"a":' * 400 + "1" + "}" * 400,
    DIGITS: "9" * 5000,
    BEYOND: "1e999",
}
SCALARS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**62, 2**64, -(10**30), 10**400),
    *(0.5, -0.5, 1e308, 1e-320, float("nan"), float("inf"), -float("inf")),
    *("", "0", "1", "x", "null", "\ud800", "\udfffx", "\x00", "é\u2028", "a" * 5000, "default", "{{ x }}"),
    *([], {}, [None], [[1]], [1, "a"], {"a": None}, {"": 0}, {"content": 5}, {"content": "\ud800"}),
    *(DEEP, NESTED, DIGITS, BEYOND),
)
_PIECES = (b"\xff\xfe", b"\x00" * 8, b"\xed\xa0\x80", b"\\ud800", b"NaN", b"1e999", b"null", b"[" * 3000, b'"', b"}")


def damaged(random: randoms.Random, data: bytes) -> tuple[str, bytes]:
    """Returns what was done, and the bytes with one or several faults in them."""
    name, work = random.choice(tuple(_BYTES.items()))
    return name, work(random, data)


def _flipped(random: randoms.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        out[random.randrange(len(out))] ^= 1 << random.randrange(8)
    return bytes(out)


def _overwritten(random: randoms.Random, data: bytes) -> bytes:
    at, size = random.randrange(len(data)), random.choice((1, 4, 8, 16))
    return data[:at] + random.choice((b"\x00", b"\xff", random.randbytes(1))) * size + data[at + size :]


def _inserted(random: randoms.Random, data: bytes) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + random.choice(_PIECES) + data[at:]


def _removed(random: randoms.Random, data: bytes) -> bytes:
    at = random.randrange(len(data))
    return data[:at] + data[at + random.choice((1, 2, 16, 200)) :]


def _repeated(random: randoms.Random, data: bytes) -> bytes:
    at = random.randrange(len(data))
    return data[:at] + data[at : at + random.choice((1, 8, 100))] * random.choice((2, 30)) + data[at:]


_BYTES = {
    "bits flipped": _flipped,
    "a bit flipped near the start": lambda random, data: _flipped(random, data[:96]) + data[96:],
    "truncated": lambda random, data: data[: random.randrange(len(data))],
    "overwritten": _overwritten,
    "inserted": _inserted,
    "removed": _removed,
    "repeated": _repeated,
    "extended": lambda random, data: data + random.randbytes(random.choice((1, 4, 64))),
}


def changed(random: randoms.Random, tree: Any) -> tuple[str, Any]:
    """Returns what was done, and a copy of a JSON value with one or two members changed."""
    tree, done = copy.deepcopy(tree), []
    for _ in range(random.choice((1, 1, 1, 2))):
        place = random.choice([*_places(tree, ())] or [()])
        if not place:
            done.append("whole")
            tree = _scalar(random)
            break
        holder = tree
        for step in place[:-1]:
            holder = holder[step]
        done.append(f"{'.'.join(map(str, place))} {_change(random, holder, place[-1])}")
    return ", ".join(done), tree


def _scalar(random: randoms.Random) -> Any:
    """Returns a value of its own: a later change must not reach the table."""
    return copy.deepcopy(random.choice(SCALARS))


def _places(tree: Any, at: tuple) -> Any:
    if len(at) > 0 or randoms.Random(repr(tree)[:50]).random() < 0.1:
        yield at
    members = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, member in members:
        yield from _places(member, (*at, name))


def _change(random: randoms.Random, holder: Any, name: Any) -> str:
    """Changes one member of a mapping or of a list."""
    kind = random.choice(("scalar", "scalar", "scalar", "scalar", "removed", "renamed", "wrapped", "scaled"))
    if kind == "removed":
        del holder[name]
    elif kind == "renamed" and isinstance(holder, dict):
        holder[str(name)[::-1]] = holder.pop(name)
    elif kind == "wrapped":
        holder[name] = random.choice(([holder[name]], {"value": holder[name]}, [holder[name]] * 3))
    elif kind == "scaled" and isinstance(holder[name], (int, float)) and not isinstance(holder[name], bool):
        holder[name] = holder[name] * random.choice((-1, 0, 3, 1000, 10**9, 10**12))
    else:
        holder[name] = _scalar(random)
        kind = f"= {repr(holder[name])[:30]}"
    return kind


def dumped(tree: Any, ascii_only: bool = True) -> bytes:
    """Returns the value as JSON. Stands for what no value says: depth, 5,000 digits, 1e999. Surrogates become bytes."""
    text = json.dumps(tree, ensure_ascii=ascii_only)
    for stand_in, spelled in _SPELLED.items():
        text = text.replace(f'"{stand_in}"', spelled)
    return text.encode("utf-8", errors="surrogatepass")


def damaged_json(random: randoms.Random, tree: Any) -> tuple[str, bytes]:
    """Returns what was done, and JSON of a changed value, or damaged bytes of the valid JSON."""
    if random.random() < 0.7:
        what, other = changed(random, tree)
        return what, dumped(other, ascii_only=random.random() < 0.8)
    return damaged(random, dumped(tree))
