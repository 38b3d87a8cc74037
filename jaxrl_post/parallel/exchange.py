"""What processes send each other without a device: through the key-value store of jax's coordinator.

- `meet`, `broadcast` and `gather` are for all processes at once. Every process calls them in the same order.
- A Board has texts under keys, for processes and threads that do not come at the same time.
- A Relay has the messages of one process for all others, such as results of a dispatch and metrics of a step.

So no process waits for a device that computes something else. Needs joined processes (processes.start). jax has no public
name for the store.

Invariant: all processes that receive a topic receive all its messages, in the order in which they were sent.
"""

from __future__ import annotations

import io
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax._src import distributed

_PREFIX = "jaxrl_post/"
LIMIT_S = 86400.0  # of a meeting; a watchdog ends a start that hangs earlier
_ENTRY = 1 << 20  # bytes of one entry of the store
_SIZE = 8  # bytes of a message's length
# A name is used once, and all processes count alike.
_MEETINGS, _BROADCASTS, _GATHERINGS, _TOPICS = (itertools.count() for _ in range(4))


def put(key: str, data: bytes) -> None:
    """Puts bytes of any length under a key that is used once."""
    whole = len(data).to_bytes(_SIZE, "big") + data
    for number in range(-(-len(whole) // _ENTRY)):
        entry = whole[number * _ENTRY : (number + 1) * _ENTRY]
        distributed.global_state.client.key_value_set_bytes(f"{_PREFIX}{key}/{number}", entry)


def get(key: str, limit_s: float) -> bytes:
    """Returns the bytes that some process puts under the key.

    Raises:
      TimeoutError: none did within `limit_s` seconds.
    """
    read, limit_ms = distributed.global_state.client.blocking_key_value_get_bytes, int(limit_s * 1000)
    try:
        whole = read(f"{_PREFIX}{key}/0", limit_ms)
        size = _SIZE + int.from_bytes(whole[:_SIZE], "big")
        for number in range(1, -(-size // _ENTRY)):
            whole += read(f"{_PREFIX}{key}/{number}", limit_ms)
    except RuntimeError as error:
        raise TimeoutError(f"{key}: not there after {limit_s:g} s") from error
    return whole[_SIZE:]


def drop(key: str) -> None:
    """Frees what lies under a key."""
    distributed.global_state.client.key_value_delete(f"{_PREFIX}{key}/")


def meet(limit_s: float = LIMIT_S) -> None:
    """Waits until every process of the job has come here. A process by itself goes on.

    Programs take unequal time to compile. Devices that wait for each other at their first use have short limits of their
    own: 30 s on CPUs.

    Raises:
      TimeoutError: not all came within `limit_s` seconds.
    """
    if jax.process_count() > 1 and not _all_came(f"meet/{next(_MEETINGS)}", limit_s):
        raise TimeoutError(f"not all processes of the job have compiled their programs within {limit_s:g} s")


def _all_came(name: str, limit_s: float) -> bool:
    """Returns whether every process of the job came here within `limit_s` seconds. A name is used once."""
    try:
        distributed.global_state.client.wait_at_barrier(f"{_PREFIX}{name}", int(limit_s * 1000))
    except RuntimeError:
        return False
    return True


def broadcast(data: bytes) -> bytes:
    """Returns process 0's bytes on every process, once all have come here. What the others give is not looked at.

    Raises:
      TimeoutError: not all came within a day.
    """
    if jax.process_count() == 1:
        return data
    number = next(_BROADCASTS)
    if jax.process_index() == 0:
        put(f"broadcast/{number}", data)
    if not _all_came(f"broadcast/{number}/met", LIMIT_S):
        raise TimeoutError(f"not all processes of the job came to the broadcast {number} within {LIMIT_S:g} s")
    if jax.process_index() != 0:
        return get(f"broadcast/{number}", LIMIT_S)
    if number:  # all have come here, so they have read what was broadcast before
        drop(f"broadcast/{number - 1}")
    return data


def broadcast_text(text: str) -> str:
    """Returns process 0's text on every process. Waits and errors are those of `broadcast`."""
    return broadcast(text.encode()).decode()


def broadcast_array(array: np.ndarray) -> np.ndarray:
    """Returns process 0's array on every process, with the same bits. All processes give the same shape and dtype."""
    if jax.process_count() == 1:
        return array
    return np.frombuffer(broadcast(array.tobytes()), array.dtype).reshape(array.shape)


def gather(data: bytes, limit_s: float = LIMIT_S) -> list[bytes]:
    """Returns on process 0 what every process gives, in their order. The others go on at once, with an empty list.

    Raises:
      TimeoutError: on process 0, where another one gave nothing within `limit_s` seconds.
    """
    name, me = f"gather/{next(_GATHERINGS)}", jax.process_index()
    if me != 0:
        put(f"{name}/{me}", data)
        return []
    found = [data, *(get(f"{name}/{index}", limit_s) for index in range(1, jax.process_count()))]
    drop(name)
    return found


def first_text(text: str) -> str:
    """Returns the text of the first process that has one, on every process, or an empty text."""
    if jax.process_count() == 1:
        return text
    return broadcast(next(filter(None, gather(text.encode())), b"")).decode()


@dataclass(frozen=True)
class Board:
    """Texts of any length under keys that begin with a name of their own. Each is put once, and may be removed."""

    name: str

    def put(self, key: str, text: str) -> None:
        """Puts a text under a key."""
        put(f"{self.name}/{key}", text.encode())

    def get(self, key: str, limit_s: float) -> str:
        """Returns the text that some process puts under the key.

        Raises:
          TimeoutError: none did within `limit_s` seconds.
        """
        return get(f"{self.name}/{key}", limit_s).decode()

    def remove(self, key: str) -> None:
        """Removes a text that every process has read."""
        drop(f"{self.name}/{key}")

    def meet(self, key: str, limit_s: float) -> bool:
        """Returns whether every process of the job came here within `limit_s` seconds. A key is used once."""
        return _all_came(f"{self.name}/{key}", limit_s)


def place() -> tuple[int, int]:
    """Returns the index of this process and how many have joined. It asks for no device."""
    return distributed.global_state.process_id, distributed.global_state.num_processes


def coordinator() -> str:
    """Returns the host where process 0 is reached."""
    return distributed.global_state.coordinator_address.rpartition(":")[0].strip("[]")


class Relay:
    """One topic of one process, `sender`. `topic`: a name that is used once in the job.

    Raises:
      TimeoutError: a message does not come within a day. A watchdog ends a run that hangs earlier.
    """

    def __init__(self, topic: str, sender: int):
        self._topic, self.sender = topic, sender
        self._count = 0
        self._sent: list[str] = []  # keys since the last call of `release_received`
        self._received: list[str] = []  # keys before it

    @property
    def sends(self) -> bool:
        """Returns whether this process sends."""
        return jax.process_index() == self.sender

    def send(self, data: bytes) -> None:
        """Gives the next message to all others. Only the sender calls it."""
        assert self.sends, self._topic
        self._sent.append(f"{self._topic}/{self._count}")
        put(self._sent[-1], data)
        self._count += 1

    def receive(self) -> bytes:
        """Returns the next message, and waits for it. The sender never calls it."""
        assert not self.sends, self._topic
        data = get(f"{self._topic}/{self._count}", LIMIT_S)
        self._count += 1
        return data

    def broadcast(self, data: bytes) -> bytes:
        """Returns the sender's bytes on every process. What the others give is not looked at."""
        if not self.sends:
            return self.receive()
        self.send(data)
        return data

    def broadcast_array(self, array: np.ndarray) -> np.ndarray:
        """Returns the sender's array on every process; all give the same shape and dtype."""
        return np.frombuffer(self.broadcast(array.tobytes()), array.dtype).reshape(array.shape)

    def release_received(self) -> None:
        """Frees messages from before the last call. By then all processes have met, so all of them were received."""
        for key in self._received:
            drop(key)
        self._received, self._sent = self._sent, []


class Relays:
    """All topics of a run. Every process opens the same ones in the same order."""

    def __init__(self) -> None:
        self._all: list[Relay] = []

    def open(self, topic: str, sender: int) -> Relay:
        """Returns a new topic of the process `sender`."""
        self._all.append(Relay(f"relay/{next(_TOPICS)}/{topic}", sender))
        return self._all[-1]

    def release_received(self) -> None:
        """Waits until all processes have come here, and frees messages that were sent before the last call."""
        meet()
        for relay in self._all:
            relay.release_received()


def packed(arrays: Sequence[np.ndarray]) -> bytes:
    """Returns the arrays as compressed bytes, with every dtype, shape and bit."""
    file = io.BytesIO()
    for array in arrays:
        np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)
    return zlib.compress(file.getbuffer(), 1)


def unpacked(data: bytes) -> list[np.ndarray]:
    """Returns the arrays that `packed` was given."""
    file, arrays = io.BytesIO(zlib.decompress(data)), []
    while file.tell() < len(file.getbuffer()):
        arrays.append(np.lib.format.read_array(file, allow_pickle=False))
    return arrays
