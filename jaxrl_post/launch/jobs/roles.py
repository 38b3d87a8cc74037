"""Which host learns and which generates, and the bytes that reach it with every publish, as one table.

Devices of a slice that is not there have the attributes by which a run orders and divides real ones.

Invariant: the meshes are those of the run, because one function makes both (launch/parts/build.py: device_plan). So a mesh
that the run would refuse is refused here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxrl_post.config import Config
from jaxrl_post.engine.eight_bit_weights import stored
from jaxrl_post.launch.parts import build
from jaxrl_post.launch.plan.chips import Slice
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel import relayout
from jaxrl_post.parallel.devices import MIB

_HOST = (2, 2, 1)  # chips of a TPU host along each axis of the grid


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host of a job.

    - index, slice: of the host, and of its slice
    - learns, generates: how many of its devices do
    - replicas: the engine's replicas with devices on it
    - near: bytes of a publish that reach it from neighbours, over links of its slice or, for GPUs, of the host
    - far: bytes that reach it over the network
    """

    index: int
    slice: int
    learns: int
    generates: int
    replicas: tuple[int, ...]
    near: int
    far: int

    @property
    def role(self) -> str:
        if not self.generates:
            return "learns"
        return "generates" if not self.learns else "learns, generates"


def of(config: Config, model: decoder.ModelConfig, devices: Sequence[PlannedDevice]) -> tuple[Host, ...]:
    """Returns the hosts in order.

    Raises:
      ValueError: the mesh does not fit the slices, their hosts or the model, in one sentence.
    """
    plan = build.device_plan(config, devices)
    sent = _sent(config, model, plan)
    size = plan.first.shape[meshes.EXPERT] * plan.first.shape[meshes.TENSOR]
    replicas = [{device.process_index for device in one} for one in plan.first.devices.reshape(-1, size)]
    learns, generates = (
        Counter(device.process_index for device in mesh.devices.flat) for mesh in (plan.learner, plan.first)
    )
    near = [relayout.IN_PROCESS, *([relayout.BETWEEN_PROCESSES] if devices[0].platform == "tpu" else [])]
    far = [link for link in relayout.LINKS if link not in (relayout.IN_PLACE, *near)]
    hosts = dict.fromkeys((device.process_index, device.slice_index) for device in devices)
    return tuple(
        Host(
            index=host,
            slice=slice_,
            learns=learns[host],
            generates=generates[host],
            replicas=tuple(at for at, on in enumerate(replicas) if host in on),
            near=sum(sent.get(host, {}).get(link, 0) for link in near),
            far=sum(sent.get(host, {}).get(link, 0) for link in far),
        )
        for host, slice_ in hosts
    )


def _sent(config: Config, model: decoder.ModelConfig, plan: build.DevicePlan) -> Mapping[int, Mapping[str, int]]:
    """Returns the bytes of a publish by host and link."""
    own = stored(model, config.engine.weights)
    axes, shapes = decoder.axes(own), jax.tree.leaves(decoder.abstract(own, np.dtype(config.engine.dtype)))
    there, wanted = (
        jax.tree.leaves(meshes.param_shardings(mesh, axes, room))
        for mesh, room in ((plan.learner, "learner"), (plan.first, "engine"))
    )
    sent: dict[int, dict[str, int]] = {}
    for dtype in dict.fromkeys(leaf.dtype for leaf in shapes):
        some = [(leaf.shape, *homes) for leaf, *homes in zip(shapes, there, wanted, strict=True) if leaf.dtype == dtype]
        for process, links in relayout.links_by_process(some, dtype).items():
            mine = sent.setdefault(process, dict.fromkeys(links, 0))
            sent[process] = {link: mine[link] + size for link, size in links.items()}
    return sent


def table(hosts: Sequence[Host], near: str, far: str) -> str:
    """Returns one line a host. `near`, `far`: what the bytes of a publish take, in words."""
    rows = [("host", "slice", "role", "devices", "replicas", f"publish by {near}", f"publish by {far}")]
    for one in hosts:
        parts = [f"{one.learns} learn"] * bool(one.learns) + [f"{one.generates} generate"] * bool(one.generates)
        rows.append(
            (
                str(one.index),
                str(one.slice),
                one.role,
                ", ".join(parts) or "none",
                _span(one.replicas),
                f"{one.near / MIB:,.1f} MiB",
                f"{one.far / MIB:,.1f} MiB",
            )
        )
    wide = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, wide)).rstrip() for row in rows]
    title = "Roles, and the bytes that reach a host with every publish"
    return "\n".join([title, *(f"  {line}" for line in lines), f"  {_form(hosts)}"])


def _form(hosts: Sequence[Host]) -> str:
    """Returns what the table shows, in a sentence."""
    roles = {one.role for one in hosts}
    if roles == {"learns", "generates"}:
        return "Whole hosts learn, and whole hosts generate"
    if all(one.learns and one.generates for one in hosts):
        return "Every host learns and generates"
    return "Not every host has a role"


def _span(numbers: Sequence[int]) -> str:
    """Returns numbers as 0-3 where they follow each other, else with commas."""
    if not numbers:
        return "none"
    whole = list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}-{numbers[-1]}" if whole and len(numbers) > 1 else ",".join(map(str, numbers))


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


def planned(where: Slice) -> tuple[PlannedDevice, ...]:
    """Returns all devices, host by host, with one process on each host."""
    return (
        _chips(where)
        if where.chip.grids
        else _equal(where.hosts, where.devices, where.chip.platform, where.chip.reported)
    )


def planned_here(processes: int, devices: int) -> tuple[PlannedDevice, ...]:
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
