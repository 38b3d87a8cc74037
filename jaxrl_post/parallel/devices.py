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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30
MIB = 1 << 20
CONTEXT = GIB  # of each GPU, for the driver's context, NCCL's buffers and compiled code
FIRST_TPU = 5  # the first generation for which the kernels were written
_FIRST_FP8 = {"tpu": 7, "gpu": 350}  # of the numbers in names: TPU7x, and MI350X. Older ones of AMD have another format
ADA = 8.9  # compute capability: the first with 8-bit floats
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
    def fp8(self) -> bool:
        """Returns whether it computes with 8-bit floats of four bits of exponent (e4m3fn). On a CPU they are emulated."""
        if self.capability:
            return float(self.capability) >= ADA
        generation = re.search(r"\d+", self.name)
        return self.platform == "cpu" or (bool(generation) and int(generation[0]) >= _FIRST_FP8[self.platform])

    @property
    def major(self) -> int:
        """Returns the generation of an NVIDIA GPU, and 0 of other devices."""
        return int(self.capability.partition(".")[0] or 0)


_FLAT = ((1, "1x1"), (4, "2x2"), (8, "2x4"), (16, "4x4"), (32, "4x8"), (64, "8x8"), (128, "8x16"), (256, "16x16"))
_CUBE = ((4, "2x2x1"), (8, "2x2x2"), (16, "2x2x4"), (32, "2x4x4"), (64, "4x4x4"), (128, "4x4x8"), (256, "4x8x8"))
_GRIDS = {"flat": _FLAT, "cube": _CUBE, "halves": tuple((2 * count, grid) for count, grid in _CUBE)}

