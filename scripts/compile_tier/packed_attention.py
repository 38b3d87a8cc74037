"""Attention of packed rows on an H100, as one JSON line: registers and spills of the kernels, or what a train step computes and moves.

    python scripts/compile_tier/packed_attention.py kernels HEAD
    python scripts/compile_tier/packed_attention.py step KERNEL [OPTION=VALUE ...]

- HEAD: the size of a head. Each kernel of kernels/flash_hopper.py is compiled plain, and with a window, a cap and sinks
- KERNEL: hopper or triton, for one micro-batch of Qwen2.5-1.5B with four packed rows of 4,096 tokens

Run it with the Python of the compile tier.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
PRESET, ROWS, TOKENS = "qwen2_5_1_5b", 4, 4096
SHAPE = (2, 4096, 12, 2)  # rows, tokens, query heads and key heads of the kernels alone
CASES = {"plain": dict(window=None, soft_cap=None), "window_cap_sinks": dict(window=1000, soft_cap=30.0)}
NAMES = ("flash_forward", "flash_backward_queries", "flash_backward_keys")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads\s+ptxas info\s*: Used (\d+) registers")


def kernels(head: int) -> dict[str, int]:
    """Returns what ptxas says of each kernel: registers, bytes spilled and read again, and whether its products wait for each other."""
    found = {}
    for case, how in CASES.items():
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_PTXAS="1"):
            os.environ["MOSAIC_GPU_DUMP_TO"] = folder  # put back with the others
            compile_both(head, with_sinks=case != "plain", **how)
            found |= {f"{case}.{key}": value for key, value in told(Path(folder))}
    return found


def told(folder: Path) -> Iterator[tuple[str, int]]:
    for name in NAMES:
        (file,) = folder.glob(f"{name}_hopper*.ptxas")
        text = file.read_text()
        stores, loads, registers = map(int, SPILLS.search(text).groups())
        yield f"{name}.registers", registers
        yield f"{name}.spill_bytes", stores + loads
        yield f"{name}.serialized", len(re.findall("serializ", text))


def compile_both(head: int, *, with_sinks: bool, **how: Any) -> None:
    """Compiles the output and all gradients of rows of the shape."""
    import jax
    import jax.numpy as jnp

    from jaxrl_post.kernels import flash_hopper
    from jaxrl_post.launch.plan import chips, device_less
    from jaxrl_post.parallel import mesh as meshes

    mesh = device_less.mesh(chips.read("h100"), (1, 1, 1, 1))
    (rows, tokens, heads, kv_heads), home = SHAPE, meshes.replicated(mesh)
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=home)
    q, k = (shape((rows, tokens, count, head), jnp.bfloat16) for count in (heads, kv_heads))
    ids, sinks = shape((rows, tokens), jnp.int32), shape((heads,), jnp.float32)

    def run(q, k, v, ids, sinks, slope):
        form = functools.partial(flash_hopper.attention, scale=head**-0.5, **how)
        out, back = jax.vjp(lambda q, k, v, sinks: form(q, k, v, ids, sinks), q, k, v, sinks if with_sinks else None)
        return out, back(slope)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(run).lower(q, k, k, ids, sinks, q).compile()


def step(kernel: str, options: Sequence[str]) -> dict[str, float]:
    """Returns FLOPs and bytes of the gradient of one micro-batch. Every row counts as one segment, the dearest case."""
    import kernel_costs
    import traffic
    from gpu import training
    from targets import GIB, memory

    from jaxrl_post.kernels import flash_hopper
    from jaxrl_post.models.presets import PRESETS

    if kernel == "triton":
        flash_hopper.serves = lambda *shape: False
    model = PRESETS[PRESET]
    program, shapes = training.planned(model, PRESET, ROWS, TOKENS, options).jitted()["accumulate"]
    made = program.lower(*shapes).compile()
    text, used = made.as_text(), memory(made)
    found = traffic.count(text, kernel_costs.PACKED_ROWS)
    assert not found.unknown, f"kernels without a formula: {found.unknown}"
    runs = sum(f"{name}_hopper" in line for line in text.splitlines() if " custom-call(" in line for name in NAMES)
    return {
        "flops_over_useful": found.flops() / training.useful(model, [TOKENS] * ROWS),
        "moved_gb": found.bytes() / 1e9,
        "total_gib": used["total"] / GIB,
        "kernels_of_ours": runs,
    }


if __name__ == "__main__":
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a cache would answer for the compiler
    os.environ |= {"JAX_PLATFORMS": "cpu"}
    from jaxrl_post.launch.plan import device_less

    device_less.take_none()
    part, which, *rest = sys.argv[1:]
    print(json.dumps(kernels(int(which)) if part == "kernels" else step(which, rest)))
