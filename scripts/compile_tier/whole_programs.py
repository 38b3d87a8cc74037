"""Compiles whole programs of a model for slices that are not there, and counts what each does, as JSON.

    python scripts/compile_tier/whole_programs.py train|rows|swap MODEL SLICE
    python scripts/compile_tier/whole_programs.py planted_experts|planted_states

Sizes and meshes are those of the config's choice for the slice, at full depth. Run it with the Python of the compile tier.
The shows compile-experts and compile-hybrids judge the figures.

- train: one micro-batch of the learner, forward and backward.
- rows: a dispatch of the engine. Of EXPERTS it has the larger row size, of HYBRIDS a row for each slot.
- swap: all programs that make the engine's weights of the learner's. With low-rank additions they move these and merge them.
- planted_experts: `jax.lax.ragged_dot` of one layer on a GPU, which multiplies every row with every expert.
- planted_states: a loop that changes one layer's states, and one that copies them too.

Seconds are CPU seconds of this process, from lowering on. Memory is of one device: the program's own, and what the plan has
beside it.

The exchange is the collectives of rows and sums in the layers with experts. Its floor is that rows are gathered
once, in bfloat16, and sums are scattered once, in float32; twice that for forward and backward. A collective counts by its
result. XLA:TPU adds the engine's sums in float32 and hands them on in bfloat16, so there a row program's exchange counts half.

Decode is one step of a dispatch of HYBRIDS, in which each slot has one row. The slots hold up to half of the longest text, spread
evenly over 256 positions. No window is shorter. Its floor is what any program must move on a device:
- weights once, but of the tables of embeddings the rows alone
- the pages of each slot once for every layer that reads them, and the new positions written
- states and the convolutions' tails read and written once
Kernels count by the formulas of scripts/kernel_costs.py. All matrices of experts count on both sides, chosen or not: which
ones a kernel reads is compile-experts' subject. A loop without a count is one turn, as many as a layer's states need here.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
# Model: config and choice, but for the slice; and the slices.
EXPERTS = {
    "qwen3_30b_a3b": ("configs/models/gsm8k_qwen3.py:30b-a3b-", ("v5p-64", "v6e-64", "2x8xh100")),
    "gpt_oss_20b": ("configs/models/gsm8k_gpt_oss.py:", ("v5p-64", "v6e-64", "8xh100")),
}
HYBRIDS = {
    "qwen3_5_9b": ("configs/models/gsm8k_qwen3_5.py:9b-", ("v6e-16", "v5p-16", "8xh100")),
    "qwen3_5_35b_a3b": ("configs/models/gsm8k_qwen3_5.py:35b-a3b-", ("v6e-16", "v5p-64", "8xh100")),
    "gemma4_31b": ("configs/models/gsm8k_gemma4.py:31b-", ("v6e-16", "v5p-64", "8xh100")),
    "gemma4_e4b": ("configs/models/gsm8k_gemma4.py:e4b-", ("v6e-1", "v5p-8", "h100")),
}
MIB, SPREAD = 1 << 20, 256
EXCHANGE = re.compile(r"/experts/shard_map/(all_gather|reduce_scatter|psum)\b")


def build_run(model: str, where: str) -> tuple:
    """Returns the config, the model's shape, the slice, the meshes, and the learner of a choice."""
    from jaxrl_post.config import load, resolve
    from jaxrl_post.launch.parts import build
    from jaxrl_post.launch.plan import chips, device_less
    from jaxrl_post.models import decoder
    from jaxrl_post.models.presets import PRESETS

    there, shape = chips.read(where), PRESETS[model]
    config = resolve(load(str(ROOT / f"{(EXPERTS | HYBRIDS)[model][0]}{where}")), platform=there.chip.platform)
    devices = build.device_plan(config, list(device_less.mesh(there, (there.devices, 1, 1, 1)).devices.flat))
    learner = build.learner(config, shape, decoder.abstract(shape), devices)
    small, given = learner.jitted()["zeros"]
    small.lower(*given).compile()  # starts the compiler
    return config, shape, there, devices, learner


def train(model: str, where: str) -> dict:
    """Returns the figures of a micro-batch."""
    from targets import memory

    config, shape, there, devices, learner = build_run(model, where)
    program, shapes = learner.jitted()["accumulate"]
    begun = time.process_time()
    compiled = program.lower(*shapes).compile()
    seconds = time.process_time() - begun
    tokens = config.mesh.expert * config.batch.tokens * config.batch.rows // config.mesh.shards
    used, layers = memory(compiled), len(shape.expert_layers)
    found = _counted(compiled.as_text(), shape, devices.learner, layers, tokens)
    if model in EXPERTS:
        found["exchange_over_floor"] = found["exchange_gb"] * 1e9 / (12 * tokens * shape.embed * layers)
    return found | {
        "cpu_s": seconds,
        "temporaries_mib": used["temp"] / MIB,
        "memory_mib": (used["total"] + sum(_beside(config, shape, there, "learns").values())) / MIB,
        "hbm_mib": there.chip.memory / MIB,
    }