# Columns are attributes of Device, and "-" is its default. `words`: the generation and what follows it in reported names.
# The number in v4-, v5p- and tpu7x- counts TensorCores, of which a chip has two. jax shows both cores of a v4 or v5p chip as
# one device, and those of TPU7x as two. A host has four chips, and eight chips of v5e and v6e may be one host.
# No slices can be planned of a kind without a link.
_TPUS = """
name   reported     memory  flops      bandwidth  link  network  per_host  alone  per_chip  numbered  grids   words
v4     TPU v4       30.75G  2.75e14    1.228e12   3e11  6.25e9   4         4      -         0.5       cube    4
v5e    TPU v5 lite  15.75G  1.97e14    8.19e11    2e11  3.125e9  4         8      -         1         flat    5lite 5e
v5p    TPU v5       95.74G  4.59e14    2.765e12   6e11  6.25e9   4         4      -         0.5       cube    5 5p
v6e    TPU v6 lite  31.25G  9.18e14    1.64e12    4e11  1.25e10  4         8      -         1         flat    6lite 6e
tpu7x  TPU7x        94.75G  1.1535e15  3.69e12    3e11  6.25e9   8         8      2         1         halves  7 7x
v4i    TPU v4 lite  7.75G   1.37e14    6.14e11    -     -        4         4      -         -         -       4lite 4i
tpu8i  TPU8i        142G    5.505e14   4.3e12     -     -        4         4      2         -         -       8i
tpu8t  TPU8t        213G    9.961e14   6.4e12     -     -        4         4      -         -         -       8t
"""
# A link is NVLink, or 16 lanes of PCIe in one direction. A network is a card of 400 Gbit/s for each GPU, or less.
_NVIDIAS = """
name         reported                        memory   flops     bandwidth  link    network  capability  cores  per_host  joined
h100         NVIDIA H100 80GB HBM3           81559M   9.89e14   3.35e12    4.5e11  5e10     9.0         132    -         -
h100-pcie    NVIDIA H100 PCIe                81559M   7.56e14   2e12       6.4e10  5e10     9.0         114    -         -
h100-nvl     NVIDIA H100 NVL                 95830M   8.35e14   3.9e12     6.4e10  5e10     9.0         132    -         -
h800         NVIDIA H800                     81559M   9.9e14    3.35e12    2e11    5e10     9.0         132    -         -
h20          NVIDIA H20                      97871M   1.48e14   4e12       4.5e11  5e10     9.0         78     -         -
h200         NVIDIA H200                     143771M  9.89e14   4.8e12     4.5e11  5e10     9.0         132    -         -
h200-nvl     NVIDIA H200 NVL                 143771M  8.35e14   4.8e12     6.4e10  5e10     9.0         132    -         -
gh200        NVIDIA GH200 480GB              97871M   9.89e14   4e12       4.5e11  5e10     9.0         132    1         -
b200         NVIDIA B200                     183359M  2.25e15   7.7e12     9e11    5e10     10.0        148    -         -
gb200        NVIDIA GB200                    189471M  2.5e15    8e12       9e11    5e10     10.0        148    4         72
b300         NVIDIA B300 SXM6 AC             275040M  2.25e15   7.7e12     9e11    1e11     10.3        148    -         -
gb300        NVIDIA GB300                    284208M  2.5e15    8e12       9e11    1e11     10.3        148    4         72
l4           NVIDIA L4                       23034M   1.21e14   3e11       3.2e10  1.25e10  8.9         58     -         -
l40          NVIDIA L40                      46068M   1.81e14   8.64e11    3.2e10  1.25e10  8.9         142    -         -
l40s         NVIDIA L40S                     46068M   3.62e14   8.64e11    3.2e10  1.25e10  8.9         142    -         -
rtx4090      NVIDIA GeForce RTX 4090         24564M   1.652e14  1.008e12   3.2e10  1.25e10  8.9         128    -         -
rtx6000-ada  NVIDIA RTX 6000 Ada Generation  49140M   3.642e14  9.6e11     3.2e10  1.25e10  8.9         142    -         -
rtx5090      NVIDIA GeForce RTX 5090         32607M   2.095e14  1.792e12   6.4e10  1.25e10  12.0        170    -         -
rtxpro6000   NVIDIA RTX PRO 6000 Blackwell Server Edition  97887M   5.04e14   1.597e12   6.4e10  5e10     12.0        188    -         -
t4           Tesla T4                        15360M   8.1e12    3e11       1.6e10  6e9      7.5         40     -         -
v100         Tesla V100-SXM2-16GB            16160M   1.57e13   9e11       1.5e11  1.25e10  7.0         80     -         -
v100-32gb    Tesla V100-SXM2-32GB            32510M   1.57e13   9e11       1.5e11  1.25e10  7.0         80     -         -
a100         NVIDIA A100-SXM4-80GB           81920M   3.12e14   2.039e12   3e11    2.5e10   8.0         108    -         -
a100-40gb    NVIDIA A100-SXM4-40GB           40960M   3.12e14   1.555e12   3e11    1.25e10  8.0         108    -         -
a30          NVIDIA A30                      24576M   1.65e14   9.33e11    3.2e10  1.25e10  8.0         56     -         -
a10          NVIDIA A10                      23028M   1.25e14   6e11       3.2e10  1.25e10  8.6         72     -         -
a10g         NVIDIA A10G                     23028M   7e13      6e11       3.2e10  1.25e10  8.6         80     -         -
a40          NVIDIA A40                      46068M   1.497e14  6.96e11    3.2e10  1.25e10  8.6         84     -         -
a6000        NVIDIA RTX A6000                49140M   1.548e14  7.68e11    3.2e10  1.25e10  8.6         84     -         -
rtx3090      NVIDIA GeForce RTX 3090         24576M   7.1e13    9.36e11    3.2e10  1.25e10  8.6         82     -         -
"""
_AMDS = """
name    reported             memory  flops      bandwidth  link     network  per_host  per_chip
mi250x  AMD Instinct MI250X  64G     1.915e14   1.638e12   1e11     5e10     -         2
mi300a  AMD Instinct MI300A  128G    9.806e14   5.3e12     3.84e11  5e10     4         -
mi300x  AMD Instinct MI300X  192G    1.3074e15  5.3e12     4.48e11  5e10     -         -
mi325x  AMD Instinct MI325X  256G    1.3074e15  6e12       4.48e11  5e10     -         -
mi350x  AMD Instinct MI350X  288G    2.3e15     8e12       5.38e11  5e10     -         -
mi355x  AMD Instinct MI355X  288G    2.5e15     8e12       5.38e11  5e10     -         -
"""
_WORDS = {  # what a whole word of a GPU's reported name begins with, where that is not its name here
    "h100-pcie": "h100[ -]pcie",
    "h100-nvl": "h100[ -]nvl",
    "h200-nvl": "h200[ -]nvl",
    "rtx4090": "rtx 4090(?! .*laptop)",
    "rtx6000-ada": "rtx 6000 ada",
    "rtx5090": "rtx 5090(?! .*laptop)",
    "rtxpro6000": "rtx pro 6000",
    "t4": "t4g?",
    "v100": "v100s?",
    "v100-32gb": "v100s?.*32gb",
    "a100": "a[18]00",
    "a100-40gb": "a[18]00.* ?40gb",
    "a6000": "(rtx )?a6000",
    "rtx3090": "rtx 3090(?! .*laptop)",
    "mi250x": "mi2[15]0x?|gfx90a",
    "mi300x": "mi300x?|gfx942",
    "mi355x": "mi355x|gfx950",
}
CPU = Device(
    name="cpu",
    platform="cpu",
    memory=16_000_000_000,
    flops=1e11,  # of float32. Those of a CPU are rough, and only their ratios matter
    bandwidth=2e10,
    reported="cpu",
)
_COUNTS = ("per_host", "alone", "joined", "per_chip", "cores")
_FIGURES = ("flops", "bandwidth", "link", "network", "numbered")
_UNITS = {"G": GIB, "M": MIB}


