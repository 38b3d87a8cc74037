"""Compiles whole programs of models with experts for slices that are not there, and counts what each does, as JSON.

    python scripts/compile_tier/experts.py train|rows|swap MODEL SLICE
    python scripts/compile_tier/experts.py planted

Sizes and meshes are those of the config's choice for the slice, at full depth. Run it with the Python of the compile tier.
The show compile-experts judges the figures.

- train: one micro-batch of the learner, forward and backward.
- rows: a dispatch of the engine with its larger row size.
- swap: all programs that make the engine's weights of the learner's.
- planted: `jax.lax.ragged_dot` of one layer on a GPU, which multiplies every row with every expert.

Seconds are CPU seconds of this process, from lowering on. Memory is of one device: the program's own, and what lies beside
it in a run. The exchange is the collectives of rows and sums in the layers with experts. Its floor is that rows are gathered
once, in bfloat16, and sums are scattered once, in float32; twice that for forward and backward.

A collective counts by its result. XLA:TPU adds the engine's sums in float32 and hands them on in bfloat16, so there a row
program's exchange counts half.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
CHOICES = {  # model: config and choice, but for the slice; and the slices
    "qwen3_30b_a3b": ("configs/models/gsm8k_qwen3.py:30b-a3b-", ("v5p-64", "v6e-64", "2x8xh100")),
    "gpt_oss_20b": ("configs/models/gsm8k_gpt_oss.py:", ("v5p-64", "v6e-64", "8xh100")),
}
MIB = 1 << 20
EXCHANGE = re.compile(r"/experts/shard_map/(all_gather|reduce_scatter|psum)\b")


def build_run(model: str, where: str) -> tuple:
    """Returns the config, the model's shape, the slice, the meshes, and the learner of a choice."""
    from jaxrl_post.config import load, resolve
    from jaxrl_post.launch.parts import build
    from jaxrl_post.launch.plan import chips, device_less
    from jaxrl_post.models import decoder
    from jaxrl_post.models.presets import PRESETS

    there, shape = chips.read(where), PRESETS[model]
    config = resolve(load(str(ROOT / f"{CHOICES[model][0]}{where}")))
    devices = build.device_plan(config, list(device_less.mesh(there, (there.devices, 1, 1, 1)).devices.flat))
    learner = build.learner(config, shape, decoder.abstract(shape), devices)
    small, given = learner.jitted()["zeros"]
    small.lower(*given).compile()  # starts the compiler
    return config, shape, there, devices, learner


def train(model: str, where: str) -> dict:
    """Returns the figures of a micro-batch."""
    from targets import memory, shard_bytes

    config, shape, there, devices, learner = build_run(model, where)
    program, shapes = learner.jitted()["accumulate"]
    begun = time.process_time()
    compiled = program.lower(*shapes).compile()
    seconds = time.process_time() - begun
    beside = shard_bytes(learner.state) - shard_bytes(learner.params)
    if not config.engine.sleep:
        beside += sum(_engine(config, shape, devices))
    tokens = config.mesh.expert * config.batch.tokens * config.batch.rows // config.mesh.shards
    found = _counted(compiled.as_text(), shape, devices.learner, len(shape.expert_layers), tokens)
    floor = 2 * (2 + 4) * tokens * shape.embed * len(shape.expert_layers)
    return found | {
        "cpu_s": seconds,
        "memory_mib": (memory(compiled)["total"] + beside) / MIB,
        "hbm_mib": there.chip.memory / MIB,
        "exchange_over_floor": found["exchange_gb"] * 1e9 / floor,
    }


def rows(model: str, where: str) -> dict:
    """Returns the figures of a dispatch."""
    import jax
    import jax.numpy as jnp
    from targets import memory, shard_bytes

    from jaxrl_post.engine.compiled import Programs
    from jaxrl_post.launch.parts import build
    from jaxrl_post.models import decoder
    from jaxrl_post.parallel import mesh as meshes

    config, shape, there, devices, learner = build_run(model, where)
    sizes = build.engine_sizes(config, build.layouts(config)[0], shape)
    most = max(sizes.row_sizes)
    homes = meshes.param_shardings(devices.first, decoder.axes(shape), "engine")
    weights = jax.tree.map(
        lambda x, home: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=home), decoder.abstract(shape), homes
    )
    begun = time.process_time()
    programs = Programs(shape, devices.first, dataclasses.replace(sizes, row_sizes=(most,), prompt_rows=0))
    programs.compile(weights)
    seconds = time.process_time() - begun
    compiled = programs.compiled[f"dispatch_{most}"]
    found = _counted(compiled.as_text(), shape, devices.first, len(shape.expert_layers), most)
    return found | {
        "cpu_s": seconds,
        "memory_mib": (memory(compiled)["total"] + shard_bytes(learner.state)) / MIB,
        "hbm_mib": there.chip.memory / MIB,
        "exchange_over_floor": found["exchange_gb"] * 1e9 / (4 * most * shape.embed * len(shape.expert_layers)),
    }


