"""Devices of a slice that is not there, with the attributes by which a run orders and divides real ones.

Invariant: the meshes of a plan are those of a run, because one function makes both (launch/build.py: device_plan).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from jaxrl_post.launch.chips import Slice

_HOST = (2, 2, 1)  # chips of a TPU host along each axis of the grid


@dataclass(frozen=True, kw_only=True, order=True)
class PlannedDevice:
    """A device by its number, its process and its slice. `coords` and `core_on_chip`: its place in a grid of TPU chips."""

    id: int
    process_index: int
    slice_index: int
    coords: tuple[int, int, int]
    core_on_chip: int
    platform: str
    device_kind: str


def of(where: Slice) -> tuple[PlannedDevice, ...]:
    """Returns all devices, host by host, with one process on each host."""
    return (
        _chips(where)
        if where.chip.grids
        else _equal(where.hosts, where.devices, where.chip.platform, where.chip.reported)
    )


def local(processes: int, devices: int) -> tuple[PlannedDevice, ...]:
    """Returns forced devices of the CPU, equally many of each process."""
    return _equal(processes, devices, "cpu", "cpu")


def _equal(processes: int, devices: int, platform: str, kind: str) -> tuple[PlannedDevice, ...]:
    return tuple(
        PlannedDevice(
            id=number,
            process_index=number * processes // devices,
            slice_index=0,
            coords=(0, 0, 0),
            core_on_chip=0,
            platform=platform,
            device_kind=kind,
        )
        for number in range(devices)
    )


def _chips(where: Slice) -> tuple[PlannedDevice, ...]:
    sizes = (*map(int, where.topology.split("x")), 1)[:3]
    hosts, alone = where.hosts // where.slices, where.hosts == where.slices
    along = tuple(-(-size // own) for size, own in zip(sizes, _HOST))
    places = []
    for z, y, x in itertools.product(*map(range, reversed(sizes))):
        block = (x // _HOST[0], y // _HOST[1], z // _HOST[2])
        host = 0 if alone else block[0] + along[0] * (block[1] + along[1] * block[2])
        places.append((host, (x, y, z)))
    numbers = itertools.count()
    return tuple(
        PlannedDevice(
            id=next(numbers),
            process_index=one * hosts + host,
            slice_index=one,
            coords=place,
            core_on_chip=core,
            platform=where.chip.platform,
            device_kind=where.chip.reported,
        )
        for one in range(where.slices)
        for host, place in sorted(places, key=lambda found: found[0])
        for core in range(where.chip.per_chip)
    )