def rows(model: str, where: str) -> dict:
    """Returns the figures of a dispatch."""
    import jax.numpy as jnp
    from targets import memory, shard_bytes

    from jaxrl_post.engine.compiled import Programs
    from jaxrl_post.launch.parts import build
    from jaxrl_post.models import decoder

    config, shape, there, devices, _ = build_run(model, where)
    sizes = build.engine_sizes(config, build.layouts(config)[0], shape)
    size = (max if model in EXPERTS else min)(sizes.row_sizes)
    weights = _placed(decoder.abstract(shape), decoder.axes(shape), devices.first, "engine", jnp.bfloat16)
    begun = time.process_time()
    programs = Programs(shape, devices.first, dataclasses.replace(sizes, row_sizes=(size,), prompt_rows=0))
    programs.compile(weights)
    seconds, compiled = time.process_time() - begun, programs.compiled[f"dispatch_{size}"]
    text, used, layers = compiled.as_text(), memory(compiled), len(shape.expert_layers)
    found = _counted(text, shape, devices.first, layers, size)
    if model in EXPERTS:
        found["exchange_over_floor"] = found["exchange_gb"] * 1e9 / (4 * size * shape.embed * layers)
    else:
        found |= _decode(text, shape, devices.first, weights, sizes)
    beside = _beside(config, shape, there, "generates")
    shared = shard_bytes(weights) - beside.pop("engine")  # with the learner
    return found | {
        "cpu_s": seconds,
        "temporaries_mib": used["temp"] / MIB,
        "memory_mib": (used["total"] + sum(beside.values()) - shared) / MIB,
        "hbm_mib": there.chip.memory / MIB,
    }


def swap(model: str, where: str) -> dict:
    """Returns the figures of new weights for the engine."""
    from targets import memory

    config, shape, there, devices, _ = build_run(model, where)
    begun, calls, temporaries, host = time.process_time(), 0, 0, 0
    for compiled, times in _swapping(config, shape, devices):
        calls, temporaries = calls + times, max(temporaries, memory(compiled)["temp"])
        host += len(re.findall(r"S\(5\)|infeed|outfeed|is_host_transfer=true", compiled.as_text()))
    seconds = time.process_time() - begun
    pages = {} if config.engine.sleep else _beside(config, shape, there, "swaps")
    beside = _beside(config, shape, there, "generates") | pages
    return {
        "cpu_s": seconds,
        "calls": calls,
        "through_host": host,
        "temporaries_mib": temporaries / MIB,
        "memory_mib": (temporaries + sum(beside.values())) / MIB,
        "hbm_mib": there.chip.memory / MIB,
    }


def planted_experts() -> dict:
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


def planted_states() -> dict:
    """Returns bytes over those of reading and writing the states of one layer once, of a loop that does it and of one that copies."""
    import jax
    import jax.numpy as jnp
    import traffic

    from jaxrl_post.launch.plan import chips, device_less
    from jaxrl_post.models.cache_kinds import states
    from jaxrl_post.models.presets import PRESETS
    from jaxrl_post.parallel import mesh as meshes

    kind, mesh = states(PRESETS["qwen3_5_9b"].kept)[0], device_less.mesh(chips.read("h100"), (1, 1, 1, 1))
    sizes = (64, kind.value_heads, kind.key_dim, kind.value_dim)
    given = [jax.ShapeDtypeStruct(dims, jnp.float32, sharding=meshes.replicated(mesh)) for dims in (sizes, ())]

    def over_floor(changed) -> float:
        def run(state, factor):
            return jax.lax.fori_loop(0, 8, lambda _, state: changed(state, factor), state)

        text = jax.jit(run, donate_argnums=0).lower(*given).compile().as_text()
        return traffic.count(text).bytes() / (8 * 2 * 4 * math.prod(sizes))

    return {
        "once_over_floor": over_floor(lambda state, factor: state * factor),
        "copied_over_floor": over_floor(lambda state, factor: jax.lax.optimization_barrier(state[::-1])[::-1] * factor),
    }


def _placed(shapes, axes, mesh, room: str, dtype):
    """Returns the shapes with their places on a mesh."""
    import jax

    from jaxrl_post.parallel import mesh as meshes

    homes = meshes.param_shardings(mesh, axes, room)
    return jax.tree.map(lambda x, home: jax.ShapeDtypeStruct(x.shape, dtype, sharding=home), shapes, homes)


