"""What is compiled for: chips, their memory, and the meshes that Qwen2.5-7B has on each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

GIB = 1 << 30
H200 = Path(__file__).with_name("h200.txtpb")
ONE_CHIP = {"chips_per_host_bounds": [1, 1, 1]}


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A topology without devices, and how data, fsdp and tensor divide it."""

    topology: str
    axes: tuple[int, int, int]
    how: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Target:
    """One chip to compile for.

    - `hbm`: bytes that a program may use on one device.
    - `call`: how a kernel of ours is named in the compiled text.
    - `relaid`: weights that the compiler copies, once a dispatch, into the tiling of its matrix unit.
    """

    platform: str
    hbm: int
    call: str
    relaid: tuple[str, ...]
    one: Slice
    rows: Slice

    def mesh(self, piece: Slice) -> Mesh:
        how = dict(piece.how) | (
            {"target_config": H200.read_text(), "topology": piece.topology}
            if self.platform == "cuda"
            else {"topology_name": piece.topology}
        )
        return mesh_of(topologies.get_topology_desc(platform=self.platform, **how).devices, piece.axes)


def mesh_of(devices, axes: tuple[int, int, int]) -> Mesh:
    """Returns a mesh of the first devices."""
    (data, fsdp, tensor), names = axes, ("data", "fsdp", "expert", "tensor")
    chosen = np.array(devices[: int(np.prod(axes))]).reshape(data, fsdp, 1, tensor)
    return Mesh(chosen, names, axis_types=(AxisType.Auto,) * len(names))


PROJECTIONS = ("q", "k", "v")  # [D, heads, H] is tiled over heads and H, and multiplied over D
MATRICES = (
    *PROJECTIONS,
    "o",
    "gate",
    "up",
    "down",
    "head",
)  # tpu7x tiles bf16 by 16 x 128 where arguments have 8 x 128

# A tpu7x chip is two devices, each with half of its memory.
TARGETS = {
    "v5e": Target(
        platform="tpu",
        hbm=int(15.75 * GIB),
        call="tpu_custom_call",
        relaid=PROJECTIONS,
        one=Slice(topology="v5e:1x1", axes=(1, 1, 1), how=ONE_CHIP),
        rows=Slice(topology="v5e:2x2", axes=(1, 1, 4)),
    ),
    "v5p": Target(
        platform="tpu",
        hbm=int(95.74 * GIB),
        call="tpu_custom_call",
        relaid=PROJECTIONS,
        one=Slice(topology="v5p:1x1x1", axes=(1, 1, 1), how=ONE_CHIP),
        rows=Slice(topology="v5p:2x2x1", axes=(1, 1, 4)),
    ),
    "v6e": Target(
        platform="tpu",
        hbm=int(31.25 * GIB),
        call="tpu_custom_call",
        relaid=PROJECTIONS,
        one=Slice(topology="v6e:1x1", axes=(1, 1, 1), how=ONE_CHIP),
        rows=Slice(topology="v6e:1x1", axes=(1, 1, 1), how=ONE_CHIP),
    ),
    "tpu7x": Target(
        platform="tpu",
        hbm=int(94.75 * GIB),
        call="tpu_custom_call",
        relaid=MATRICES,
        one=Slice(topology="tpu7x:2x2x1", axes=(1, 1, 1)),
        rows=Slice(topology="tpu7x:2x2x1", axes=(2, 1, 4)),
    ),
    "sm_90": Target(
        platform="cuda",
        hbm=139 * GIB,
        call="mosaic_gpu",
        relaid=(),
        one=Slice(topology="1x1x1", axes=(1, 1, 1)),
        rows=Slice(topology="1x1x1", axes=(1, 1, 1)),
    ),
}


def memory(compiled: Any) -> dict[str, int]:
    """Returns bytes on one device: arguments, results, results that live in arguments, everything else, and the sum."""
    told = compiled.memory_analysis()
    given, made, alias, temp = (
        getattr(told, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")
    )
    return {"given": given, "made": made, "alias": alias, "temp": temp, "total": given + made - alias + temp}


def shard_bytes(tree: Any) -> int:
    """Returns the bytes of one device's part of placed shapes."""
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree))