def _rows(table: str) -> Iterator[dict[str, str]]:
    """Yields the cells of each row by column, without empty ones."""
    names, *rows = (re.split(r" {2,}", line) for line in table.strip().splitlines())
    for row in rows:
        yield {name: cell for name, cell in zip(names, row, strict=True) if cell != "-"}


def _device(platform: str, row: dict[str, str]) -> Device:
    """Returns the device of a row."""
    own: dict[str, Any] = {name: cell for name, cell in row.items() if name != "words"}
    own |= {name: int(own[name]) for name in _COUNTS if name in own}
    own |= {name: float(own[name]) for name in _FIGURES if name in own}
    memory = int(float(row["memory"][:-1]) * _UNITS[row["memory"][-1]])
    own["memory"] = memory - CONTEXT if platform == "gpu" else memory
    if "grids" in row:
        own |= {"grids": _GRIDS[row["grids"]], "target": row["name"]}
    if "capability" in row:
        own["target"] = f"sm_{row['capability'].replace('.', '')}"
    return Device(platform=platform, **own)


_TPU_NAMES = {word: row["name"] for row in _rows(_TPUS) for word in row["words"].split()}
DEVICES: dict[str, Device] = {
    **{row["name"]: _device("tpu", row) for row in _rows(_TPUS)},
    **{row["name"]: _device("gpu", row) for table in (_NVIDIAS, _AMDS) for row in _rows(table)},
    "cpu": CPU,
}
_GPU_NAMES = {name: _WORDS.get(name, name) for name, one in DEVICES.items() if one.platform == "gpu"}
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
    """Returns the name of a kind in the table, or an empty text. A special kind stands behind the common one."""
    if plain in DEVICES:
        return plain
    if tpu := re.fullmatch(r"tpu ?v?(\d+)[ -]?([a-z]*)", plain):
        return _TPU_NAMES.get("".join(tpu.groups()), "")
    words = {name: f"(?<![a-z0-9])({pattern})(?![a-z0-9])" for name, pattern in _GPU_NAMES.items()}
    return next((name for name in reversed(words) if re.search(words[name], plain)), "")


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
