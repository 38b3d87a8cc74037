"""Every kernel really compiles for every target; on sm_90 without spilling a register."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import packed_attention
import pytest
import recurrent
from targets import TARGETS, memory

from jaxrl_post.engine.host.wire import STATE_ROWS
from jaxrl_post.kernels import (
    attention,
    attention_gpu,
    choice,
    flash_gpu,
    grouped,
    hardware,
    recurrent_tpu,
    rows_gpu,
    sampling_gpu,
    thresholds,
    thresholds_gpu,
    tiles,
    verify,
)
from jaxrl_post.kernels.branches import of_rows
from jaxrl_post.launch.plan import chips, device_less
from jaxrl_post.models import gated_delta
from jaxrl_post.parallel import mesh as meshes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu.packed_rows import CANDIDATES, both

MIB = 1 << 20
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
SPILLING = "xla_gpu_fail_ptx_compilation_on_register_spilling"
REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class Kernel:
    """`run` takes arguments of the shapes and dtypes `shapes`. `bound` is the bytes that may exist beside them."""

    run: Callable
    shapes: tuple[Any, ...]
    bound: int


def verify_attention(
    R: int,
    S: int,
    N: int,
    K: int,
    H: int,
    *,
    blocks: int = 64,
    page: int = 64,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Kernel:
    """Returns the kernel. Its bound is the sum of two terms:

    - twice, for the pass that combines stretches: q in the kernel's order in bf16, and the same rows as float32 for
      each of at most 8 stretches. q has its heads padded to 8 a group and its rows by one tile. The float32 rows hold
      mixed values, and 32 columns of peak and mass.
    - once for every row: the page table.

    The kernel of TPUs needs less: no stretches, and q and the mixed values in float32.
    """

    def shape(*dims, dtype):
        return jax.ShapeDtypeStruct(dims, dtype)

    pages = jax.eval_shape(lambda: attention.empty(S * blocks // 2, page, K, H, jnp.bfloat16))
    rows = attention.Rows(
        shape(R, dtype=jnp.int32), shape(R, dtype=jnp.int32), shape(R, dtype=bool), shape(S, blocks, dtype=jnp.int32)
    )
    padded = K * (R * (-(-(N // K) // 8) * 8) + 64)
    bound = padded * (2 * H + 2 * 4 * (H + 32) * min(8, -(-blocks * page // 1024))) + 4 * R * blocks
    return Kernel(
        functools.partial(attention.attention, scale=H**-0.5, window=window, soft_cap=soft_cap),
        (shape(R, N, H, dtype=jnp.bfloat16), pages, rows),
        bound,
    )


def verify_sample(R: int, V: int = 152064, *, cut: bool = False) -> Kernel:
    """Returns the kernel. Its bound counts for each row a few numbers for every tile of 1024 ids, and two whole tiles.

    Those are the drawn token's and the argmax token's tile, with ids, logits and noise. There is no copy of a row's
    logits. Finding thresholds adds the row's keys and weights.
    """

    def shape(*dims, dtype):
        return jax.ShapeDtypeStruct(dims, dtype)

    def run(logits, seeds, positions, heat, top_k, top_p):
        forms = choice.of_thresholds(R, V, None, hardware.PLATFORMS)
        lowest = thresholds.find(logits, heat, top_k, top_p, forms) if cut else None
        return verify.verify_sample(logits, seeds, positions, heat, lowest)

    numbers = [shape(R, dtype=dtype) for dtype in (jnp.int32, jnp.float32, jnp.int32, jnp.float32)]
    bound = 4 * R * (6 * 1024 + 16 * -(-V // 1024)) + (8 * R * V if cut else 0)
    return Kernel(run, (shape(R, V, dtype=jnp.float32), shape(R, 2, dtype=jnp.uint32), *numbers), bound)


KERNELS = {
    "verify_sample, 32 rows": verify_sample(32),
    "verify_sample, 1280 rows": verify_sample(1280),
    "verify_sample, top-k and top-p, 256 rows": verify_sample(256, cut=True),
    "verify_attention, 7B, 64 rows": verify_attention(64, 64, 28, 4, 128),
    "verify_attention, 7B, 1280 rows": verify_attention(1280, 256, 28, 4, 128),
    "verify_attention, 7B, a quarter of the heads": verify_attention(256, 64, 7, 1, 128),
    "verify_attention, window and soft cap": verify_attention(256, 64, 16, 8, 128, window=1000, soft_cap=50.0),
    "verify_attention, heads of 64": verify_attention(256, 64, 14, 2, 64),
    "verify_attention, Qwen3.5-9B": verify_attention(256, 64, 16, 4, 256),
    "verify_attention, Gemma 4 31B, layers with a window": verify_attention(256, 64, 32, 16, 256, window=1024),
    "verify_attention, Gemma 4 31B, full layers": verify_attention(256, 64, 32, 4, 512),
    "verify_attention, Gemma 4 E4B, full layers": verify_attention(256, 64, 8, 2, 512),
}
ON_HOPPER = {
    "verify_attention, heads of 256": verify_attention(256, 64, 16, 8, 256, window=1000, soft_cap=50.0),
    "verify_attention, heads of 256, pages of 16": verify_attention(64, 64, 8, 1, 256, blocks=256, page=16),
    "verify_attention, heads of 512": verify_attention(256, 64, 16, 8, 512, window=1000, soft_cap=50.0),
    "verify_attention, heads of 512, pages of 16": verify_attention(64, 64, 8, 1, 512, blocks=256, page=16),
    "verify_attention, heads of 512, pages of 128": verify_attention(64, 64, 16, 2, 512, blocks=32, page=128),
    "verify_attention, 7B, pages of 16": verify_attention(64, 64, 28, 4, 128, blocks=256, page=16),
    "verify_attention, 7B, pages of 128": verify_attention(64, 64, 28, 4, 128, blocks=32, page=128),
}


@pytest.mark.parametrize(
    "name, target", [*itertools.product(KERNELS, TARGETS), *((name, "sm_90") for name in ON_HOPPER)]
)
def test_kernel(name, target, table, monkeypatch, tmp_path):
    kernel, chip = (KERNELS | ON_HOPPER)[name], TARGETS[target]
    for key, value in {"TO": str(tmp_path), "PTXAS": "1"}.items():
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{key}", value)
    mesh = chip.mesh(chip.one)
    home = meshes.replicated(mesh)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home), kernel.shapes)
    start = time.monotonic()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # says which chip it is
        compiled = jax.jit(kernel.run).lower(*shapes).compile()
    seconds = time.monotonic() - start
    used = memory(compiled)
    chips = {"registers": "", "spill_bytes": ""} if chip.platform != "cuda" else resources(tmp_path)
    table(
        name,
        target,
        seconds=round(seconds, 2),
        temp_mib=used["temp"] / MIB,
        temp_bound_mib=kernel.bound / MIB,
        total_mib=used["total"] / MIB,
        hbm_mib=chip.hbm / MIB,
        **chips,
    )
    assert chip.call in compiled.as_text(), "the reference was compiled, not the kernel"
    assert used["temp"] <= kernel.bound and used["total"] <= chip.hbm
    assert not chips["spill_bytes"]


@pytest.mark.parametrize("head", [64, 128])
def test_packed_attention_on_hopper(head):
    """Nothing is spilled but a few registers of the walk over queries, which keeps two sums of 64 x 128 numbers."""
    for name, value in packed_attention.kernels(head).items():
        most = {"registers": 168, "spill_bytes": 160 if "backward_keys" in name else 0, "serialized": 0}
        assert value <= most[name.rsplit(".", 1)[1]], (name, value)


@pytest.mark.parametrize("experts, embed, ffw", [(32, 2048, 768), (128, 2048, 192), (8, 2880, 2880)])
@pytest.mark.parametrize("target", TARGETS)
def test_grouped_products(target, experts, embed, ffw, table):
    """Forward and backward, of layers of Qwen3-30B-A3B and gpt-oss-20b on one device. Rows may be copied, matrices never."""
    chip, rows = TARGETS[target], 4096
    mesh = chip.mesh(chip.one)
    given, matrices, made = (
        jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=meshes.replicated(mesh))
        for dims in ((rows, embed), (experts, embed, ffw), (rows, ffw))
    )
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32, sharding=meshes.replicated(mesh))

    def products(x, matrices, sizes, slope):
        out, back = jax.vjp(lambda *given: grouped.product(*given, sizes), x, matrices)
        return out, *back(slope)

    start, options = time.monotonic(), {SPILLING: True} if chip.platform == "cuda" else {}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(products).lower(given, matrices, sizes, made).compile(options)
    text, used, bound = compiled.as_text(), memory(compiled), 2 * 2 * rows * 2 * (embed + ffw)
    table(
        f"grouped products, {experts} x {embed} x {ffw}",
        target,
        seconds=round(time.monotonic() - start, 2),
        temp_mib=used["temp"] / MIB,
        temp_bound_mib=bound / MIB,
    )
    assert all(name in text for name in ("grouped_product_1", "grouped_product_2", "grouped_sum"))
    assert used["temp"] <= bound


@pytest.mark.parametrize(
    "target, kernels, rows",
    [
        *((name, True, 256) for name in TARGETS),
        ("v6e", True, recurrent_tpu.MOST_ROWS),
        ("v6e", False, 256),
        ("sm_90", False, 256),
    ],
)
def test_recurrent_rows(target, kernels, rows, table):
    """A layer of Qwen3.5-9B and 64 slots: one line moves states, and in the memory where they lie.

    Without kernels, the loop in jnp is planted. There other lines move states in every turn."""
    chip, slots = TARGETS[target], 64
    start, options = time.monotonic(), {SPILLING: True} if chip.platform == "cuda" else {}
    compiled, cache = recurrent.compiled(chip.mesh(chip.one), slots, rows, STATE_ROWS, options, kernels)
    text, used = compiled.as_text(), memory(compiled)
    moving = recurrent.lines_that_move(text, cache.state.shape)
    if not kernels:
        assert len(moving) > 1 and "pallas_call" not in text
        return
    # All that a slot keeps beside its states, and float32 rows as they are convolved, normed and read. A copy of states is more.
    beside = used["alias"] - cache.state.size * cache.state.dtype.itemsize
    bound = beside + 3 * 4 * rows * sum(x.size // x.shape[0] // x.shape[1] for x in cache.inputs)
    table(
        f"recurrent rows, Qwen3.5-9B, {rows} rows",
        target,
        seconds=round(time.monotonic() - start, 2),
        temp_mib=used["temp"] / MIB,
        temp_bound_mib=bound / MIB,
        total_mib=used["total"] / MIB,
        hbm_mib=chip.hbm / MIB,
    )
    assert len(moving) == 1 and moving[0].operation == "custom-call" and 0 in moving[0].aliased
    assert used["temp"] <= bound


@pytest.mark.parametrize("target", [name for name, chip in TARGETS.items() if chip.platform == "tpu"])
def test_the_delta_rule_of_packed_rows(target, table):
    """Forward and backward of one row of a layer of Qwen3.5-9B. Beside the states before chunks, arrays may exist twice."""
    chip, tokens, (h, H, side) = TARGETS[target], 4096, (16, 32, 128)
    mesh = chip.mesh(chip.one)
    kernel = choice.of_delta_rule(mesh.devices.flat[0])
    assert kernel.serves(jnp.float32, h, H, side, side, tokens)
    sizes = ((h, side), (h, side), (H, side), (H,), (H,))
    given = [jax.ShapeDtypeStruct((1, tokens, *x), jnp.float32, sharding=meshes.replicated(mesh)) for x in sizes]
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32, sharding=meshes.replicated(mesh))

    def total(given, ids):
        return jnp.sum(kernel.packed(gated_delta.Tokens(*given), ids) ** 2)

    start = time.monotonic()
    compiled = jax.jit(jax.grad(total)).lower(given, ids).compile()
    used, states = memory(compiled), 4 * tokens // kernel.CHUNK * H * side * side
    bound = states + 2 * 4 * tokens * side * (4 * h + 6 * H)
    table(
        "delta rule of packed rows, Qwen3.5-9B",
        target,
        seconds=round(time.monotonic() - start, 2),
        temp_mib=used["temp"] / MIB,
        temp_bound_mib=bound / MIB,
    )
    assert all(name in compiled.as_text() for name in ("delta_rule", "delta_rule_backward"))
    assert used["temp"] <= bound


@pytest.mark.parametrize("drafted", [0, STATE_ROWS])
@pytest.mark.parametrize("where", ["h100", "a100", "l4", "b200"])
def test_recurrent_rows_on_gpus_with_drafts_and_without(where, drafted):
    """The compiler fails where a register is spilled."""
    mesh = device_less.mesh(chips.read(where), (1, 1, 1, 1))
    made, cache = recurrent.compiled(mesh, 64, 256, drafted, {SPILLING: True})
    assert len(recurrent.lines_that_move(made.as_text(), cache.state.shape)) == 1


@pytest.mark.parametrize("where", ["h100", "a100", "l4", "b200"])
def test_thresholds_on_gpus(where):
    """The compiler fails where a register is spilled."""
    mesh = device_less.mesh(chips.read(where), (1, 1, 1, 1))
    sizes, home = ((64, 151936), (64, 1 << thresholds_gpu.DIGIT), (64, 3)), meshes.replicated(mesh)
    given = [jax.ShapeDtypeStruct(dims, jnp.float32, sharding=home) for dims in sizes]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        run = jax.jit(functools.partial(thresholds_gpu.masses, interpret=False)).lower(*given)
        assert "weigh_ids" in run.compile({SPILLING: True}).as_text()


@pytest.mark.parametrize("rows", [16, 256])
def test_kernels_between_products(rows):
    """The compiler fails where a register is spilled. Shapes are those of Qwen2.5-7B, its head included."""
    mesh = device_less.mesh(chips.read("h100"), (1, 1, 1, 1))
    home, (D, N, K, H) = meshes.replicated(mesh), (3584, 28, 4, 128)

    def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=home)

    half = functools.partial(shape, dtype=jnp.bfloat16)
    ints = functools.partial(shape, dtype=jnp.int32)
    at = attention.Rows(ints(rows), ints(rows), shape(rows, dtype=jnp.bool_), ints(rows, 64))
    biases = rows_gpu.Projection(tuple(half(heads, H) for heads in (N, K, K)))
    norm, padded = dict(eps=1e-6, offset=0.0), attention_gpu.padded(N // K)
    stats = shape(5, K, rows * padded, 32)
    cases = {
        "add_and_norm": (functools.partial(rows_gpu.normed, **norm), (half(rows, D), shape(4, rows, D), half(D))),
        "pack_rows": (
            functools.partial(rows_gpu.packed, heads=N, padded=padded, scale=0.1, **norm),
            (shape(4, rows, (N + 2 * K) * H), biases, (shape(rows, 64),) * 2, half(512, 64, 2 * K, H), at),
        ),
        "combine_stretches": (
            functools.partial(rows_gpu.combined, heads=N, padded=padded, stretch=1024, window=None, dtype=jnp.bfloat16),
            (shape(5, K, rows * padded, H), stats, stats, at.position, at.real),
        ),
        "sample": (
            lambda *given: sampling_gpu.sampled(given[0], tiles.Statistics(*given[1:5]), *given[5:], None),
            (shape(rows, 152064), *(shape(rows, 149),) * 4, shape(rows, 2, dtype=jnp.uint32), ints(rows), shape(rows)),
        ),
    }
    for name, (run, given) in cases.items():
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            assert name in jax.jit(run).lower(*given).compile({SPILLING: True}).as_text()


@pytest.mark.parametrize("kernel, size", [(kernel, size) for kernel, sizes in CANDIDATES.items() for size in sizes])
def test_tiles_that_gpu_check_times(kernel, size):
    """The compiler fails where a register is spilled. Shapes are those of a layer of Qwen2.5-7B."""
    own = dataclasses.replace(flash_gpu.NARROW, **{kernel: flash_gpu.Tile(*size)})
    assert_nothing_is_spilled(TARGETS["sm_90"].mesh(TARGETS["sm_90"].one), 128, tiles=own)


@pytest.mark.parametrize("width", [256, 512])
@pytest.mark.parametrize("where", ["h100", "a100", "l4", "b200"])
def test_tiles_of_wide_heads(where, width):
    """Those that a run chooses on the device, also where scores have a cap and a window."""
    mesh = device_less.mesh(chips.read(where), (1, 1, 1, 1))
    sizes = dict(heads=28, kv_heads=4, head_dim=width, tokens=4096)
    form, line = choice.of_packed_rows(mesh.devices.flat[0], jnp.bfloat16, **sizes)
    assert form is not None, line
    for how in (dict(), dict(window=1024, soft_cap=50.0)):
        assert_nothing_is_spilled(mesh, width, form, **how)


BACKWARD = {
    "tpu": ("splash_mha_dq", "splash_mha_dkv"),
    "cuda": ("flash_forward", "flash_backward_queries", "flash_backward_keys"),
}
LAYERS = {  # query heads, key heads, head size, window
    "Qwen3.5-9B": (16, 4, 256, None),
    "Gemma 4 31B, layers with a window": (32, 16, 256, 1024),
    "Gemma 4 31B, full layers": (32, 4, 512, None),
}


def compiled_training(target: str, layer: tuple, tokens: int, texts: Callable, **form_of: bool) -> tuple[Any, float]:
    """Returns forward and backward of one row by the target's kernels, compiled, and its seconds. A GPU may spill no register.

    layer: as in LAYERS. texts: what the kernels get of the row, made of its segment ids.
    """
    chip, (heads, kv_heads, width, window) = TARGETS[target], layer
    mesh = chip.mesh(chip.one)
    sizes = dict(heads=heads, kv_heads=kv_heads, head_dim=width, tokens=tokens)
    form, line = choice.of_packed_rows(mesh.devices.flat[0], jnp.bfloat16, **sizes, **form_of)
    assert form is not None, line
    q, k, ids = (
        jax.ShapeDtypeStruct((1, tokens, *rest), dtype, sharding=meshes.replicated(mesh))
        for rest, dtype in (((heads, width), jnp.bfloat16), ((kv_heads, width), jnp.bfloat16), ((), jnp.int32))
    )
    run = both(functools.partial(form, scale=1.0, window=window, soft_cap=None))
    start, options = time.monotonic(), {SPILLING: True} if chip.platform == "cuda" else {}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(run).lower(q, k, k, q, texts(ids)).compile(options)
    return compiled, round(time.monotonic() - start, 2)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("target", ["v6e", "v5p", "sm_90"])
def test_training_of_wide_heads(target, layer, table):
    """Forward and backward of one row, by kernels. Beside sums, a layout for the kernel and one for its results may exist."""
    chip, tokens, (heads, kv_heads, width, _) = TARGETS[target], 4096, LAYERS[layer]
    compiled, seconds = compiled_training(target, LAYERS[layer], tokens, lambda ids: ids)
    used, names = memory(compiled), BACKWARD[chip.platform]
    bound = 2 * 2 * tokens * width * (4 * heads + 4 * kv_heads) + 2 * 4 * 128 * heads * tokens
    table(
        f"training attention, {layer}", target, seconds=seconds, temp_mib=used["temp"] / MIB, temp_bound_mib=bound / MIB
    )
    assert all(name in compiled.as_text() for name in names)
    assert used["temp"] <= bound


BRANCHES = {  # of texts that share prompts: query heads, key heads, head size, window
    "Qwen2.5-0.5B": (14, 2, 64, None),
    "Qwen2.5-7B": (28, 4, 128, None),
    "Qwen3.5-9B": (16, 4, 256, None),
    "Gemma 4 31B, layers with a window": (32, 16, 256, 1024),
    "Gemma 4 31B, full layers": (32, 4, 512, None),
}


@pytest.mark.parametrize("layer", BRANCHES)
@pytest.mark.parametrize("target", TARGETS)
def test_texts_that_share_prompts(target, layer, table):
    """Forward and backward of one row. The compiler fails on a GPU where a register is spilled."""
    chip, tokens, (heads, kv_heads, width, _) = TARGETS[target], 8192, BRANCHES[layer]
    texts = functools.partial(jax.eval_shape, lambda ids: of_rows(ids, ids))
    compiled, seconds = compiled_training(target, BRANCHES[layer], tokens, texts, branches=True)
    used, kernels = memory(compiled), {"tpu": "branches", "cuda": "flash"}[chip.platform]
    # A layout for the kernels, one for their results, and a column of numbers of each token.
    bound = (
        2 * 2 * tokens * max(width, 128) * (4 * heads + 4 * kv_heads) + 2 * 4 * 128 * tokens + 4 * 4 * heads * tokens
    )
    table(
        f"attention of shared prompts, {layer}",
        target,
        seconds=seconds,
        temp_mib=used["temp"] / MIB,
        temp_bound_mib=bound / MIB,
    )
    names = ("forward", "backward_queries", "backward_keys")
    assert all(f"{kernels}_{name}" in compiled.as_text() for name in names)
    assert used["temp"] <= bound


SPILLED = pytest.param(
    "b200", 128, marks=pytest.mark.xfail(strict=True, reason="the walk over queries spills; tiles are those of Hopper")
)


@pytest.mark.parametrize("where, width", [("a100", 64), ("a100", 128), ("l4", 64), ("l4", 128), ("b200", 64), SPILLED])
def test_tiles_of_a_run_on_other_gpus(where, width):
    """They are those that fit into the registers of a Hopper."""
    assert_nothing_is_spilled(device_less.mesh(chips.read(where), (1, 1, 1, 1)), width)


def assert_nothing_is_spilled(mesh, width, form=flash_gpu.attention, **how):
    form = functools.partial(form, **dict(scale=width**-0.5, window=None, soft_cap=None) | how)
    q, k, ids = (
        jax.ShapeDtypeStruct((1, 4096, *rest), dtype, sharding=meshes.replicated(mesh))
        for rest, dtype in (((28, width), jnp.bfloat16), ((4, width), jnp.bfloat16), ((), jnp.int32))
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        made = jax.jit(both(form)).lower(q, k, k, q, ids)
        assert "flash_backward_keys" in made.compile({SPILLING: True}).as_text()


def resources(folder: Path) -> dict[str, int]:
    """Returns the most registers a thread, and bytes spilled, of the kernels that ptxas reported."""
    told = "\n".join(file.read_text() for file in folder.glob("*.ptxas"))
    registers, spills = REGISTERS.findall(told), SPILLS.findall(told)
    assert registers and spills, f"ptxas said nothing about registers:\n{told}"
    return {"registers": max(map(int, registers)), "spill_bytes": sum(int(x) for pair in spills for x in pair)}
