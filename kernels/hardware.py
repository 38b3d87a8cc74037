"""Which devices run the kernels of their platform: those for which the kernels were written and compiled.

Another device of the platform runs the jnp references. A choice by platform alone would end in a compiler's error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

PLATFORMS = frozenset({"cpu", "cuda", "tpu"})  # as `platform_dependent` names them
GPU = ("cuda", "gpu")  # as a topology's device and a real one name it
HOPPER = 9  # major compute capability: wgmma exists there alone
AMPERE = 8  # the first whose tensor cores multiply bfloat16
ROOMY = frozenset({"8.0", "9.0", "10.0", "10.3"})  # a block has 163 KB of shared memory or more; of others 99 are sure
FIRST_TPU = 5


def without_kernels(device: Any) -> str:
    """Returns why a device runs no kernel, or an empty text. `device`: a jax.Device, also of a topology."""
    if device.platform == "tpu":
        found = re.search(r"TPU ?v?(\d+)", device.device_kind)
        if found and int(found[1]) >= FIRST_TPU:
            return ""
        return f"the kernels are written for TPU v{FIRST_TPU} and later, and this is {device.device_kind}"
    if device.platform in GPU:
        capability = str(getattr(device, "compute_capability", "unknown"))
        if capability.partition(".")[0] == str(HOPPER):
            return ""
        return f"the kernels are written for compute capability {HOPPER}.0, and {device.device_kind} has {capability}"
    return f"{device.platform} has no kernels"


def without_flash(device: Any) -> str:
    """Returns why a device does not run kernels that need no wgmma, or an empty text: packed rows, experts, recurrent rows, thresholds."""
    if device.platform not in GPU:
        return without_kernels(device)
    capability = str(getattr(device, "compute_capability", "unknown"))
    major = capability.partition(".")[0]
    if major.isdigit() and int(major) >= AMPERE:
        return ""
    return (
        f"the kernel is written for compute capability {AMPERE}.0 and later, and {device.device_kind} has {capability}"
    )


def platforms(device: Any, without: Callable[[Any], str] = without_kernels) -> frozenset[str]:
    """Returns the platforms whose kernels a program for `device` may hold.

    A program that is made on a CPU may be lowered for any platform, so it holds them all. `without`: returns why a device
    does not run them."""
    return PLATFORMS if device.platform == "cpu" or not without(device) else frozenset()
