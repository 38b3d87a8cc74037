"""Floors of decode, prefill, training and weight sync, beside what the vendors' compilers made of them, as JSON lines.

    python scripts/compile_tier/roofline.py PART TARGET

A floor is what any program must move or compute, from shapes alone. The other side is counted in the optimised text of
the program that a run executes (scripts/traffic.py), with formulas for kernels (scripts/kernel_costs.py). Everything is
of one device and Qwen2.5-7B. Run it with the Python of the compile tier.

- decode: one step of a dispatch. 256 rollouts (64 on one v6e, which holds no more), each CONTEXT tokens long, one row each.
  A dispatch has STEPS steps, as in every config for such a slice. What it does once counts for one part in STEPS.
- prefill: the passes that compute a prompt of PROMPT tokens. Its bound is the KV that rows read one by one, over 8.
- train: one micro-batch, one packed row of 4,096 tokens a shard.
- publish: the learner's float32 weights, divided by fsdp, become the engine's in bfloat16, all groups of leaves.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
TARGETS = ("sm_90", "tpu7x", "v5e", "v6e")
SLOTS = {"v6e": 64}  # of a replica, where it is not MANY
MANY, CONTEXT, LENGTH, PAGE, STEPS, PASS, PROMPT = 256, 2048, 4096, 64, 32, 2048, 4096
TRAINED = {"sm_90": ("8xh100", 8), "tpu7x": ("tpu7x-8", 8), "v5e": ("v5e-16", 16), "v6e": ("v6e-16", 16)}
TENSOR = {"sm_90": 1, "tpu7x": 2, "v5e": 4, "v6e": 1}  # devices of a replica that gets new weights


def decode(target: str) -> dict:
    """Returns bytes of a step. Slots hold CONTEXT tokens on average, spread evenly over one load of positions."""
    import kernel_costs
    import traffic

    from jaxrl_post.models import cache_kinds

    programs, model, mesh, weights = _engine(target)
    ways, slots = mesh.shape["tensor"], SLOTS.get(target, MANY)
    ends = [CONTEXT - 128 + 256 // slots * (slot + 1) for slot in range(slots)]
    found = traffic.count(
        programs.compiled[f"dispatch_{slots}"].as_text(), kernel_costs.paged(lambda rows: ends, slots)
    )
    _check(found, 1)
    step = sum(one.bytes / (1 if one.loops else STEPS) for one in found.costs)
    entry = 2 * cache_kinds.held(model.kept, ways)
    cache = (sum(ends) + slots) * entry
    read = _shard(weights) - _shard({"embed": weights["embed"]})
    floor = read + cache + slots * model.embed * 2
    linked = sum(one.bytes * one.turns for one in found.collectives if one.loops)
    return {
        "weights_gb": read / 1e9,
        "kv_gb": cache / 1e9,
        "floor_gb": floor / 1e9,
        "compiled_gb": step / 1e9,
        "collectives_mb": linked / 1e6,
        "compiled_over_floor": step / floor,
    }


def prefill(target: str) -> dict:
    """Returns KV bytes of all passes of a prompt, and FLOPs of the last pass over those that it needs."""
    import kernel_costs
    import traffic

    from jaxrl_post.models import cache_kinds

    programs, model, mesh, _ = _engine(target)
    ways, text = mesh.shape["tensor"], programs.compiled[f"prefill_{PASS}"].as_text()
    cache, flops, moved = 0.0, 0.0, 0.0
    for first in range(0, PROMPT, PASS):
        groups: list[int] = []

        def ends(rows: int, first: int = first, groups: list = groups) -> list[int]:
            groups[:] = [first + rows * (at + 1) for at in range(PASS // rows)]
            return groups

        found = traffic.count(text, kernel_costs.paged(ends, PASS))
        _check(found, 0)
        assert groups, "the reference was compiled, not the kernel"
        boxes, none = (kernel_costs.paged(read, PASS, pages_alone=True) for read in (ends, lambda rows: []))
        cache += traffic.count(text, boxes).bytes() - traffic.count(text, none).bytes()
        flops, moved = found.flops(), found.bytes()
    entry = 2 * cache_kinds.held(model.kept, ways)
    one_by_one = sum(-(-(at + 1) // PAGE) * PAGE for at in range(PROMPT)) * entry
    products = (_layer_weights(model) * model.layers) / ways
    needed = 2.0 * products * PASS + 4.0 * model.layers * model.heads // ways * model.head_dim * sum(
        range(PROMPT - PASS + 1, PROMPT + 1)
    )
    return {
        "kv_gb": cache / 1e9,
        "kv_one_by_one_gb": one_by_one / 1e9,
        "kv_over_one_by_one": cache / one_by_one,
        "last_pass_gb": moved / 1e9,
        "last_pass_flops_over_needed": flops / needed,
    }


def train(target: str) -> dict:
    """Returns FLOPs of a micro-batch over those that training needs, its bytes, and those of its collectives."""
    import kernel_costs
    import test_train
    import traffic

    where, fsdp = TRAINED[target]
    made, _, model, _ = test_train.compiled(test_train.Step("qwen2_5_7b", where, (1, fsdp, 1), 4096))
    found = traffic.count(made.as_text(), kernel_costs.PACKED_ROWS)
    _check(found, 0)
    # Weights arrive for both passes and gradients leave, in bfloat16.
    floor = 3 * 2 * _layer_weights(model) * model.layers
    return {
        "tflop": found.flops() / 1e12,
        "flops_over_useful": found.flops() / test_train.useful(model, 4096),
        "traffic_gb": found.bytes() / 1e9,
        "collectives_gb": found.linked / 1e9,
        "collectives_over_floor": found.linked / floor,
    }


def publish(target: str) -> dict:
    """Returns bytes on links and in memory, over those that a device must receive, read and write."""
    import kernel_costs
    import traffic

    leaves, new = layouts_7b(target)
    linked, moved, calls = 0.0, 0.0, []
    for compiled, times in sync_programs(leaves, new):
        found = traffic.count(compiled.as_text(), kernel_costs.PACKED_ROWS)
        _check(found, 0)
        calls.append(times)
        linked, moved = linked + times * found.linked, moved + times * found.bytes()
    mine = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in leaves)
    made = sum(2 * math.prod(home.shard_shape(x.shape)) for x, home in zip(leaves, new, strict=True))
    return {
        "programs": len(calls),
        "calls": sum(calls),
        "collectives_gb": linked / 1e9,
        "weights_gb": made / 1e9,
        "floor_gb": (4 * mine + made) / 1e9,
        "compiled_gb": moved / 1e9,
        "collectives_over_weights": linked / made,
        "compiled_over_floor": moved / (4 * mine + made),
    }


def sync_programs(leaves: list, new: list, dtype: str = "bfloat16") -> Iterator[tuple]:
    """Yields the compiled programs of a weight sync, each with the number of its calls. Arguments are those of `layouts`."""
    import jax
    import jax.numpy as jnp

    from jaxrl_post.parallel import relayout

    kinds = Counter(
        tuple((leaves[at].shape, leaves[at].sharding, new[at]) for at in group)
        for group in relayout.groups(leaves, new)
    )
    for kind, times in kinds.items():
        given = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=home) for shape, home, _ in kind]
        yield relayout.identity(tuple(home for *_, home in kind), jnp.dtype(dtype)).lower(*given).compile(), times


def layouts_7b(target: str) -> tuple[list, list]:
    """Returns the layouts of Qwen2.5-7B on a target."""
    import jax

    from jaxrl_post.launch.plan import chips, device_less
    from jaxrl_post.models.presets import PRESETS

    model, (where, fsdp), ways = PRESETS["qwen2_5_7b"], TRAINED[target], TENSOR[target]
    ours = device_less.mesh(chips.read(where), (1, fsdp, 1, 1))
    apart = ours.devices.reshape(fsdp // ways, 1, 1, ways)
    return layouts(model, ours, jax.sharding.Mesh(apart, ours.axis_names, axis_types=ours.axis_types))


def layouts(model, ours, theirs) -> tuple[list, list]:
    """Returns the learner's weights by shape, and their shardings in the engine, of the mesh of each."""
    import jax
    import jax.numpy as jnp

    from jaxrl_post.models import decoder
    from jaxrl_post.parallel import mesh as meshes

    axes, shapes = decoder.axes(model), decoder.abstract(model)
    old, new = (
        jax.tree.leaves(meshes.param_shardings(mesh, axes, room))
        for mesh, room in ((ours, "learner"), (theirs, "engine"))
    )
    leaves = [
        jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=home)
        for x, home in zip(jax.tree.leaves(shapes), old, strict=True)
    ]
    return leaves, new


