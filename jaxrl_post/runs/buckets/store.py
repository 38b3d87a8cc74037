"""What a store of objects does in one attempt, and how that can end.

google_store.py and fsspec_store.py are such stores. objects.py tries an attempt again, and is the door to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

LATER = (408, 429, 500, 502, 503, 504)  # statuses after which a call is tried again


class Unreachable(RuntimeError):
    """The bucket gave no answer in time. It may give one later."""


class Changed(RuntimeError):
    """An object is there, or is another one than the call asked for. Nothing was written."""


class Missing(LookupError):
    """There is no such object, or no such bucket."""


class Lost(RuntimeError):
    """An attempt had no answer or a broken one. What it asked for may be done or not."""


@dataclass(frozen=True, kw_only=True)
class ObjectBytes:
    """The bytes of an object that changes, and its generation. Without such an object: no bytes. Every change raises
    the generation; 0 stands for an object that never was there."""

    data: bytes
    generation: int


class Store(Protocol):
    """One attempt at each call. `name` is below the store's address; `version` is a text that changes with an object.

    Every method may raise Lost, or ValueError with one sentence where the store refuses.
    """

    def read(self, name: str) -> bytes:
        """Returns an object's bytes. Raises Missing."""

    def write(self, name: str, data: bytes) -> None:
        """Writes an object, whatever is there. Raises Missing without a bucket."""

    def create(self, name: str, data: bytes) -> None:
        """Writes an object that is not there. Raises Changed where it is, and Missing without a bucket."""

    def save(self, name: str, version: str, path: Path) -> None:
        """Writes an object to a file. Raises Missing, or Changed where it has another version."""

    def listed(self, place: str) -> dict[str, str]:
        """Returns the versions of the object `place` and of all below it, by name. Empty: of all. May raise Missing."""

    def delete(self, name: str) -> None:
        """Deletes an object. May raise Missing."""

    def current(self, name: str) -> ObjectBytes:
        """Returns the object of this name that changes."""

    def replace(self, name: str, data: bytes, generation: int) -> int:
        """Changes it and returns its new generation. Raises Changed where it has another one than `generation`."""

    def drop(self, name: str, generation: int) -> None:
        """Takes its bytes away. Raises Changed where it has another generation."""


def one_line(error: object) -> str:
    """Returns the words of an error on one line, cropped."""
    return " ".join(str(error).split())[:300]
