"""Accelerators by name, and slices of them: what a plan must know of devices that are not there.

Figures are those that the makers publish. They are of one device as jax counts devices: a chip, and of TPU7x half a chip.
Sources: docs.cloud.google.com/tpu/docs (the page of each generation) and the data sheets of NVIDIA's GPUs. The memory
of a TPU is what its compiler lets a program use. That of a GPU is what the driver shows, less CONTEXT.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass

from jaxrl_post.json_text import shown

GIB = 1 << 30
MIB = 1 << 20
CONTEXT = GIB  # of each GPU, for the driver's context, NCCL's buffers and compiled code


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One device of a kind.

    - platform: as jax names it
    - memory: bytes that programs may use
    - flops: peak of dense products of bfloat16
    - bandwidth: bytes a second of its memory
    - link: bytes a second that it sends to devices of its slice or host, one direction
    - network: bytes a second that it sends to other slices, or from a GPU to other hosts
    - per_host: devices of a host
    - alone: devices of the largest slice that is one host
    - per_chip: devices of a chip, which prices and quotas count
    - numbered: devices for each unit of the number in a slice's name, where there is one
    - flash: whether it runs the kernels of packed rows (kernels/hardware.py)
    - target: the compiler's name of the kind, where device-less compiling is tried
    - grids: topology by number of devices
    """

    platform: str
    memory: int
    flops: float
    bandwidth: float
    link: float
    network: float = 0.0
    per_host: int = 8
    alone: int = 8
    per_chip: int = 1
    numbered: float = 0.0
    flash: bool = True
    target: str = ""
    grids: tuple[tuple[int, str], ...] = ()


_FLAT = ((1, "1x1"), (4, "2x2"), (8, "2x4"), (16, "4x4"), (32, "4x8"), (64, "8x8"), (128, "8x16"), (256, "16x16"))
_CUBE = ((4, "2x2x1"), (8, "2x2x2"), (16, "2x2x4"), (32, "2x4x4"), (64, "4x4x4"), (128, "4x4x8"), (256, "4x8x8"))
_HALVES = tuple((2 * count, grid) for count, grid in _CUBE)


def _tpu(memory: float, flops: float, bandwidth: float, link: float, **more) -> Chip:
    hosts = {"per_host": 4, "alone": 4} | more
    return Chip(platform="tpu", memory=int(memory * GIB), flops=flops, bandwidth=bandwidth, link=link, **hosts)


def _gpu(mib: int, flops: float, bandwidth: float, link: float, **more) -> Chip:
    return Chip(platform="gpu", memory=mib * MIB - CONTEXT, flops=flops, bandwidth=bandwidth, link=link, **more)


