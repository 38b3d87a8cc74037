"""The one table of devices: what plans, cost tables and meshes must know of a kind, by the name that its runtime reports.

Figures are those that the makers publish, of one device as jax counts devices: a chip, half a chip of TPU7x and TPU8i,
and half a card of MI250X. FLOP/s are dense, in bfloat16 with sums in float32; those of GPUs without units for bfloat16 are
float32's. Memory of a TPU is what its compiler lets a program use; that of a GPU is what its driver shows, less CONTEXT.

- TPU v4 to TPU7x: docs.cloud.google.com/tpu/docs, the page of each generation. TPU v4 lite, TPU7 and TPU8: jax's own table
  (jax/_src/tpu_info.py), which also has the names. Links are half of the "bidirectional" figure.
- NVIDIA: the data sheet of each product; GeForce and RTX: the white papers of GA102, AD102 and GB202.
- AMD: the data sheet of each Instinct accelerator.

Invariant: `of` knows or estimates every device, and never refuses one. An estimate has known=False, and one line says it.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20
CONTEXT = GIB  # of each GPU, for the driver's context, NCCL's buffers and compiled code
FIRST_TPU = 5  # the first generation for which the kernels were written
AMPERE = 8  # major compute capability: the first whose tensor cores multiply bfloat16


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device of a kind.

    - name: as --slice and cost tables have it
    - platform: as jax names it
    - memory: bytes that programs may use
    - flops: peak of dense products of bfloat16
    - bandwidth: bytes a second of its memory
    - link: bytes a second that it sends to devices of its slice or host, one direction
    - network: bytes a second that it sends to other slices, or from a GPU to other hosts
    - per_host: devices of a host
    - alone: devices of the largest slice that is one host
    - joined: GPUs that `link` joins, where it joins several hosts
    - per_chip: devices of a chip, which prices and quotas count
    - numbered: devices for each unit of the number in a slice's name, where there is one
    - target: the compiler's name of the kind, where device-less compiling is tried
    - grids: topology by number of devices
    - reported: as the runtime reports the kind (`device_kind`)
    - capability: compute capability, of NVIDIA's
    - cores: streaming multiprocessors, of NVIDIA's
    - known: the figures are of this kind, not of another one
    """

    name: str
    platform: str
    memory: int
    flops: float
    bandwidth: float
    link: float = 0.0
    network: float = 0.0
    per_host: int = 8
    alone: int = 8
    joined: int = 0
    per_chip: int = 1
    numbered: float = 0.0
    target: str = ""
    grids: tuple[tuple[int, str], ...] = ()
    reported: str = ""
    capability: str = ""
    cores: int = 0
    known: bool = True

    @property
    def flash(self) -> bool:
        """Returns whether it runs the kernels of packed rows (kernels/hardware.py)."""
        if self.platform == "tpu":
            found = re.search(r"\d+", self.name)
            return bool(found) and int(found[0]) >= FIRST_TPU
        return self.major >= AMPERE

    @property
    def bfloat16(self) -> bool:
        """Returns whether it has units for products of bfloat16."""
        return not self.capability or self.major >= AMPERE

    @property
    def major(self) -> int:
        """Returns the generation of an NVIDIA GPU, and 0 of other devices."""
        return int(self.capability.partition(".")[0] or 0)


_FLAT = ((1, "1x1"), (4, "2x2"), (8, "2x4"), (16, "4x4"), (32, "4x8"), (64, "8x8"), (128, "8x16"), (256, "16x16"))
_CUBE = ((4, "2x2x1"), (8, "2x2x2"), (16, "2x2x4"), (32, "2x4x4"), (64, "4x4x4"), (128, "4x4x8"), (256, "4x8x8"))
_HALVES = tuple((2 * count, grid) for count, grid in _CUBE)


def _tpu(name: str, reported: str, memory: float, flops: float, bandwidth: float, link: float = 0.0, **more) -> Device:
    own = {"per_host": 4, "alone": 4, "target": name if link else ""} | more
    about = {"name": name, "platform": "tpu", "reported": reported, "memory": int(memory * GIB)}
    return Device(**about, flops=flops, bandwidth=bandwidth, link=link, **own)


def _nvidia(
    name: str, reported: str, capability: str, cores: int, mib: int, flops: float, bandwidth: float, **more
) -> Device:
    about = {"name": name, "platform": "gpu", "reported": reported, "memory": mib * MIB - CONTEXT}
    own = {"capability": capability, "cores": cores, "target": f"sm_{capability.replace('.', '')}"}
    return Device(**about, flops=flops, bandwidth=bandwidth, **own, **more)