def swap(model: str, where: str) -> dict:
    """Returns the figures of new weights for the engine."""
    import roofline
    from targets import memory, shard_bytes

    config, shape, there, devices, learner = build_run(model, where)
    weights, pages = _engine(config, shape, devices)
    leaves, new = roofline.layouts(shape, devices.learner, devices.first)
    begun, calls, temporaries, host = time.process_time(), 0, 0, 0
    for compiled, times in roofline.sync_programs(leaves, new):
        calls, temporaries = calls + times, max(temporaries, memory(compiled)["temp"])
        host += len(re.findall(r"S\(5\)|infeed|outfeed|is_host_transfer=true", compiled.as_text()))
    beside = shard_bytes(learner.state) + weights + (0 if config.engine.sleep else pages)
    return {
        "cpu_s": time.process_time() - begun,
        "calls": calls,
        "through_host": host,
        "memory_mib": (temporaries + beside) / MIB,
        "hbm_mib": there.chip.memory / MIB,
    }


def planted() -> dict:
    """Returns the products over all experts that the count finds in `jax.lax.ragged_dot` on a GPU."""
    import jax
    import jax.numpy as jnp

    from jaxrl_post.launch.plan import chips, device_less
    from jaxrl_post.models.presets import PRESETS
    from jaxrl_post.parallel import mesh as meshes

    shape, mesh = PRESETS["qwen3_30b_a3b"], device_less.mesh(chips.read("h100"), (1, 1, 1, 1))
    e, home = shape.experts, meshes.replicated(mesh)
    given = (512, shape.embed), (e.count, shape.embed, e.ffw), (e.count,)
    types = jnp.bfloat16, jnp.bfloat16, jnp.int32
    shapes = [jax.ShapeDtypeStruct(dims, dtype, sharding=home) for dims, dtype in zip(given, types, strict=True)]
    return _counted(jax.jit(jax.lax.ragged_dot).lower(*shapes).compile().as_text(), shape, mesh, 1, given[0][0])


def _engine(config, shape, devices) -> tuple[int, int]:
    """Returns the bytes on a device of the engine's weights and of its pages, in bfloat16."""
    import jax

    from jaxrl_post.models import cache_kinds, decoder
    from jaxrl_post.parallel import mesh as meshes

    homes = jax.tree.leaves(meshes.param_shardings(devices.first, decoder.axes(shape), "engine"))
    leaves = jax.tree.leaves(decoder.abstract(shape))
    weights = sum(2 * math.prod(home.shard_shape(x.shape)) for x, home in zip(leaves, homes, strict=True))
    held = cache_kinds.held(shape.kept, devices.first.shape[meshes.TENSOR])
    return weights, 2 * config.pages * config.engine.page_size * held


def _counted(text: str, shape, mesh, layers: int, rows: int) -> dict:
    """Returns what a text does with experts. rows: that devices along the axis of experts have together.

    - dense_products: products, outside of kernels, one of whose sides is all matrices of one name that a device has
    - copied_matrices: lines that copy or transpose these
    - kernels: calls of the grouped kernels
    - exchange_gb: of rows and sums, in one turn of a program's outer loop. XLA puts gradients of weights into the same
      collectives, and arrays that have not so many rows do not count.
    """
    import collectives
    import compiled_text
    import traffic

    e = shape.experts
    own = (e.count // mesh.shape["expert"]) * shape.embed * (e.ffw // mesh.shape["tensor"])
    program = compiled_text.read(text)
    dense, copied, kernels = 0, 0, 0
    for run in program.runs():
        for one in (run, *program.within(run)):
            sides = [math.prod(array.dims) for line in one.inside.given(one.line) for array in line.arrays]
            dense += bool(traffic.products(one)) and any(size % own == 0 for size in sides if size)
        line = run.line
        sizes = {math.prod(array.dims) for array in line.arrays}
        copied += line.operation in ("copy", "copy-start", "transpose") and own in sizes
        kernels += line.operation == "custom-call" and "grouped_" in f"{line.name} {line.scope}"
    found, _ = collectives.count(text)
    moved = sum(
        array.bytes * min(one.turns, layers)
        for one in found
        if EXCHANGE.search(one.scope)
        for array in one.shapes
        if rows in array.dims
    )
    return {"dense_products": dense, "copied_matrices": copied, "kernels": kernels, "exchange_gb": moved / 1e9}


if __name__ == "__main__":
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a cache would answer for the compiler
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAXRL_MODELS": "/", "JAXRL_DATA": "/"}
    from jaxrl_post.launch.plan import device_less

    device_less.take_none()
    program, *where = sys.argv[1:]
    figures = {"train": train, "rows": rows, "swap": swap, "planted": planted}[program](*where)
    print(json.dumps(figures))
