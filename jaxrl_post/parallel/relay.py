"""Host values of one process for all others, through the coordinator's store. No device carries them.

So no process waits for a device that computes something else. Messages are short: results of a dispatch, metrics of a step.

Invariant: all processes that hear a topic hear all its messages, in the order in which they were told.
"""

from __future__ import annotations

import io
import itertools
import zlib
from collections.abc import Sequence

import jax
import numpy as np

from jaxrl_post.parallel import key_value

_PART = 1 << 20  # bytes of one entry of the store
_SIZE = 8  # bytes of a message's length
_NAMES = itertools.count()  # a name is used once, and all processes count alike


class Relay:
    """One topic of one process, `teller`. `topic`: a name that is used once in the job.

    Raises:
      TimeoutError: a message does not come within a day. A watchdog ends a run that hangs earlier.
    """

    def __init__(self, topic: str, teller: int):
        self._topic, self.teller = topic, teller
        self._count = 0
        self._told: list[str] = []  # keys since the last call of `drop_heard`
        self._heard: list[str] = []  # keys before it

    @property
    def tells(self) -> bool:
        """Returns whether this process tells."""
        return jax.process_index() == self.teller

    def tell(self, data: bytes) -> None:
        """Gives the next message to all others. Only the teller calls it."""
        assert self.tells, self._topic
        whole = len(data).to_bytes(_SIZE, "big") + data
        for number in range(-(-len(whole) // _PART)):
            key_value.put_bytes(key := self._key(number), whole[number * _PART : (number + 1) * _PART])
            self._told.append(key)
        self._count += 1

    def hear(self) -> bytes:
        """Returns the next message, and waits for it. The teller never calls it."""
        assert not self.tells, self._topic
        whole = key_value.get_bytes(self._key(0), key_value.LIMIT_S)
        size = _SIZE + int.from_bytes(whole[:_SIZE], "big")
        for number in range(1, -(-size // _PART)):
            whole += key_value.get_bytes(self._key(number), key_value.LIMIT_S)
        self._count += 1
        return whole[_SIZE:]

    def share(self, data: bytes) -> bytes:
        """Returns the teller's bytes on every process. What the others give is not looked at."""
        if not self.tells:
            return self.hear()
        self.tell(data)
        return data

    def share_array(self, array: np.ndarray) -> np.ndarray:
        """Returns the teller's array on every process; all give the same shape and dtype."""
        return np.frombuffer(self.share(array.tobytes()), array.dtype).reshape(array.shape)

    def drop_heard(self) -> None:
        """Frees messages from before the last call. By then all processes have met, so all of them were heard."""
        for key in self._heard:
            key_value.drop(key)
        self._heard, self._told = self._told, []

    def _key(self, number: int) -> str:
        return f"{self._topic}/{self._count}/{number}"


class Relays:
    """All topics of a run. Every process opens the same ones in the same order."""

    def __init__(self) -> None:
        self._all: list[Relay] = []

    def open(self, topic: str, teller: int) -> Relay:
        """Returns a new topic of the process `teller`."""
        self._all.append(Relay(f"relay/{next(_NAMES)}/{topic}", teller))
        return self._all[-1]

    def drop_heard(self) -> None:
        """Waits until all processes have come here, and frees messages that were told before the last call."""
        key_value.meet()
        for relay in self._all:
            relay.drop_heard()


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
