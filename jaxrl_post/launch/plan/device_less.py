"""Compiles for devices that are not there, by the wheel of their compiler: libtpu, or jax's plugin for CUDA.

Invariant: no device is asked for, and none is locked. What is not installed is None, never an error.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jaxrl_post.launch.plan.chips import Slice
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel.devices import Device

WHEELS = {"tpu": ("libtpu",), "gpu": ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")}
# libtpu asks a metadata server where it is, and a lock that one process holds, unless it is told not to.
_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
# What XLA's GPU compiler asks of a device: by compute capability, from the CUDA programming guide's table of capabilities.
# In order: shared memory of a multiprocessor, and of a block that asks for more. Then threads and float32 units of a
# multiprocessor. Last a kind with this capability that Pallas knows by its name: without a device it knows no others.
_CAPABILITIES = {
    "7.0": (98304, 98304, 2048, 64, "Tesla V100-SXM2-16GB"),
    "7.5": (65536, 65536, 1024, 64, "Tesla T4"),
    "8.0": (167936, 166912, 2048, 64, "NVIDIA A100"),
    "8.6": (102400, 101376, 1536, 128, "NVIDIA A10"),
    "8.9": (102400, 101376, 1536, 128, "NVIDIA L4"),
    "9.0": (233472, 232448, 2048, 128, "NVIDIA H100"),
    "10.0": (233472, 232448, 2048, 128, "NVIDIA B200"),
    "10.3": (233472, 232448, 2048, 128, "NVIDIA B300"),
    "12.0": (102400, 101376, 1536, 128, "NVIDIA RTX PRO 6000"),
}
_GPU = """gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  threads_per_core_limit: {threads}
  core_count: {cores}
  fpus_per_core: {units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  shared_memory_per_block_optin: {most}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{kind}"
"""


def take_none() -> None:
    """Keeps this process off every accelerator. Its first call of jax must come later."""
    jax.config.update("jax_platforms", "cpu")
    for name, value in _ALONE.items():
        os.environ.setdefault(name, value)


def is_there(where: Slice) -> bool:
    """Returns whether this slice's compiler is installed here. It compiles for one slice, not for several."""
    return bool(where.chip.target) and where.slices == 1 and any(map(_found, WHEELS[where.chip.platform]))


def mesh(where: Slice, sizes: tuple[int, int, int, int], kind: str = "") -> Mesh:
    """Returns a mesh of `sizes` (data, fsdp, expert, tensor) over the slice's first devices. It can only be compiled for.

    `kind`: what a GPU calls itself; by default a kind with its capability. `take_none` must have been called before.
    """
    chip, wanted = where.chip, int(np.prod(sizes))
    how: dict[str, Any] = {"topology_name": f"{chip.target}:{where.topology}"}
    if where.devices == 1 and chip.platform == "tpu":
        how["chips_per_host_bounds"] = [1, 1, 1]
    if chip.platform == "gpu":
        how = {"target_config": _told(chip, kind), "topology": where.topology}
    platform = "cuda" if chip.platform == "gpu" else chip.platform
    devices = topologies.get_topology_desc(platform=platform, **how).devices
    return Mesh(np.array(devices[:wanted]).reshape(sizes), meshes.AXES, axis_types=(AxisType.Auto,) * len(sizes))


def _told(chip: Device, kind: str) -> str:
    """Returns what the compiler asks of a GPU, as text of its own."""
    shared, most, threads, units, known = _CAPABILITIES[chip.capability]
    major, minor = chip.capability.split(".")
    return _GPU.format(
        shared=shared,
        most=most,
        threads=threads,
        units=units,
        cores=chip.cores,
        memory=chip.memory,
        bandwidth=int(chip.bandwidth),
        major=major,
        minor=minor,
        kind=kind or known,
    )


def used(compiled: Any) -> int:
    """Returns the bytes of a program on one device: arguments, results that live elsewhere, and temporaries."""
    told = compiled.memory_analysis()
    made = told.output_size_in_bytes - told.alias_size_in_bytes
    return told.argument_size_in_bytes + made + told.temp_size_in_bytes


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
