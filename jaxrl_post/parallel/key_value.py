"""The key-value store of a job's coordinator: short texts and bytes that processes share without a device.

Needs joined processes (processes.start). jax has no public name for the store.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
from jax._src import distributed

_PREFIX = "jaxrl_post/"
LIMIT_S = 86400.0  # of a meeting; a watchdog ends a start that hangs earlier
_PART = 1 << 20  # characters of one message
_T = TypeVar("_T")
_ROUNDS = itertools.count()  # a meeting has a name that is used once, and all processes count alike


def put(key: str, text: str) -> None:
    """Puts a text under a key that is used once."""
    distributed.global_state.client.key_value_set(_PREFIX + key, text)


def get(key: str, limit_s: float) -> str:
    """Returns the text that some process puts under the key.

    Raises:
      TimeoutError: none did within `limit_s` seconds.
    """
    return _got(distributed.global_state.client.blocking_key_value_get, key, limit_s)


def put_bytes(key: str, data: bytes) -> None:
    """Puts bytes under a key that is used once."""
    distributed.global_state.client.key_value_set_bytes(_PREFIX + key, data)


def get_bytes(key: str, limit_s: float) -> bytes:
    """Returns the bytes that some process puts under the key.

    Raises:
      TimeoutError: none did within `limit_s` seconds.
    """
    return _got(distributed.global_state.client.blocking_key_value_get_bytes, key, limit_s)


def _got(read: Callable[[str, int], _T], key: str, limit_s: float) -> _T:
    try:
        return read(_PREFIX + key, int(limit_s * 1000))
    except RuntimeError as error:
        raise TimeoutError(f"{key}: not there after {limit_s:g} s") from error


def drop(key: str) -> None:
    """Frees what lies under a key."""
    distributed.global_state.client.key_value_delete(_PREFIX + key)


def meet(limit_s: float = LIMIT_S) -> None:
    """Waits until every process of the job has come here. A process by itself goes on.

    Programs take unequal time to compile. Devices that wait for each other at their first use have short limits of their
    own: 30 s on CPUs.

    Raises:
      TimeoutError: not all came within `limit_s` seconds.
    """
    if jax.process_count() == 1:
        return
    try:
        distributed.global_state.client.wait_at_barrier(f"{_PREFIX}meet/{next(_ROUNDS)}", int(limit_s * 1000))
    except RuntimeError as error:
        raise TimeoutError(f"not all processes of the job have compiled their programs within {limit_s:g} s") from error


@dataclass(frozen=True)
class Board:
    """Texts of any length under keys that begin with a name of their own. Each is put once, and may be removed."""

    name: str

    def put(self, key: str, text: str) -> None:
        """Puts a text under a key."""
        parts = [text[first : first + _PART] for first in range(0, len(text), _PART)]
        for number, part in enumerate(parts):
            put(f"{self.name}/{key}/{number}", part)
        put(f"{self.name}/{key}/parts", str(len(parts)))

    def get(self, key: str, limit_s: float) -> str:
        """Returns the text that some process puts under the key.

        Raises:
          TimeoutError: none did within `limit_s` seconds.
        """
        parts = int(get(f"{self.name}/{key}/parts", limit_s))
        return "".join(get(f"{self.name}/{key}/{number}", limit_s) for number in range(parts))

    def remove(self, key: str) -> None:
        """Removes a text that every process has read."""
        drop(f"{self.name}/{key}/")

    def meet(self, key: str, limit_s: float) -> bool:
        """Returns whether every process of the job came here within `limit_s` seconds. A key is used once."""
        try:
            distributed.global_state.client.wait_at_barrier(f"{_PREFIX}{self.name}/{key}", int(limit_s * 1000))
        except RuntimeError:
            return False
        return True


def place() -> tuple[int, int]:
    """Returns the index of this process and how many have joined. It asks for no device."""
    return distributed.global_state.process_id, distributed.global_state.num_processes


def coordinator() -> str:
    """Returns the host where process 0 is reached."""
    return distributed.global_state.coordinator_address.rpartition(":")[0].strip("[]")