def _beside(config, shape, there, when: str) -> dict[str, int]:
    """Returns what the plan has on a device beside a program that learns, generates or swaps, in bytes. engine: its weights."""
    from jaxrl_post.launch.plan import memory_plan, slice_plan
    from jaxrl_post.launch.plan.memory_plan import Kind

    learns = when == "learns"
    sort = memory_plan.SHARED
    if config.engine.sleep:
        sort = memory_plan.LEARNING if learns else memory_plan.GENERATING
    own = {Kind.ACTIVATIONS, Kind.BATCH_RECORDS, Kind.DRAFTING}
    own |= {Kind.WEIGHTS, Kind.BASE, Kind.GRADIENT} if learns else set()
    own |= {Kind.PAGES, Kind.RECORDS} if when == "generates" else set()
    out = {"learner": 0, "engine": 0}
    for item in slice_plan.plan(config, shape, there).held[sort]:
        if item.kind not in own:
            out["engine" if item.kind is Kind.ENGINE_WEIGHTS else "learner"] += item.bytes
    return out


def _swapping(config, shape, devices) -> Iterator[tuple]:
    """Yields the compiled programs of a swap, each with the number of its calls."""
    import jax
    import jax.numpy as jnp
    import roofline

    from jaxrl_post.launch.parts import adapter
    from jaxrl_post.models import decoder, lora

    # jax renumbers the leaves where the engine has the devices in another order, so both meshes have the engine's here.
    own, order = devices.learner, devices.first.devices
    learner = jax.sharding.Mesh(order.reshape(own.devices.shape), own.axis_names, axis_types=own.axis_types)
    if not config.lora.rank:
        yield from roofline.sync_programs(*roofline.layouts(shape, learner, devices.first))
        return
    added = adapter.adapting(config.lora, shape)
    shapes, axes = lora.abstract(added), lora.axes(added)
    theirs, ours = (
        _placed(shapes.adapter, axes.adapter, mesh, room, jnp.float32)
        for mesh, room in ((devices.first, "engine"), (learner, "learner"))
    )
    homes = [leaf.sharding for leaf in jax.tree.leaves(theirs)]
    yield from roofline.sync_programs(jax.tree.leaves(ours), homes, "float32")
    base, _ = lora.matrices(
        _placed(decoder.abstract(shape), decoder.axes(shape), devices.first, "engine", jnp.bfloat16), added.lora
    )
    merge = functools.partial(lora.merged, lora=added.lora, dtype=jnp.bfloat16)
    run = jax.jit(
        lambda old, base, adapter: merge(base, adapter),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, base),
        donate_argnums=0,
        keep_unused=True,
    )
    yield run.lower(base, base, theirs).compile(), 1


def _decode(text: str, shape, mesh, weights, sizes) -> dict:
    """Returns the bytes of a step in which each slot has one row, on a device, and those that any program must move."""
    import kernel_costs
    import traffic
    from targets import shard_bytes

    from jaxrl_post.models import cache_kinds

    ways, slots, longest = mesh.shape["tensor"], sizes.slots, sizes.max_length // 2
    ends = [longest - SPREAD + SPREAD * (slot + 1) // slots for slot in range(slots)]
    assert all(longest <= (one.window or longest) for one in cache_kinds.paged(shape.kept)), "a window is shorter"
    found = traffic.count(text, kernel_costs.paged(lambda rows: ends, slots))
    states = cache_kinds.states(shape.kept)
    boxes = [one for one in found.unknown if " " in one]
    assert not boxes, f"kernels without a formula: {boxes}"
    assert len(found.unknown) <= 1 + len(states), f"loops without a count: {found.unknown}"
    tables = [name for name in ("embed", "layer_embed") if name in weights and (name != "embed" or not shape.tied)]
    read = shard_bytes(weights) - shard_bytes([weights[name] for name in tables])
    read += 2 * slots * (shape.embed + shape.layers * shape.layer_embeds)
    cache = 2 * (sum(ends) * cache_kinds.read(shape.kept) + slots * cache_kinds.held(shape.kept)) / ways
    moved = 2 * slots * sum(4 * one.matrices + 2 * (one.width - 1) * one.inputs for one in states) / ways
    step = sum(one.bytes / (1 if one.loops else sizes.steps_per_dispatch) for one in found.costs)
    return {
        "weights_gb": read / 1e9,
        "kv_gb": cache / 1e9,
        "states_gb": moved / 1e9,
        "compiled_gb": step / 1e9,
        "decode_over_floor": step / (read + cache + moved),
    }


def _counted(text: str, shape, mesh, layers: int, rows: int) -> dict:
    """Returns what a text does with experts, or nothing where there are none. rows: that devices along the axis of experts have together.

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
    if e is None:
        return {}
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
    known = (train, rows, swap, planted_experts, planted_states)
    print(json.dumps({one.__name__: one for one in known}[program](*where)))