def _amd(name: str, reported: str, gib: int, flops: float, bandwidth: float, link: float, **more) -> Device:
    about = {"name": name, "platform": "gpu", "reported": reported, "memory": gib * GIB - CONTEXT}
    return Device(**about, flops=flops, bandwidth=bandwidth, link=link, network=5e10, **more)


_PCIE3, _PCIE4, _PCIE5 = 1.6e10, 3.2e10, 6.4e10  # 16 lanes, one direction
_RDMA = {"network": 5e10}  # a network card of 400 Gbit/s for each GPU
_SERVED = {"link": _PCIE4, "network": 1.25e10}  # cards in a server without NVLink

# The number in v4-, v5p- and tpu7x- counts TensorCores, of which a chip has two. jax shows both cores of a v4 or v5p chip as
# one device, and those of TPU7x as two. A host has four chips, and eight chips of v5e and v6e may be one host.
_TPUS = (
    _tpu("v4", "TPU v4", 30.75, 2.75e14, 1.228e12, 3e11, network=6.25e9, numbered=0.5, grids=_CUBE),
    _tpu("v5e", "TPU v5 lite", 15.75, 1.97e14, 8.19e11, 2e11, network=3.125e9, alone=8, numbered=1, grids=_FLAT),
    _tpu("v5p", "TPU v5", 95.74, 4.59e14, 2.765e12, 6e11, network=6.25e9, numbered=0.5, grids=_CUBE),
    _tpu("v6e", "TPU v6 lite", 31.25, 9.18e14, 1.64e12, 4e11, network=1.25e10, alone=8, numbered=1, grids=_FLAT),
    _tpu(
        *("tpu7x", "TPU7x", 94.75, 1.1535e15, 3.69e12, 3e11),
        **dict(network=6.25e9, per_host=8, alone=8, per_chip=2, numbered=1, grids=_HALVES),
    ),
)
_UNSLICED = (  # no slices of them can be planned
    _tpu("v4i", "TPU v4 lite", 7.75, 1.37e14, 6.14e11),
    _tpu("tpu8i", "TPU8i", 142, 5.505e14, 4.3e12, per_chip=2),
    _tpu("tpu8t", "TPU8t", 213, 9.961e14, 6.4e12),
)
_VOLTA_TO_AMPERE = (
    _nvidia("t4", "Tesla T4", "7.5", 40, 15360, 8.1e12, 3e11, link=_PCIE3, network=6e9),
    _nvidia("v100", "Tesla V100-SXM2-16GB", "7.0", 80, 16160, 1.57e13, 9e11, link=1.5e11, network=1.25e10),
    _nvidia("v100-32gb", "Tesla V100-SXM2-32GB", "7.0", 80, 32510, 1.57e13, 9e11, link=1.5e11, network=1.25e10),
    _nvidia("a100", "NVIDIA A100-SXM4-80GB", "8.0", 108, 81920, 3.12e14, 2.039e12, link=3e11, network=2.5e10),
    _nvidia("a100-40gb", "NVIDIA A100-SXM4-40GB", "8.0", 108, 40960, 3.12e14, 1.555e12, link=3e11, network=1.25e10),
    _nvidia("a30", "NVIDIA A30", "8.0", 56, 24576, 1.65e14, 9.33e11, **_SERVED),
    _nvidia("a10", "NVIDIA A10", "8.6", 72, 23028, 1.25e14, 6e11, **_SERVED),
    _nvidia("a10g", "NVIDIA A10G", "8.6", 80, 23028, 7e13, 6e11, **_SERVED),
    _nvidia("a40", "NVIDIA A40", "8.6", 84, 46068, 1.497e14, 6.96e11, **_SERVED),
    _nvidia("a6000", "NVIDIA RTX A6000", "8.6", 84, 49140, 1.548e14, 7.68e11, **_SERVED),
    _nvidia("rtx3090", "NVIDIA GeForce RTX 3090", "8.6", 82, 24576, 7.1e13, 9.36e11, **_SERVED),
)
_ADA_AND_BLACKWELL_CARDS = (
    _nvidia("l4", "NVIDIA L4", "8.9", 58, 23034, 1.21e14, 3e11, **_SERVED),
    _nvidia("l40", "NVIDIA L40", "8.9", 142, 46068, 1.81e14, 8.64e11, **_SERVED),
    _nvidia("l40s", "NVIDIA L40S", "8.9", 142, 46068, 3.62e14, 8.64e11, **_SERVED),
    _nvidia("rtx4090", "NVIDIA GeForce RTX 4090", "8.9", 128, 24564, 1.652e14, 1.008e12, **_SERVED),
    _nvidia("rtx6000-ada", "NVIDIA RTX 6000 Ada Generation", "8.9", 142, 49140, 3.642e14, 9.6e11, **_SERVED),
    _nvidia(
        *("rtx5090", "NVIDIA GeForce RTX 5090", "12.0", 170, 32607, 2.095e14, 1.792e12), link=_PCIE5, network=1.25e10
    ),
    _nvidia(
        *("rtxpro6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0", 188, 97887, 5.04e14, 1.597e12),
        **dict(link=_PCIE5, network=5e10),
    ),
)
_HOPPER_AND_BLACKWELL = (
    _nvidia("h100", "NVIDIA H100 80GB HBM3", "9.0", 132, 81559, 9.89e14, 3.35e12, link=4.5e11, **_RDMA),
    _nvidia("h100-pcie", "NVIDIA H100 PCIe", "9.0", 114, 81559, 7.56e14, 2e12, link=_PCIE5, **_RDMA),
    _nvidia("h100-nvl", "NVIDIA H100 NVL", "9.0", 132, 95830, 8.35e14, 3.9e12, link=_PCIE5, **_RDMA),
    _nvidia("h800", "NVIDIA H800", "9.0", 132, 81559, 9.9e14, 3.35e12, link=2e11, **_RDMA),
    _nvidia("h20", "NVIDIA H20", "9.0", 78, 97871, 1.48e14, 4e12, link=4.5e11, **_RDMA),
    _nvidia("h200", "NVIDIA H200", "9.0", 132, 143771, 9.89e14, 4.8e12, link=4.5e11, **_RDMA),
    _nvidia("h200-nvl", "NVIDIA H200 NVL", "9.0", 132, 143771, 8.35e14, 4.8e12, link=_PCIE5, **_RDMA),
    _nvidia("gh200", "NVIDIA GH200 480GB", "9.0", 132, 97871, 9.89e14, 4e12, link=4.5e11, per_host=1, **_RDMA),
    _nvidia("b200", "NVIDIA B200", "10.0", 148, 183359, 2.25e15, 7.7e12, link=9e11, **_RDMA),
    _nvidia(*("gb200", "NVIDIA GB200", "10.0", 148, 189471, 2.5e15, 8e12), link=9e11, per_host=4, joined=72, **_RDMA),
    _nvidia("b300", "NVIDIA B300 SXM6 AC", "10.3", 148, 275040, 2.25e15, 7.7e12, link=9e11, network=1e11),
    _nvidia(
        *("gb300", "NVIDIA GB300", "10.3", 148, 284208, 2.5e15, 8e12), link=9e11, network=1e11, per_host=4, joined=72
    ),
)
_AMDS = (
    _amd("mi250x", "AMD Instinct MI250X", 64, 1.915e14, 1.638e12, 1e11, per_chip=2),
    _amd("mi300a", "AMD Instinct MI300A", 128, 9.806e14, 5.3e12, 3.84e11, per_host=4),
    _amd("mi300x", "AMD Instinct MI300X", 192, 1.3074e15, 5.3e12, 4.48e11),
    _amd("mi325x", "AMD Instinct MI325X", 256, 1.3074e15, 6e12, 4.48e11),
    _amd("mi350x", "AMD Instinct MI350X", 288, 2.3e15, 8e12, 5.38e11),
    _amd("mi355x", "AMD Instinct MI355X", 288, 2.5e15, 8e12, 5.38e11),
)
CPU = Device(
    name="cpu",
    platform="cpu",
    memory=16_000_000_000,
    flops=1e11,  # of float32. Those of a CPU are rough, and only their ratios matter
    bandwidth=2e10,
    reported="cpu",
)
DEVICES: dict[str, Device] = {
    one.name: one
    for one in (*_TPUS, *_HOPPER_AND_BLACKWELL, *_ADA_AND_BLACKWELL_CARDS, *_VOLTA_TO_AMPERE, *_AMDS, *_UNSLICED, CPU)
}
_TPU_NAMES = {  # generation and what follows it -> name
    "4": "v4",
    "4lite": "v4i",
    "4i": "v4i",
    "5lite": "v5e",
    "5e": "v5e",
    "5": "v5p",
    "5p": "v5p",
    "6lite": "v6e",
    "6e": "v6e",
    "7": "tpu7x",
    "7x": "tpu7x",
    "8i": "tpu8i",
    "8t": "tpu8t",
}
_GPU_NAMES = (  # what a whole word of the reported name begins with -> name; the first that is found counts
    *((name, name) for name in ("gb300", "b300", "gb200", "b200", "gh200")),
    ("h200[ -]nvl", "h200-nvl"),
    ("h200", "h200"),
    ("h100[ -]nvl", "h100-nvl"),
    ("h100[ -]pcie", "h100-pcie"),
    *((name, name) for name in ("h100", "h800", "h20")),
    ("rtx pro 6000", "rtxpro6000"),
    ("rtx 6000 ada", "rtx6000-ada"),
    ("(rtx )?a6000", "a6000"),
    *((f"rtx {number}(?! .*laptop)", f"rtx{number}") for number in ("5090", "4090", "3090")),
    *((name, name) for name in ("l40s", "l40", "l4")),
    ("a[18]00.* ?40gb", "a100-40gb"),
    ("a[18]00", "a100"),
    *((name, name) for name in ("a30", "a40", "a10g", "a10")),
    ("v100s?.*32gb", "v100-32gb"),
    ("v100s?", "v100"),
    ("t4g?", "t4"),
    ("mi2[15]0x?|gfx90a", "mi250x"),
    ("mi300x?|gfx942", "mi300x"),
    ("mi355x|gfx950", "mi355x"),
    *((name, name) for name in ("mi300a", "mi325x", "mi350x")),
)
_LIKE = {"tpu": "v5e", "gpu": "l4", "cpu": "cpu"}  # whose figures stand for a kind that is not known: slow ones
_MIG = re.compile(r"mig (\d+)g\.(\d+)gb")


