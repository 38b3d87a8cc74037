"""The row program and the train step of Qwen2.5-7B really compile, fit, and copy no KV cache.

Bounds on temporary memory are sums of what must exist at once, from shapes alone. Each term says why. SLACK pays for
alignment and for buffers that a compiler cannot reuse in time.
"""

from __future__ import annotations

import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import roofline
import serial_loops
from targets import TARGETS, memory, shard_bytes

from jaxrl_post.engine.compiled import Programs
from jaxrl_post.engine.eight_bit_weights import stored
from jaxrl_post.engine.host.wire import EngineSettings
from jaxrl_post.models import cache_kinds, decoder
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.parallel import mesh as meshes

MIB = 1 << 20
SLACK = 1.25
ROWS, SLOTS, HEADS, PAGE, PAGES, LENGTH, STEPS, WIDE = 256, 64, 128, 64, 2048, 4096, 8, 2048


@pytest.fixture
def compile_seconds():
    """Returns the seconds of the compiler, one entry a program, in order."""
    seconds = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(round(duration, 2))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seconds
    jax.monitoring.unregister_event_duration_listener(listen)


def programs_of(model, mesh, row_sizes: tuple[int, ...], prompt_rows: int = 0, **other: Any) -> tuple[Programs, Any]:
    """Returns the compiled programs of an engine, and its weights. `other`: sizes that differ from those above."""
    given = dict(slots=SLOTS, max_length=LENGTH, page_size=PAGE, pages=PAGES, head_rows=HEADS, steps_per_dispatch=STEPS)
    given |= dict(replicas=meshes.replicas(mesh), row_sizes=row_sizes, prompt_rows=prompt_rows, dtype=jnp.bfloat16)
    settings = EngineSettings(**(given | other))
    model = stored(model, settings.weights)
    programs, shapes = Programs(model, mesh, settings), decoder.abstract(model, jnp.bfloat16)
    homes = meshes.param_shardings(mesh, decoder.axes(model), "engine")
    weights = jax.tree.map(lambda x, home: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home), shapes, homes)
    programs.compile(weights)
    return programs, weights


