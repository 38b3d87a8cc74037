"""Which device is there, and how fast it copies and multiplies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu.part import Part

ASKED = """
import json, jax
d = jax.devices()
print(json.dumps([d[0].platform, d[0].device_kind, len(d), str(getattr(d[0], "compute_capability", 0))]))
"""


def ask(root: Path) -> dict[str, Any]:
    """Returns platform, kind, count and compute capability of what jax sees.

    Another process is asked, so that this one holds no memory of the device.
    """
    done = subprocess.run(
        [sys.executable, "-c", ASKED], cwd=root, text=True, check=True, stdout=subprocess.PIPE, timeout=120
    )
    return dict(zip(("platform", "kind", "count", "capability"), json.loads(done.stdout.splitlines()[-1])))


def why_not(seen: dict[str, Any]) -> str:
    """Returns the sentence of the refusal, or nothing."""
    if seen["platform"] == "gpu" and float(seen["capability"]) >= 9.0:
        return ""
    return (
        f"gpu_check needs an NVIDIA GPU of compute capability 9.0 or later, and jax sees {seen['count']} x "
        f"{seen['kind']} ({seen['platform']}); run it on such a machine, with the extra jaxrl_post[cuda]"
    )


def speed(part: Part, numbers: int = 1 << 30, width: int = 8192) -> None:
    """Measures a copy of `numbers` float32 numbers, and products of bfloat16 matrices of `width` x `width`."""
    import jax
    import jax.numpy as jnp
    from gpu import timing

    took = timing.seconds(jax.jit(lambda x: x + 1), jnp.zeros(numbers, jnp.float32), turns=5)
    part.figure("device.copy_gb_per_s", 8 * numbers / took / 1e9)
    a = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16)
    took = timing.seconds(jax.jit(jnp.matmul), a, a)
    part.figure("device.product_tflops", 2 * width**3 / took / 1e12)
    part.figure("device.memory_gib", timing.memory() / 2**30 if timing.memory() < float("inf") else None)


def target(part: Part) -> None:
    """Writes the compiler's description of the device, from which programs are compiled without one."""
    import jax
    from jax._src.lib import xla_client

    topology = xla_client.get_topology_for_devices(jax.devices())  # jax 0.11 gives it through its topology
    part.figure("device.target_config", str(getattr(topology, "target_config", "")))
