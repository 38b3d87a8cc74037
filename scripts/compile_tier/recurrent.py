"""Compiles the recurrent rows of a layer of Qwen3.5-9B, and counts what a step moves with replayed rows and without, as JSON.

    python scripts/compile_tier/recurrent.py TARGET [planted]

Each slot has one settled row and STATE_ROWS drafted ones, the most that it may have. With replays, all rows that it drafted
before were accepted, too. Bytes are those of the compiled text (scripts/traffic.py). Those of the kernel come from its walk:
states and pending rows of each slot where it reads them, new rows once. Weights of the layer are left out, which move in both.
`planted` compiles the loop in jnp, in which many lines move states. Run it with the Python of the compile tier.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
# So few states fit into a TPU's chip. XLA would move all of them there and back, if the kernel did not keep them in HBM.
SLOTS = 16
FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional")


def compiled(mesh: Any, slots: int, rows: int, drafted: int, options: dict, kernels: bool = True) -> tuple[Any, Any]:
    """Returns recurrent_rows.read of one layer for one device of a mesh, and the shapes of its cache.

    `drafted`: rows that a slot may have pending."""
    import jax
    import jax.numpy as jnp

    from jaxrl_post.engine import recurrent_rows
    from jaxrl_post.models import cache_kinds
    from jaxrl_post.models.gated_delta import Inputs
    from jaxrl_post.models.presets import PRESETS
    from jaxrl_post.parallel import mesh as meshes

    kind = cache_kinds.states(PRESETS["qwen3_5_9b"].kept)[0]

    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype)

    def inputs(count, dtype):
        shared, values = (kind.key_heads, kind.key_dim), (kind.value_heads, kind.value_dim)
        return Inputs(*(shape(count, *each, dtype=dtype) for each in (shared, shared, values)))

    cache = jax.eval_shape(lambda: recurrent_rows.empty(slots, drafted, kind, jnp.bfloat16))
    by_slot = recurrent_rows.SlotRows(*(shape(slots, dtype=jnp.int32),) * 4)
    rates = (shape(rows, kind.value_heads),) * 2
    given = cache, by_slot, shape(rows, dtype=jnp.int32), inputs(rows, jnp.bfloat16), *rates
    given = *given, inputs(kind.width, jnp.float32)
    home = meshes.replicated(mesh)
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home), given)
    read = functools.partial(recurrent_rows.read, **({} if kernels else {"platforms": frozenset()}))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(read, donate_argnums=0).lower(*given).compile(options), cache


def lines_that_move(text: str, dims: tuple[int, ...]) -> list:
    """Returns the lines that make an array of these sizes, and do more than hand it on."""
    import compiled_text

    return [
        run.line
        for run in compiled_text.read(text).runs()
        if run.line.operation not in FREE and any(array.dims == dims for array in run.line.arrays)
    ]


def walked(platform: str, cache: Any, rows: int, again: int) -> dict[str, float]:
    """Returns what the kernel moves, where each slot repeats `again` rows: fetches of each state, and bytes."""
    import jax
    import numpy as np

    from jaxrl_post.kernels import recurrent, recurrent_gpu, recurrent_tpu

    count = np.full(SLOTS, rows // SLOTS, np.int32)
    first = (np.cumsum(count) - count).astype(np.int32)
    plan = recurrent.Plan(first, np.full_like(count, again), count, np.ones_like(count), np.zeros_like(count))
    (_, H, K, V), h, C = cache.state.shape, cache.pending.k.shape[2], cache.pending.k.shape[1]
    kept = sum(x.size // (SLOTS * C) * 4 for x in cache.pending)  # bytes of one pending row
    if platform == "tpu":
        walk, number = recurrent_tpu.visits(jax.tree.map(jax.numpy.asarray, plan))
        blocks = [
            (block, np.asarray(at(block, np.arange(int(number)), *map(np.asarray, walk))[0]))
            for block in range(H // recurrent_tpu.block_of(h, H))
            for at in (recurrent_tpu.state_at, recurrent_tpu.pending_at)
        ]
        fetched = [1 + np.count_nonzero(np.diff(slots)) for _, slots in blocks]
        states, pending = np.sum(fetched[::2]) / len(fetched[::2]), np.sum(fetched[1::2]) / len(fetched[1::2])
        pending = pending * C if again else 0
    else:
        parts = {
            (slot, head, columns.start)
            for slot in np.flatnonzero(count)
            for head in range(H)
            for block in range(V // recurrent_gpu.WIDE)
            for *_, columns in [recurrent_gpu.state_at(slot, head, block)]
        }
        states, pending = len(parts) * recurrent_gpu.WIDE / (H * V), SLOTS * again
    new = rows * (2 * h * K + 2 * H * V + 2 * H) * 4
    return {"states": states / SLOTS, "bytes": 2 * states * H * K * V * 4 + pending * kept + new}


def figures(target: str, kernels: bool) -> dict[str, float]:
    import traffic
    from targets import TARGETS

    from jaxrl_post.engine.host.wire import STATE_ROWS

    chip, rows = TARGETS[target], SLOTS * (1 + STATE_ROWS)
    made, cache = compiled(chip.mesh(chip.one), SLOTS, rows, STATE_ROWS, {}, kernels)
    text = made.as_text()
    moving = lines_that_move(text, cache.state.shape)
    found = {"lines_that_move_states": len(moving)}
    if not kernels:
        return found
    steps = []
    for again in (STATE_ROWS, 0):
        walk = walked(chip.platform, cache, rows, again)
        boxes = {re.escape("recurrent_rows"): lambda given, made, size=walk["bytes"]: (0.0, size)}
        told = traffic.count(text, boxes)
        assert not told.unknown, f"not counted: {told.unknown}"
        steps.append((walk, told.bytes()))
    return found | {
        "in_place": float(all(0 in line.aliased for line in moving)),
        "reads_of_a_state": steps[0][0]["states"],
        "plain_mib": steps[1][1] / 2**20,
        "replayed_over_plain": steps[0][1] / steps[1][1],
    }


if __name__ == "__main__":
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a cache would answer for the compiler
    os.environ |= {"JAX_PLATFORMS": "cpu"}
    from jaxrl_post.launch.plan import device_less

    device_less.take_none()
    print(json.dumps(figures(sys.argv[1], sys.argv[2:] != ["planted"])))
