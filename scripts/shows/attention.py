"""Packed attention on Hopper's tensor cores: it compiles without spills, walks a segment's own blocks, and gives jnp's numbers.

1. compiled: the kernels of kernels/flash_hopper.py for an H100, by ptxas. The walk over queries keeps two sums, and may spill a few
   registers of a loop's constants.
2. walks: blocks that the kernels multiply and load, over those that hold a pair that sees each other, on mixes of segments.
3. values: the kernels in the interpreter, against dense attention. Sizes of blocks are those of a run in bfloat16, and smaller in
   float32. Planted leaks over segments, windows and edges are found.
4. step: a micro-batch of Qwen2.5-1.5B with four rows of 4,096 tokens. FLOPs stand over useful ones, and bytes over those of the
   Triton kernel with chunks of 1,024 tokens. The head has its logits at once, which an H100's memory holds.
"""

from __future__ import annotations

import functools

import compilers
import jax
import jax.numpy as jnp
import numpy as np
import test_kernels_flash as cases
from dense_attend import dense
from gpu import packed_rows

from jaxrl_post.kernels import flash, flash_hopper, warpgroups
from jaxrl_post.kernels.pallas_gpu import plgpu

MINUTES = 12.0
PLATFORM = "cpu"
SOURCES = ("scripts/compile_tier", "scripts/gpu")
HEADS, SPILLED, BLOCKS, FLOPS, MOVED, MEMORY_GIB = (64, 128), 160, 1.1, 1.08, 0.85, 80
TOKENS = 4096
MIXES = {  # lengths of segments; the rest is padding
    "one": (4096,),
    "four": (1024,) * 4,
    "four_uneven": (701, 1203, 900, 1292),
    "long_and_short": (2900, 40, 333, 7, 512),
    "thirty_two": (128,) * 32,
    "many_short": (37, 90, 61, 150, 12) * 11,
}
WINDOWS = (None, 512)
FILE = "scripts/compile_tier/packed_attention.py"
TESTS = "tests/test_kernels_flash.py"


def show(record) -> None:
    python = compilers.python(record.root, "attention")
    for head in HEADS:
        for name, value in compilers.told(record, python, FILE, "kernels", str(head)).items():
            most = SPILLED if "backward_keys" in name else 0
            bound = {"spill_bytes": {"at_most": most}, "serialized": {"equals": 0}}
            record.figure(f"compiled.{head}.{name}", value, **bound.get(name.rsplit(".", 1)[1], {}))
    _walks(record)
    _values(record)
    today = compilers.told(record, python, FILE, "step", "triton")
    chosen = compilers.told(record, python, FILE, "step", "hopper", f"batch.head_chunk={4 * TOKENS}")
    for which, found in (("today", today), ("chosen", chosen)):
        for name, value in found.items():
            record.figure(f"step.{which}.{name}", round(value, 4))
    record.figure("step.flops_over_useful", round(chosen["flops_over_useful"], 4), at_most=FLOPS)
    record.figure("step.moved_over_today", round(chosen["moved_gb"] / today["moved_gb"], 4), at_most=MOVED)
    record.figure("step.gib", round(chosen["total_gib"], 2), at_most=MEMORY_GIB)
    record.figure("step.kernels", chosen["kernels_of_ours"], at_least=3)
    record.figure("tests_passed", record.passed(TESTS, "hopper"), at_least=10)


def _walks(record) -> None:
    """Counts blocks by the bounds that the kernels compute, and by a mask of all pairs. Planted: a walk from the row's beginning."""
    for name, lengths in MIXES.items():
        counts: dict[str, list[float]] = {}
        for window in WINDOWS:
            for walk, given in walks_of(lengths, window).items():
                counts.setdefault(walk, []).extend(visited(*given).values())
        for walk, ratios in counts.items():
            record.figure(f"walks.{name}.{walk}_over_own", round(max(ratios), 4), at_most=BLOCKS)
    tile, walk, ends, seen = walks_of(MIXES["four"], None)["forward"]
    planted = visited(tile, walk, np.zeros_like(ends), seen)
    record.figure("walks.planted_over_own", round(planted["multiplied"], 4), at_least=2)


def walks_of(lengths: tuple[int, ...], window: int | None) -> dict[str, tuple]:
    """Returns by kernel its tile, its bounds, the ends that these read, and the pairs that see each other, own rows first."""
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    ids = np.pad(ids, (0, TOKENS - len(ids)))[None]
    first, last = (np.asarray(x) for x in flash.stretches(jnp.asarray(ids), window))
    at, tiles = np.arange(TOKENS), flash_hopper.TILES[128]
    seen = (ids[0][None] == ids[0][:, None]) & (at[None] <= at[:, None])
    if window is not None:
        seen &= at[:, None] - at[None] < window
    return {
        "forward": (tiles.forward, warpgroups.over_keys, first, seen),
        "by_queries": (tiles.by_queries, warpgroups.over_keys, first, seen),
        "by_keys": (tiles.by_keys, warpgroups.over_queries, last, seen.T),
    }


def visited(tile: warpgroups.Tile, walk, ends: np.ndarray, seen: np.ndarray) -> dict[str, float]:
    """Returns the blocks that groups multiply, and those that the ring loads for both, over those that hold a seen pair."""
    both = warpgroups.GROUPS * tile.own
    own, shared = (
        seen.reshape(len(seen) // rows, rows, -1, tile.walked).any(axis=(1, 3)).sum() for rows in (tile.own, both)
    )
    multiplied = loaded = 0
    for base in range(0, len(seen), both):
        walks = [walk(tile, ends, 0, base, base + group * tile.own) for group in range(warpgroups.GROUPS)]
        multiplied += sum(int(one.last) - int(one.first) for one in walks)
        loaded += int(walks[0].end) - int(walks[0].begin)
    return {"multiplied": multiplied / own, "loaded": loaded / shared}


def _values(record) -> None:
    """Compares output and gradients. Errors stand over the bounds of the tests."""
    for name, how in {"plain": cases.CASES[0], "window": cases.NEAR, "both": cases.BOTH}.items():
        found, right = (cases.results(form, 64, **how) for form in (cases.HOPPER, cases.reference))
        record.figure(f"values.float32.{name}_over_bound", cases.far(found, right) / cases.SINGLE, at_most=1)
    found, right = (cases.sink_results(form, 64, **cases.BOTH) for form in (cases.HOPPER, cases.reference))
    record.figure("values.float32.sinks_over_bound", cases.far(found, right) / cases.SINGLE, at_most=1)
    for head in HEADS:
        given, ids = packed_rows.inputs(1, 256, 2, 1, head), packed_rows.segments(1, 256)
        how = dict(scale=head**-0.5, window=100, soft_cap=5.0)
        form = functools.partial(flash_hopper.attention, interpret=plgpu.InterpretGPUParams(detect_races=True))
        found = packed_rows.both(functools.partial(form, **how))(*given, ids)
        right = packed_rows.both(functools.partial(_dense, **how))(*(x.astype(jnp.float32) for x in given), ids)
        far = max(packed_rows.distance(a, b) for a, b in zip(found, right, strict=True))
        record.figure(f"values.bfloat16.{head}_over_bound", far / packed_rows.FAR, at_most=1)
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    record.figure("values.races", bool(gpu_callbacks.get_races().races_found), equals=False)


def _dense(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, **how) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(q.shape[1]), ids.shape)
    return dense(positions, ids)(0, q, k, v, None, **how)[0]