def _engine(target: str) -> tuple:
    """Returns the compiled programs of an engine, the model, the mesh and the weights' shapes."""
    import test_programs
    from targets import TARGETS as known

    from jaxrl_post.models.presets import PRESETS

    chip, model, slots = known[target], PRESETS["qwen2_5_7b"], SLOTS.get(target, MANY)
    mesh, pages = chip.mesh(chip.rows), slots * LENGTH // PAGE // 2
    sizes = dict(slots=slots, head_rows=slots, max_length=LENGTH, page_size=PAGE, pages=pages, steps_per_dispatch=STEPS)
    programs, weights = test_programs.programs_of(model, mesh, (slots,), PASS, **sizes)
    return programs, model, mesh, weights


def _layer_weights(model) -> int:
    m = model
    return m.embed * 2 * (m.heads + m.kv_heads) * m.head_dim + 3 * m.embed * m.ffw


def _shard(tree) -> int:
    from targets import shard_bytes

    return shard_bytes(tree)


def _check(found, loops: int) -> None:
    """Every kernel has a formula, and only the dispatch's own loop ends by data."""
    boxes = [one for one in found.unknown if " " in one]
    assert not boxes, f"kernels without a formula: {boxes}"
    assert len(found.unknown) <= loops, f"loops without a count: {found.unknown}"


if __name__ == "__main__":
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a cache would answer for the compiler
    os.environ |= {"JAX_PLATFORMS": "cpu"}
    from jaxrl_post.launch.plan import device_less

    device_less.take_none()
    part, target = sys.argv[1:]
    figures = {"decode": decode, "prefill": prefill, "train": train, "publish": publish}[part](target)
    print(json.dumps({"part": part, "target": target, **figures}))
