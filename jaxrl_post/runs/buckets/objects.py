"""The objects below an address: each is read and written whole.

Invariant: a call ends with the bucket's answer or with an error, within its patience. A call that was cut, delayed or
lost is tried again with growing pauses. So a write may reach the bucket more than once, and also where it raises.

One kind of object changes, with a compare-and-swap: `current`, `replace` and `drop`. All others are written once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jaxrl_post.config.address import Address
from jaxrl_post.runs.buckets.fsspec_store import FsspecStore
from jaxrl_post.runs.buckets.google_store import GoogleStore
from jaxrl_post.runs.buckets.store import Changed, Lost, Missing, ObjectBytes, Store, Unreachable

PATIENCE_S = 30.0
_PAUSE_S, _LONGEST_S = 0.1, 5.0  # between two attempts
_T = TypeVar("_T")


class Objects:
    """The objects whose names begin with that of the address.

    Args:
      patience_s: seconds for which one call is tried.

    Raises:
      ValueError: the client is not installed, or no credentials are found.
    """

    def __init__(self, address: Address, patience_s: float = PATIENCE_S):
        self.address, self._patience_s = address, patience_s
        self._store: Store = GoogleStore(address) if address.scheme == "gs" else FsspecStore(address)

    def read(self, name: str) -> bytes | None:
        """Returns an object, or None where there is none.

        Raises:
          Unreachable: no answer came in time.
          ValueError: the bucket refuses.
        """
        try:
            return self._tried(lambda: self._store.read(name))
        except Missing:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Writes an object whole, whatever is there.

        Raises:
          Unreachable: no answer came in time. The object may be written or not.
          ValueError: the bucket refuses.
        """
        self._in_a_bucket(lambda: self._store.write(name, data))

    def create(self, name: str, data: bytes) -> None:
        """Writes an object that is not there.

        Raises:
          Changed: it is there. Where an answer was lost, that may be this write's own.
          Unreachable, ValueError: as `write`.
        """
        self._in_a_bucket(lambda: self._store.create(name, data))

    def save(self, name: str, version: str, path: Path) -> None:
        """Writes an object of a version to a file, which may be larger than the memory.

        Raises:
          Changed: it has another version now, or is there no more.
          Unreachable, ValueError: as `read`.
        """
        try:
            self._tried(lambda: self._store.save(name, version, path))
        except Missing as error:
            raise Changed(f"{self.address}/{name} was changed while it was read") from error

    def names(self, place: str) -> list[str]:
        """Returns the names of the object `place` and of all below it, in order. Errors are those of `listed`."""
        return list(self.listed(place))

    def listed(self, place: str) -> dict[str, str]:
        """Returns the versions of the object `place` and of all below it, by name, in order. Empty: of all.

        Raises:
          Unreachable, ValueError: as `read`.
        """
        return dict(sorted(self._in_a_bucket(lambda: self._store.listed(place)).items()))

    def delete(self, name: str) -> None:
        """Deletes an object, if it is there.

        Raises:
          Unreachable, ValueError: as `read`.
        """
        try:
            self._tried(lambda: self._store.delete(name))
        except Missing:
            return

    # ---- the object that changes

    def current(self, name: str) -> ObjectBytes:
        """Returns the bytes and the generation of the object that changes. Errors are those of `read`."""
        return self._tried(lambda: self._store.current(name))

    def replace(self, name: str, data: bytes, generation: int) -> int:
        """Changes the object that changes, and returns its new generation.

        Args:
          generation: that it must have, as `current` gave it.

        Raises:
          Changed: it has another one. Where an answer was lost, that may be this write's own.
          Unreachable: no answer came in time. The object may be changed or not.
          ValueError: the bucket refuses, or cannot compare and swap.
        """
        return self._in_a_bucket(lambda: self._store.replace(name, data, generation))

    def drop(self, name: str, generation: int) -> None:
        """Takes the bytes of the object that changes away, if it has the generation. Errors are those of `read`."""
        try:
            self._tried(lambda: self._store.drop(name, generation))
        except (Missing, Changed):
            return

    def _in_a_bucket(self, once: Callable[[], _T]) -> _T:
        """As `_tried`, of a call that misses nothing but its bucket."""
        try:
            return self._tried(once)
        except Missing as error:
            raise ValueError(f"{self.address}: there is no bucket {self.address.bucket}; make it first") from error

    def _tried(self, once: Callable[[], _T]) -> _T:
        """Returns the result of a call that is tried until its patience ends."""
        deadline, pause = time.monotonic() + self._patience_s, _PAUSE_S
        while True:
            try:
                return once()
            except Lost as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Unreachable(f"{self.address} does not answer: {error}") from error
            time.sleep(min(left, pause * random.uniform(0.5, 1.0)))  # apart from others that lost the bucket
            pause = min(2 * pause, _LONGEST_S)
