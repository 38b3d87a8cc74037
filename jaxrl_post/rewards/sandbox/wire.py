"""Frames between processes, and values between a judged program and the process that tests it.

The judged program may tamper with its own side. So the reader trusts nothing: it builds exact built-in types only, and
every malformed or too large frame raises `Broken`. Uses the standard library alone, because the program's side runs
without the package.
"""

from __future__ import annotations

import collections
import importlib
import json
import struct
import zlib

LARGEST = 16 << 20  # bytes of a frame
_HEAD = struct.Struct("!II")  # length, CRC-32
_PLAIN_INT = 1 << 53


class Broken(Exception):
    """A frame is malformed, too large, or holds no value of this format."""


def pack(message: object, largest: int = LARGEST, default=None) -> bytes:
    """Returns a message of JSON types as a frame: its length, its checksum, then JSON.

    `default`: as of json.dumps, for other types.

    Raises:
      Broken: the frame has more than `largest` bytes, or the message is nested too deeply.
    """
    try:
        body = json.dumps(message, default=default).encode()
    except RecursionError:
        raise Broken("nested too deeply") from None
    if len(body) > largest:
        raise Broken(f"{len(body)} bytes, more than {largest}")
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def unpack(buffer: bytearray, largest: int = LARGEST) -> dict | None:
    """Takes the first complete frame out of `buffer`. Returns None when there is none yet.

    Raises:
      Broken: the length, the checksum or the JSON is wrong, or the message is no dict.
    """
    if len(buffer) < _HEAD.size:
        return None
    length, checksum = _HEAD.unpack_from(buffer)
    if length > largest:
        raise Broken(f"a frame of {length} bytes, more than {largest}")
    end = _HEAD.size + length
    if len(buffer) < end:
        return None
    body = bytes(buffer[_HEAD.size : end])
    del buffer[:end]
    if zlib.crc32(body) != checksum:
        raise Broken("a frame whose checksum is wrong")
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Broken(f"a frame that is no JSON: {error}") from None
    if not isinstance(message, dict):
        raise Broken(f"a frame with a {type(message).__name__}, not a dict")
    return message


def receive(channel, buffer: bytearray, largest: int = LARGEST) -> dict:
    """Returns the next message of a socket.

    Raises:
      EOFError: the other end is closed.
      Broken: as `unpack` does.
    """
    while (message := unpack(buffer, largest)) is None:
        data = channel.recv(1 << 16)
        if not data:
            raise EOFError
        buffer += data
    return message


def encode(value: object, refer) -> object:
    """Returns a value as JSON types. `refer`: maps an object of another type to a JSON value, or raises TypeError.

    Subclasses of built-in types become the built-in type.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        value = int(value)
        return value if -_PLAIN_INT < value < _PLAIN_INT else ["i", hex(value)]
    if isinstance(value, float):
        return float(value)
    for types, tag in _SEQUENCES:
        if isinstance(value, types):
            return [tag, *(encode(item, refer) for item in value)]
    if isinstance(value, dict):
        return ["d", *([encode(key, refer), encode(item, refer)] for key, item in value.items())]
    kind = type(value)
    if (known := _SCALARS.get(f"{kind.__module__}.{kind.__qualname__}")) is not None:
        return [known[0], *known[1](value)]
    if kind is type and _TYPES.get(value.__name__) is value:
        return ["k", value.__name__]
    if kind.__module__ == "numpy" and hasattr(value, "item") and getattr(value, "shape", None) == ():
        return encode(value.item(), refer)
    return refer(value)


_SEQUENCES = ((list, "l"), (tuple, "t"), (frozenset, "z"), (set, "s"), (collections.deque, "q"))
_TYPES = {
    kind.__name__: kind
    for kind in (bool, bytearray, bytes, complex, dict, float, frozenset, int, list, object, range, set, str, tuple)
}
# By name, so that no module is imported that the program does not use.
_SCALARS = {
    "builtins.complex": ("c", lambda value: (value.real, value.imag)),
    "builtins.bytes": ("b", lambda value: (value.hex(),)),
    "builtins.bytearray": ("B", lambda value: (value.hex(),)),
    "builtins.range": ("r", lambda value: tuple(hex(part) for part in (value.start, value.stop, value.step))),
    "decimal.Decimal": ("D", lambda value: (str(value),)),
    "fractions.Fraction": ("F", lambda value: (hex(value.numerator), hex(value.denominator))),
    "datetime.datetime": ("T", lambda value: (value.isoformat(),)),
    "datetime.date": ("Y", lambda value: (value.isoformat(),)),
    "datetime.time": ("M", lambda value: (value.isoformat(),)),
    "datetime.timedelta": ("W", lambda value: (value.days, value.seconds, value.microseconds)),
}


def _class(name: str):
    module, _, member = name.rpartition(".")
    return getattr(importlib.import_module(module), member)


_BUILD = {
    "l": lambda items: items,
    "t": tuple,
    "s": set,
    "z": frozenset,
    "q": collections.deque,
    "c": lambda items: complex(*map(float, items)),
    "i": lambda items: int(items[0], 16),
    "b": lambda items: bytes.fromhex(items[0]),
    "B": lambda items: bytearray.fromhex(items[0]),
    "k": lambda items: _TYPES[items[0]],
    "r": lambda items: range(*(int(item, 16) for item in items)),
    "D": lambda items: _class("decimal.Decimal")(items[0]),
    "F": lambda items: _class("fractions.Fraction")(*(int(item, 16) for item in items)),
    "T": lambda items: _class("datetime.datetime").fromisoformat(items[0]),
    "Y": lambda items: _class("datetime.date").fromisoformat(items[0]),
    "M": lambda items: _class("datetime.time").fromisoformat(items[0]),
    "W": lambda items: _class("datetime.timedelta")(*items),
}
_NESTED = "ltszq"


def decode(given: object, refer) -> object:
    """Returns the value of what `encode` gave. `refer`: maps the content of a reference to an object.

    Raises:
      Broken: no such value.
    """
    try:
        return _decoded(given, refer)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Broken(f"no value: {type(error).__name__}: {str(error)[:200]}") from None


def _decoded(given: object, refer) -> object:
    if not isinstance(given, list):
        if isinstance(given, dict):
            raise ValueError("a dict")
        return given if given == given else float("nan")  # each its own object, as keys of a dict are told apart
    tag, *items = given
    if tag == "d":
        return {_decoded(key, refer): _decoded(item, refer) for key, item in items}
    if tag == "h":
        return refer(items)
    if tag in _NESTED:
        items = [_decoded(item, refer) for item in items]
    return _BUILD[tag](items)
