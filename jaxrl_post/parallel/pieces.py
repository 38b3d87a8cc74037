"""Host values that become arrays piece by piece, so that a process holds its own share and little more.

Invariant: a process makes each piece of its own devices once, however many of them hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxrl_post.parallel.relayout import bounds

Index = tuple[slice, ...]


def own(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> dict[Index, list[jax.Device]]:
    """Returns each piece that devices of this process hold, and these devices."""
    out: dict[tuple, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        out.setdefault(bounds(index, shape), []).append(device)
    return {tuple(slice(*ends) for ends in piece): devices for piece, devices in out.items()}


def placed(
    shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding, read: Callable[[Index], np.ndarray]
) -> jax.Array:
    """Returns an array whose pieces `read` returns. One of them at a time is held in host memory."""
    there: dict[jax.Device, jax.Array] = {}
    for index, devices in own(shape, sharding).items():
        value = read(index)
        assert value.dtype == dtype, (value.dtype, dtype)
        # Waits, because unfinished copies would pile up in host memory.
        there |= zip(devices, jax.block_until_ready([jax.device_put(value, device) for device in devices]), strict=True)
    order = [there[device] for device in sharding.addressable_devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(shape, sharding, order, dtype=dtype)


def streamed(
    shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding, blocks: Iterable[np.ndarray]
) -> jax.Array:
    """Returns an array of `blocks`, which come one after the other along its first axis.

    Rows that no device of this process holds are dropped as they come.
    """
    parts = {index: np.empty(tuple(side.stop - side.start for side in index), dtype) for index in own(shape, sharding)}
    start = 0
    for block in blocks:
        for (rows, *others), part in parts.items():
            first, end = max(rows.start, start), min(rows.stop, start + len(block))
            if first < end:
                part[first - rows.start : end - rows.start] = block[(slice(first - start, end - start), *others)]
        start += len(block)
    assert start == shape[0], (start, shape)
    return placed(shape, dtype, sharding, lambda index: parts.pop(index))
