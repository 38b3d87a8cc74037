"""Kernels and bytes of a swap of Qwen2.5-7B, or of the commit before it, as a vendor's compiler made them, as one JSON line.

    python scripts/compile_tier/swaps.py swap|commit SLICE

swap: the learner and an engine in bfloat16 share a mesh over the slice. `cast` is the program that a swap runs. `check` is the one that
it runs besides where nobody says whether the weights are finite. A kernel is an instruction of a program that the device runs. Weights
are `read` where a kernel takes a float32 argument of a program.

commit: the learner's program as it is, without what it says of its weights, and `apart`: with a pass over the weights of its own for
that, which is planted.

Run it with the Python of the compile tier.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
MODEL, TOKENS = "qwen2_5_7b", 4096


def swap(where: str) -> dict[str, float]:
    """Returns the figures of new weights in case `cast`."""
    import jax
    import jax.numpy as jnp
    import traffic
    from targets import shard_bytes

    from jaxrl_post.engine import merged_weights
    from jaxrl_post.parallel import weight_sync

    learner, model = _learner(where)
    params, weights = learner.params, shard_bytes(learner.params)
    layout = merged_weights.layout(model, params, jax.tree.leaves(params)[0].sharding.mesh, jnp.bfloat16)
    assert layout.case(params) == "cast", layout.case(params)
    held = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, layout.dtype, sharding=x.sharding), params)
    cast = layout._into.lower(held, params).compile().as_text()
    check = weight_sync._finite.lower(params).compile().as_text()
    return {
        "leaves": len(jax.tree.leaves(params)),
        "weights_gb": weights / 1e9,
        "cast.kernels": kernels(cast),
        "cast.read_over_weights": read(cast) / weights,
        "cast.moved_over_floor": traffic.count(cast).bytes() / (1.5 * weights),
        "check.kernels": kernels(check),
        "check.read_over_weights": read(check) / weights,
    }


def commit(where: str) -> dict[str, float]:
    """Returns the figures of the optimizer's step."""
    import jax
    import jax.numpy as jnp
    import traffic

    from jaxrl_post.parallel import weight_sync

    learner, _ = _learner(where)
    sound = weight_sync.all_finite
    ways = {
        "": sound,
        "_without": lambda tree: jnp.bool_(True),
        "_apart": lambda tree: sound(jax.lax.optimization_barrier(tree)),
    }
    counts, moved = {}, {}
    for name, says in ways.items():
        weight_sync.all_finite = says  # what the next program says of its weights
        program, shapes = learner.jitted()["commit"]
        text = program.lower(*shapes).compile().as_text()
        counts[f"kernels{name}"], moved[name] = kernels(text), traffic.count(text).bytes()
    return counts | {
        "moved_gb": moved[""] / 1e9,
        "moved_over_without": moved[""] / moved["_without"],
        "planted_apart_over_without": moved["_apart"] / moved["_without"],
    }


def _learner(where: str) -> tuple:
    """Returns a learner with fsdp over the whole slice, and the model."""
    import test_train

    from jaxrl_post.launch.plan import chips

    return test_train.learner_of(test_train.Step(MODEL, where, (1, chips.read(where).devices, 1), TOKENS))


def kernels(text: str) -> int:
    """Returns the number of instructions that the device runs."""
    import compiled_text
    import traffic

    return sum(run.turns for run in traffic.launched(compiled_text.read(text)))


def read(text: str) -> int:
    """Returns the bytes of float32 arguments of a program that its kernels take. One that is taken twice counts twice."""
    import compiled_text
    import traffic

    return sum(
        array.bytes * run.turns
        for run in traffic.launched(compiled_text.read(text))
        for line in run.inside.given(run.line)
        if line.operation == "parameter"
        for array in line.arrays
        if array.dtype == "f32"
    )


if __name__ == "__main__":
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a cache would answer for the compiler
    os.environ |= {"JAX_PLATFORMS": "cpu"}
    from jaxrl_post.launch.plan import device_less

    device_less.take_none()
    print(json.dumps({"swap": swap, "commit": commit}[sys.argv[1]](sys.argv[2])))