# Links of a TPU are half of the "bidirectional" figure. The number in v4-, v5p- and tpu7x- counts TensorCores, of which
# a chip has two. jax shows both cores of a v4 or v5p chip as one device, and those of TPU7x as two. A host has four chips,
# and eight chips of v5e and v6e may be one host.
CHIPS: dict[str, Chip] = {
    "v4": _tpu(30.75, 2.75e14, 1.228e12, 3e11, network=6.25e9, numbered=0.5, flash=False, target="v4", grids=_CUBE),
    "v5e": _tpu(15.75, 1.97e14, 8.19e11, 2e11, network=3.125e9, alone=8, numbered=1, target="v5e", grids=_FLAT),
    "v5p": _tpu(95.74, 4.59e14, 2.765e12, 6e11, network=6.25e9, numbered=0.5, target="v5p", grids=_CUBE),
    "v6e": _tpu(31.25, 9.18e14, 1.64e12, 4e11, network=1.25e10, alone=8, numbered=1, target="v6e", grids=_FLAT),
    "tpu7x": _tpu(
        94.75,
        1.1535e15,
        3.69e12,
        3e11,
        network=6.25e9,
        per_host=8,
        alone=8,
        per_chip=2,
        numbered=1,
        target="tpu7x",
        grids=_HALVES,
    ),
    "a100": _gpu(81920, 3.12e14, 2.039e12, 3e11, network=2.5e10),
    "h100": _gpu(81559, 9.89e14, 3.35e12, 4.5e11, network=5e10, target="sm_90"),
    "h200": _gpu(143771, 9.89e14, 4.8e12, 4.5e11, network=5e10, target="sm_90"),
    "b200": _gpu(183359, 2.25e15, 7.7e12, 9e11, network=5e10),
    "l4": _gpu(23034, 1.21e14, 3e11, 3.2e10, network=1.25e10),
    "t4": _gpu(15360, 8.1e12, 3e11, 1.6e10, network=6e9, flash=False),  # no units for bfloat16: float32's peak
}
_ALIASES = {"v5litepod": "v5e", "v7x": "tpu7x", "a100-80gb": "a100", "h100-80gb": "h100"}


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Devices of one kind. `hosts` have equally many each, and so have `slices`, which only TPUs have several of."""

    name: str
    kind: str
    devices: int
    hosts: int
    slices: int = 1

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def chips(self) -> int:
        """Returns how many chips are paid for."""
        return self.devices // self.chip.per_chip

    @property
    def topology(self) -> str:
        """Returns the grid of one TPU slice, or hosts and devices of GPUs."""
        return dict(self.chip.grids).get(self.devices // self.slices, f"1x{self.hosts}x{self.devices // self.hosts}")

    @property
    def neighbours(self) -> int:
        """Returns how many devices have links to each other: those of a TPU slice, or of a host of GPUs."""
        return self.devices // (self.slices if self.chip.grids else self.hosts)

    def link(self, devices: int) -> float:
        """Returns bytes a second that a device sends in a group of that size, neighbours as far as there are so many."""
        return self.chip.network if devices > self.neighbours else self.chip.link

    def times(self, count: int) -> Slice:
        """Returns so many of this slice, or so many times the hosts of GPUs."""
        if count == 1:
            return self
        hosts, devices = self.hosts * count, self.devices * count
        if self.chip.grids:
            name, slices = f"{self.slices * count} x {self.name}", self.slices * count
        else:
            name, slices = f"{hosts}x{devices // hosts}x{self.kind}", 1
        return Slice(name=name, kind=self.kind, devices=devices, hosts=hosts, slices=slices)


def read(name: str) -> Slice:
    """Returns the slice of a name such as v5e-16, v5p-64, h100, 8xh100 or 4x8xh100.

    Raises:
      ValueError: no such kind, or no slice of that size, with the nearest that exists.
    """
    plain = name.strip().lower()
    for alias, kind in _ALIASES.items():
        plain = re.sub(rf"(^|x){alias}($|-)", rf"\g<1>{kind}\g<2>", plain)
    counts, kind, number = re.fullmatch(r"((?:\d{1,4}x){0,2})(.*?)(?:-(\d{1,6}))?", plain).groups()
    if kind not in CHIPS:
        near = difflib.get_close_matches(kind, CHIPS, n=1, cutoff=0.0)[0]
        raise ValueError(f"--slice={shown(name, 40)}: no such accelerator; nearest is {_example(near)}, {_forms()}")
    if CHIPS[kind].grids:
        return _tpu_slice(name, kind, counts, int(number or 0))
    sizes = [int(size) for size in counts.split("x")[:-1]]
    if number or 0 in sizes:
        raise ValueError(
            f"--slice={shown(name, 40)}: write {kind}, 8x{kind} or 4x8x{kind}, hosts before devices of each"
        )
    hosts, own = [1, 1, *sizes][-2:]
    if own > CHIPS[kind].per_host:
        most = CHIPS[kind].per_host
        raise ValueError(
            f"--slice={shown(name, 40)}: a host has at most {most} devices; the nearest valid slice is "
            f"{math.ceil(own / most) * hosts}x{most}x{kind}"
        )
    return Slice(name=plain, kind=kind, devices=hosts * own, hosts=hosts)


def _tpu_slice(name: str, kind: str, counts: str, number: int) -> Slice:
    chip = CHIPS[kind]
    sizes = [int(count / chip.numbered) for count, _ in chip.grids]
    if counts or number not in sizes:
        near = min(sizes, key=lambda size: abs(size - number))
        raise ValueError(
            f"--slice={shown(name, 40)}: no such slice; the nearest valid one is {kind}-{near}, sizes are "
            f"{', '.join(map(str, sizes))}"
        )
    devices = int(number * chip.numbered)
    hosts = 1 if devices <= chip.alone else devices // chip.per_host
    return Slice(name=f"{kind}-{number}", kind=kind, devices=devices, hosts=hosts)


def _example(kind: str) -> str:
    return f"{kind}-{int(16 * (0.5 / CHIPS[kind].numbered + 0.5))}" if CHIPS[kind].grids else f"8x{kind}"


def _forms() -> str:
    return f"kinds are {', '.join(CHIPS)}; write v5e-16, h100, 8xh100 or 4x8xh100"
