"""python scripts/host_bytes.py FILE [--through-host] --config=... : a run of main that counts the bytes of publishes.

Each process writes FILE.N.json: the publishes, the bytes that passed the memory of its host during them, the bytes of
the weights, and what the engine said of links. --through-host plants the fault: weights take the way of
jax.device_put, which goes through the host.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCALAR = 8  # bytes; the check that weights are finite reads one scalar


class Counted:
    """Bytes that passed a host, and their largest array."""

    def __init__(self) -> None:
        self.down = self.up = self.largest = 0

    @property
    def weights(self) -> int:
        """Bytes without scalars, in both directions."""
        return self.down + self.up

    def add(self, way: str, size: int) -> None:
        if size > SCALAR:
            setattr(self, way, getattr(self, way) + size)
        self.largest = max(self.largest, size)


@contextlib.contextmanager
def counted() -> Iterator[Counted]:
    """Counts arrays that this process copies between devices and host.

    A device's array becomes a host's in one method of jax, and a host's array becomes a device's in another. Both are
    watched. On a CPU numpy can view a device's memory without a call. What comes back to a device is counted even then.
    """
    from jax._src import array
    from jax._src.interpreters import pxla

    found = Counted()
    kind = array.ArrayImpl
    read, place = kind._single_device_array_to_np_array_did_copy, pxla.batched_device_put

    def watched_read(self, *args: Any, **more: Any) -> Any:
        value = read(self, *args, **more)
        found.add("down", value[0].nbytes)
        return value

    def watched_place(aval: Any, sharding: Any, pieces: Any, devices: Any, *args: Any, **more: Any) -> Any:
        for piece in pieces:
            if not isinstance(piece, array.ArrayImpl):
                found.add("up", int(getattr(piece, "nbytes", SCALAR)))
        return place(aval, sharding, pieces, devices, *args, **more)

    kind._single_device_array_to_np_array_did_copy, pxla.batched_device_put = watched_read, watched_place
    try:
        yield found
    finally:
        kind._single_device_array_to_np_array_did_copy, pxla.batched_device_put = read, place


def run(file: str, arguments: list[str]) -> int:
    """Runs main with these arguments and writes what its publishes counted."""
    sys.path.insert(0, str(ROOT))
    import jax

    from jaxrl_post import main

    plant = "--through-host" in arguments
    publish, told = main.publish, {"publishes": 0, "down": 0, "up": 0, "largest": 0}

    def watched(ring: Any, run: Any) -> int:
        with counted() as found, jax.transfer_guard_host_to_device("allow" if plant else "disallow_explicit"):
            version = publish(ring, run)
        devices = [engine.device for engine in run.engines]
        told["publishes"] += 1
        told["down"], told["up"] = told["down"] + found.down, told["up"] + found.up
        told["largest"] = max(told["largest"], found.largest)
        told["weights"] = sum(
            leaf.size * leaf.dtype.itemsize for device in devices for leaf in jax.tree.leaves(device.params)
        )
        told["case"], told["links"] = devices[0].case, dict(devices[0].links)
        Path(f"{file}.{jax.process_index()}.json").write_text(json.dumps(told))
        return version

    main.publish = watched
    if plant:
        through_host()
    return main.main([argument for argument in arguments if argument != "--through-host"])


def through_host() -> None:
    """Plants the fault: leaves travel by jax.device_put alone, as before there was a program for it."""
    import jax

    from jaxrl_post.parallel import relayout

    def put(leaves: Any, homes: Any, dtype: Any = None) -> list:
        cast = [leaf if dtype is None else leaf.astype(dtype) for leaf in leaves]
        return [jax.device_put(leaf, home, may_alias=False) for leaf, home in zip(cast, homes, strict=True)]

    relayout.relaid = relayout.handed_over = put


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
