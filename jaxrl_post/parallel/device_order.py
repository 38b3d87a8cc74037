"""The order of devices in a mesh: neighbours of an axis are neighbours on the network, and only data leaves a slice.

A slice is a group of TPU chips with links of their own. Between slices there is only the data centre's network (DCN).
GPUs and CPUs have no slices here: a learner may be split over several hosts of GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

TWO_CORES = (
    "TPU v2",
    "TPU v3",
    "TPU v5",
    "TPU v5p",
    "TPU7",
    "TPU7x",
    "TPU8i",
)  # of whose chips `mesh_utils` orders cores


def shown(sizes: tuple[int, int, int, int]) -> dict[str, int]:
    """Returns the sizes of a mesh by axis. Few models have experts, so their axis is named where it is split."""
    names = ("data", "fsdp", "expert", "tensor")
    return {name: size for name, size in zip(names, sizes, strict=True) if name != "expert" or size != 1}


def named(sizes: tuple[int, int, int, int]) -> str:
    """Returns the sizes of a mesh as a text."""
    return ", ".join(f"{name}={size}" for name, size in shown(sizes).items())


def product(sizes: tuple[int, int, int, int]) -> str:
    """Returns the axes of a mesh as a product."""
    return "*".join(shown(sizes))


def chosen(devices: Sequence[Any], sizes: tuple[int, int, int, int]) -> list[Any]:
    """Returns the devices of a mesh of `sizes` (data, fsdp, expert, tensor): the first ones, and equally many of each slice.

    Raises:
      ValueError: the devices of the mesh lie in several slices, and an axis other than data would cross them.
    """
    needed, slices = math.prod(sizes), _slices(devices)
    whole = min(map(len, slices))
    count = min(-(-needed // whole), len(slices))
    if count == 1:
        return list(devices[:needed])
    if needed % count:
        raise ValueError(
            f"mesh: {product(sizes)}={needed} devices lie in {count} slices of {whole} and cannot be divided evenly "
            f"among them; the nearest valid product is {needed // count * count}"
        )
    _check(sizes, count)
    return [device for one in slices[:count] for device in one[: needed // count]]


def ordered(devices: Sequence[Any], sizes: tuple[int, int, int, int]) -> np.ndarray:
    """Returns the devices as an array of `sizes` (data, fsdp, expert, tensor), in the order of `mesh_utils`.

    On a CPU the order is the given one. So it is where `mesh_utils` knows no order. That is where TPU chips form no cuboid,
    or each core is a device of its own on a kind whose cores are one device by default.

    Raises:
      ValueError: as in `chosen`.
    """
    slices, (data, *inner) = _slices(devices), sizes
    if len(slices) > 1:
        _check_even(slices)
        _check(sizes, len(slices))
    if devices[0].platform == "cpu" or not all(map(_has_order, slices)):
        return np.array(devices, object).reshape(sizes)
    if len(slices) == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return mesh_utils.create_hybrid_device_mesh(
        (data // len(slices), *inner), (len(slices), 1, 1, 1), devices, allow_split_physical_axes=True
    )


def check_replicas(devices: Sequence[Any] | np.ndarray, replica: int) -> None:
    """Refuses replicas of the engine that lie in several slices. `devices`: of all replicas, one replica after the other.

    Raises:
      ValueError: with the nearest size of a replica that keeps to one slice.
    """
    of = np.array([slice_of(device) for device in np.ravel(devices)])
    if len(of) % replica or (of.reshape(-1, replica) == of[::replica, None]).all():
        return
    least = min(np.unique(of, return_counts=True)[1])
    near = max(size for size in range(1, replica) if least % size == 0)
    raise ValueError(
        f"mesh: a replica of {replica} devices would lie in several slices, which only the network between them joins; "
        f"the nearest valid number is {near} (mesh.engine_tensor * mesh.engine_expert)"
    )


def _check_even(slices: Sequence[Sequence[Any]]) -> None:
    """Refuses devices of which some slices have more than others."""
    counts = [len(one) for one in slices]
    if len(set(counts)) > 1:
        near = max(counts)
        raise ValueError(
            f"mesh: {sum(counts)} devices would lie in {len(counts)} slices as {' + '.join(map(str, counts))}, and a mesh "
            f"over several slices has equally many in each; the nearest valid number is {near}, a whole slice"
        )


def _check(sizes: tuple[int, int, int, int], slices: int) -> None:
    """Refuses a mesh of which an axis but data would cross slices."""
    data, _, expert, tensor = sizes
    if data % slices == 0:
        return
    needed = math.prod(sizes)
    near = min((n for n in range(slices, needed + 1, slices) if needed % n == 0), key=lambda n: (abs(n - data), n))
    tensor = math.gcd(needed // near, tensor)
    expert = math.gcd(needed // near // tensor, expert)
    valid = (near, needed // near // tensor // expert, expert, tensor)
    raise ValueError(
        f"mesh: {named(sizes)} are {needed} devices in {slices} slices, and only data may cross the network between slices, so "
        f"it must be a multiple of {slices}; the nearest valid choice is {named(valid)}"
    )


def slice_of(device: Any) -> int:
    """Returns the slice of a TPU chip, and 0 for every other device."""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def _slices(devices: Sequence[Any]) -> list[list[Any]]:
    """Returns the devices by slice. Everything but TPU chips is one slice."""
    found: dict[int, list[Any]] = {}
    for device in devices:
        found.setdefault(slice_of(device), []).append(device)
    return [found[index] for index in sorted(found)]


def _has_order(devices: Sequence[Any]) -> bool:
    """Returns whether `mesh_utils` can order TPU chips. Other devices have no coordinates, and any number of them will do."""
    if devices[0].platform != "tpu":
        return True
    places = {(*device.coords, device.core_on_chip) for device in devices}
    sizes = [max(axis) - min(axis) + 1 for axis in zip(*places)]
    return math.prod(sizes) == len(devices) and (sizes[-1] == 1 or devices[0].device_kind in TWO_CORES)