@pytest.mark.parametrize("target", TARGETS)
def test_prompt_program(target, table):
    """It fits beside the row program's pages, copies none, and uses the kernel."""
    chip, model = TARGETS[target], PRESETS["qwen2_5_7b"]
    mesh = chip.mesh(chip.rows)
    ways, begun = mesh.shape["tensor"], time.perf_counter()
    programs, _ = programs_of(model, mesh, (), WIDE)
    compiled = programs.compiled[f"prefill_{WIDE}"]
    used, text = memory(compiled), compiled.as_text()
    cache = 2 * PAGES * PAGE * cache_kinds.held(model.kept, ways)
    bound = prefill_bound(model, ways)
    table(
        f"7B prompts, {model.layers} layers, {WIDE} rows",
        target,
        seconds=time.perf_counter() - begun,
        temp_mib=used["temp"] / MIB,
        temp_bound_mib=bound / MIB,
        total_mib=used["total"] / MIB,
        hbm_mib=chip.hbm / MIB,
    )
    assert used["alias"] == cache, "the cache does not stay where it is"
    assert not copies_of_cache(text, model.kv_heads // ways, model.head_dim)
    assert used["temp"] <= bound and used["total"] <= chip.hbm
    assert chip.call in text, "the reference was compiled, not the kernel"
    assert chip.platform != "tpu" or not serial_loops.found(text, ())


def prefill_bound(model, ways: int) -> float:
    """Returns bytes beside weights, pages and tokens, of a pass of WIDE rows on one of `ways` devices.

    Twice the widest layer part in bfloat16, and what the kernel of GPUs needs, as in `dispatch_bound`. There is no loop,
    so no compiler copies weights into another tiling."""
    m = model
    widest = 2 * 2 * WIDE * (2 * m.embed + (m.heads + 2 * m.kv_heads) * m.head_dim // ways + 3 * m.ffw // ways)
    padded = m.kv_heads // ways * (WIDE * 8 + 64)
    kernel = padded * (2 * m.head_dim + 2 * 4 * (m.head_dim + 32) * min(8, -(-LENGTH // 1024)))
    return SLACK * (widest + kernel)


@pytest.mark.parametrize("target", TARGETS)
def test_row_program(target, table, compile_seconds):
    chip, model = TARGETS[target], PRESETS["qwen2_5_7b"]
    mesh = chip.mesh(chip.rows)
    programs, weights = programs_of(model, mesh, (ROWS,))
    sizes = programs.sizes
    ways = mesh.shape["tensor"]
    cache = 2 * PAGES * PAGE * cache_kinds.held(model.kept, ways)
    tokens = 4 * SLOTS * LENGTH
    bounds = {
        f"dispatch_{ROWS}": dispatch_bound(model, ways, weights, chip.relaid),
        "insert": SLACK * (sizes.inserts * (cache // PAGES + 4 * LENGTH) + 2 * tokens),
    }
    assert set(programs.compiled) == set(bounds)
    for (name, compiled), seconds in zip(programs.compiled.items(), compile_seconds[: len(bounds)], strict=True):
        used, text = memory(compiled), compiled.as_text()
        table(
            f"7B rows, {model.layers} layers, {name}",
            target,
            seconds=seconds,
            temp_mib=used["temp"] / MIB,
            temp_bound_mib=bounds[name] / MIB,
            total_mib=used["total"] / MIB,
            hbm_mib=chip.hbm / MIB,
        )
        assert used["alias"] == cache + tokens, "the cache does not stay where it is"
        assert not copies_of_cache(text, model.kv_heads // ways, model.head_dim)
        assert used["temp"] <= bounds[name] and used["total"] <= chip.hbm
        assert (chip.call in text) == (name != "insert"), "the reference was compiled, not the kernel"
        assert chip.platform != "tpu" or not serial_loops.found(text, ())


@pytest.mark.parametrize("target", ["sm_90", "v5e"])
def test_weight_sync(target, table):
    """The learner's weights become the engine's, all leaves: no host memory, and room for one group beside them."""
    begun, temporaries, calls = time.perf_counter(), [0], 0
    for compiled, times in roofline.sync_programs(*roofline.layouts_7b(target)):
        used, calls = memory(compiled), calls + times
        temporaries.append(used["temp"])
        # Of a group, the results are there twice at most: as they arrive, and in the order of the new layout.
        assert used["temp"] <= 2 * used["made"] + used["given"]
        assert not re.search(r"S\(5\)|infeed|outfeed|is_host_transfer=true", compiled.as_text())
    table(
        f"7B weight sync, {calls} calls", target, seconds=time.perf_counter() - begun, temp_mib=max(temporaries) / MIB
    )


def dispatch_bound(model, ways: int, params, relaid: tuple[str, ...]) -> float:
    """Returns bytes beside weights, pages and tokens, of ROWS rows and HEADS heads on one of `ways` devices.

    - float32 logits of the heads three times: from the head, divided by the temperature and cut into tiles, and
      weighed. They are whole, because the law's tiles of 1024 ids do not lie on the devices' boundaries.
    - twice the widest layer part, for what it reads and what it gives: the stream, q, k, v and gate, up, product.
    - what the attention kernel needs, as in test_kernels.
    - the slots' windows, and the page table for every row.
    - the weights that this compiler copies into another tiling before the loop (targets.Target.relaid).
    """
    m = model
    logits = 3 * HEADS * 4 * m.vocab_size
    widest = 2 * 4 * ROWS * (2 * m.embed + (m.heads + 2 * m.kv_heads) * m.head_dim // ways + 3 * m.ffw // ways)
    padded = m.kv_heads // ways * (ROWS * 8 + 64)
    kernel = padded * (2 * m.head_dim + 2 * 4 * (m.head_dim + 32) * min(8, -(-LENGTH // 1024)))
    small = 4 * ROWS * (LENGTH // PAGE) + 2 * SLOTS * LENGTH * 4
    weights = shard_bytes(
        [piece[name] for piece in (params, *params["layers"].values()) for name in relaid if name in piece]
    )
    return SLACK * (logits + widest + kernel + small + weights)


def copies_of_cache(text: str, kv_heads: int, head_dim: int) -> list[str]:
    """Returns the lines of compiled text that copy a layer's pages, in whatever order of axes."""
    found = []
    for line in re.findall(r"= bf16\[[\d,]+\]\S* (?:copy|copy-start|transpose)\(.*", text):
        shape = [int(size) for size in re.match(r"= bf16\[([\d,]+)\]", line)[1].split(",")]
        if sorted(size for size in shape if size > 1) == sorted((PAGES, PAGE, 2 * kv_heads, head_dim)):
            found.append(line)
    return found
