"""Slices of accelerators by name, and those that are there. The figures of a device are in parallel/devices.py."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_post.parallel import devices
from jaxrl_post.parallel.devices import DEVICES, Device
from jaxrl_post.ring.json_text import shown

KINDS = {name: device for name, device in DEVICES.items() if device.link}  # those that a slice can be planned of
_ALIASES = {
    "v5litepod": "v5e",
    "trillium": "v6e",
    "v7x": "tpu7x",
    "ironwood": "tpu7x",
    "a100-80gb": "a100",
    "h100-80gb": "h100",
    "h100-sxm": "h100",
}


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Devices of one kind. `hosts` have equally many each, and so have `slices`, which only TPUs have several of."""

    name: str
    chip: Device
    devices: int
    hosts: int
    slices: int = 1

    @property
    def kind(self) -> str:
        return self.chip.name

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
        """Returns how many devices have links to each other: those of a TPU slice, or GPUs of a host or of joined hosts."""
        if self.chip.grids:
            return self.devices // self.slices
        return max(self.devices // self.hosts, min(self.chip.joined, self.devices))

    def link(self, count: int) -> float:
        """Returns bytes a second that a device sends in a group of that size, neighbours as far as there are so many."""
        return self.chip.network if count > self.neighbours else self.chip.link

    def times(self, count: int) -> Slice:
        """Returns so many of this slice, or so many times the hosts of GPUs."""
        if count == 1:
            return self
        hosts, size = self.hosts * count, self.devices * count
        if self.chip.grids:
            name, slices = f"{self.slices * count} x {self.name}", self.slices * count
        else:
            name, slices = f"{hosts}x{size // hosts}x{self.kind}", 1
        return Slice(name=name, chip=self.chip, devices=size, hosts=hosts, slices=slices)


def read(name: str) -> Slice:
    """Returns the slice of a name such as v5e-16, v5p-64, h100, 8xh100 or 4x8xh100.

    Raises:
      ValueError: no such kind, or no slice of that size, with the nearest that exists.
    """
    plain = name.strip().lower()
    for alias, kind in _ALIASES.items():
        plain = re.sub(rf"(^|x){alias}($|-)", rf"\g<1>{kind}\g<2>", plain)
    counts, kind, number = re.fullmatch(r"((?:\d{1,4}x){0,2})(.*?)(?:-(\d{1,6}))?", plain).groups()
    if kind not in KINDS:
        near = KINDS[difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.0)[0]]
        example = f"{near.name}-{int(16 * (0.5 / near.numbered + 0.5))}" if near.grids else f"8x{near.name}"
        raise ValueError(
            f"--slice={shown(name, 40)}: no such accelerator; nearest is {example}, write for example v5e-16, h100, "
            "8xh100 or 4x8xh100; docs/which_preset.md names all kinds"
        )
    if KINDS[kind].grids:
        return _tpu_slice(name, kind, counts, int(number or 0))
    sizes = [int(size) for size in counts.split("x")[:-1]]
    if number or 0 in sizes:
        raise ValueError(
            f"--slice={shown(name, 40)}: write {kind}, 8x{kind} or 4x8x{kind}, hosts before devices of each"
        )
    hosts, own = [1, 1, *sizes][-2:]
    if own > KINDS[kind].per_host:
        most = KINDS[kind].per_host
        raise ValueError(
            f"--slice={shown(name, 40)}: a host has at most {most} devices; the nearest valid slice is "
            f"{math.ceil(own / most) * hosts}x{most}x{kind}"
        )
    return Slice(name=plain, chip=KINDS[kind], devices=hosts * own, hosts=hosts)


def _tpu_slice(name: str, kind: str, counts: str, number: int) -> Slice:
    chip = KINDS[kind]
    sizes = [int(count / chip.numbered) for count, _ in chip.grids]
    if counts or number not in sizes:
        near = min(sizes, key=lambda size: abs(size - number))
        raise ValueError(
            f"--slice={shown(name, 40)}: no such slice; the nearest valid one is {kind}-{near}, sizes are "
            f"{', '.join(map(str, sizes))}"
        )
    size = int(number * chip.numbered)
    hosts = 1 if size <= chip.alone else size // chip.per_host
    return Slice(name=f"{kind}-{number}", chip=chip, devices=size, hosts=hosts)


def found(there: Sequence[Any], own: Any) -> Slice:
    """Returns the devices that are there, with the memory that the runtime grants on `own`, one of this process."""
    granted = (own.memory_stats() or {}).get("bytes_limit", 0)
    chip = devices.of(own.device_kind, own.platform, granted)
    hosts, slices = ({getattr(one, name, 0) for one in there} for name in ("process_index", "slice_index"))
    count = len(slices) if chip.platform == "tpu" else 1
    name = f"{len(there)} x {own.device_kind}"
    return Slice(name=name, chip=chip, devices=len(there), hosts=len(hosts), slices=count)