def of(kind: str, platform: str = "", memory: int = 0) -> Device:
    """Returns the device of a kind as the runtime reports it, or by its name in the table.

    Args:
      platform: as jax names it, for a kind that is not known.
      memory: bytes that programs may use, where they were measured; 0: those of the table.
    """
    plain = " ".join(kind.lower().split())
    found = _part(DEVICES[name], plain) if (name := _name(plain)) else _estimate(kind, plain, platform)
    return dataclasses.replace(found, memory=memory) if memory else found


def estimated(device: Device, kind: str) -> str:
    """Returns the line that says whose figures stand for a kind that is not known, or an empty text."""
    if device.known:
        return ""
    return (
        f"devices: {kind} is no known kind: plans and step costs take the figures of {_LIKE[device.platform]}; measure "
        "its own with scripts/bench.py cost and name the file in engine.cost_table"
    )


def _name(plain: str) -> str:
    """Returns the name of a kind in the table, or an empty text."""
    if plain in DEVICES:
        return plain
    if tpu := re.fullmatch(r"tpu ?v?(\d+)[ -]?([a-z]*)", plain):
        return _TPU_NAMES.get("".join(tpu.groups()), "")
    words = ((f"(?<![a-z0-9])({pattern})(?![a-z0-9])", name) for pattern, name in _GPU_NAMES)
    return next((name for pattern, name in words if re.search(pattern, plain)), "")


def _part(device: Device, plain: str) -> Device:
    """Returns the part of a GPU that a MIG instance is, as "MIG 3g.20gb" says, or the whole one."""
    if (part := _MIG.search(plain)) is None:
        return device
    sevenths, memory = int(part[1]) / 7, int(part[2]) * GIB
    share = min(memory / (device.memory + CONTEXT), 1.0)
    return dataclasses.replace(
        device,
        name=f"{device.name}-{part[1]}g",
        memory=memory - CONTEXT,
        flops=device.flops * sevenths,
        bandwidth=device.bandwidth * share,
    )


def _estimate(kind: str, plain: str, platform: str) -> Device:
    guess = next((one for one in ("tpu", "cpu") if one in plain), "gpu")
    like = DEVICES[_LIKE[platform if platform in _LIKE else guess]]
    memory = DEVICES["t4"].memory if like.platform == "gpu" else like.memory
    return dataclasses.replace(like, name=f"{like.name}?", memory=memory, target="", reported=kind, known=False)
