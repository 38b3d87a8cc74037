"""The counter of FLOPs and bytes: by hand, and on programs that do the same written out and in loops."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import compiled_text
import kernel_costs
import traffic

from jaxrl_post.kernels import flash_gpu, flash_hopper, warpgroups

TEXT = """
%part (a: bf16[28,16,8], at: s32[]) -> bf16[16,8] {
  %a = bf16[28,16,8]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %slice = bf16[1,16,8]{2,1,0} dynamic-slice(%a, %at, %at, %at), dynamic_slice_sizes={1,16,8}
  ROOT %flat = bf16[16,8]{1,0} bitcast(%slice)
}

%place (a: f32[28,16], new: f32[1,16], at: s32[]) -> f32[28,16] {
  %a = f32[28,16]{1,0} parameter(0)
  %new = f32[1,16]{1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %out = f32[28,16]{1,0} dynamic-update-slice(%a, %new, %at, %at)
}

%body (p: (s32[], bf16[4,16], bf16[28,16,8], f32[28,16], f32[1,16])) -> (s32[]) {
  %p = (s32[], bf16[4,16]{1,0:S(1)}, bf16[28,16,8]{2,1,0}, f32[28,16]{1,0}, f32[1,16]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %x = bf16[4,16]{1,0:S(1)} get-tuple-element(%p), index=1
  %all = bf16[28,16,8]{2,1,0} get-tuple-element(%p), index=2
  %rows = f32[28,16]{1,0} get-tuple-element(%p), index=3
  %row = f32[1,16]{1,0} get-tuple-element(%p), index=4
  %w = bf16[16,8]{1,0:S(1)} fusion(%all, %n), kind=kLoop, calls=%part
  %y = bf16[4,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/layer/dot"}
  %kept = f32[28,16]{1,0} fusion(%rows, %row, %n), kind=kLoop, calls=%place
  %k = f32[8,8]{1,0} custom-call(%y, /*index=1*/%y), custom_call_target="box", metadata={op_name="jit(f)/kernel"}
  %one = s32[] constant(2)
  %next = s32[] add(%n, %one)
  ROOT %t = (s32[]) tuple(%next, %x, %all, %kept, %row)
}

%end (p: (s32[])) -> pred[] {
  %p = (s32[]) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %last = s32[] constant(27)
  ROOT %lt = pred[] compare(%n, %last), direction=LT
}

ENTRY %main (p: f32[16]) -> f32[16] {
  %p = f32[16]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[]) tuple(%zero, %p, %p, %p, %p)
  %c = (f32[16]{0:S(1)}, f32[16]{0}, u32[]{:S(2)}) copy-start(%p)
  ROOT %w = (s32[]) while(%start), condition=%end, body=%body
}
"""


def test_a_text_by_hand():
    found = traffic.count(TEXT, {"box .*kernel": lambda given, made: (100.0, float(len(given) + made[0].dims[0]))})
    turns = 14  # 0, 2, ... 26
    assert found.unknown == ()
    assert found.flops("dot") == turns * 2 * 4 * 8 * 16
    assert found.flops() == turns * (2 * 4 * 8 * 16 + 100)
    part, product, placed, box = 16 * 8 * 2 + 4, 4 * 8 * 2, 16 * 4 + 4 + 16 * 4, 2 + 8
    count = 4 + 4 + 4
    assert found.bytes() == turns * (part + product + placed + box + count) + 16 * 4
    assert traffic.count(TEXT).unknown == ("k box jit(f)/kernel",)
    assert "body" in traffic.count(TEXT.replace("direction=LT", "direction=NE")).unknown


SCATTER = """
%put (a: bf16[64,16], at: s32[2,1], new: bf16[2,16]) -> bf16[64,16] {
  %a = bf16[64,16]{1,0} parameter(0)
  %at = s32[2,1]{1,0} parameter(1)
  %new = bf16[2,16]{1,0} parameter(2)
  ROOT %out = bf16[64,16]{1,0} scatter(%a, %at, %new), update_window_dims={1}
}

ENTRY %main (a: bf16[64,16], at: s32[2,1], new: bf16[2,16]) -> bf16[64,16] {
  %a = bf16[64,16]{1,0} parameter(0)
  %at = s32[2,1]{1,0} parameter(1)
  %new = bf16[2,16]{1,0} parameter(2)
  ROOT %w = bf16[64,16]{1,0} fusion(%a, %at, %new), kind=kLoop, calls=%put
}
"""


def test_rows_that_are_scattered_into_a_cache_count_alone():
    assert traffic.count(SCATTER).bytes() == 2 * 4 + 2 * (2 * 16 * 2)


def test_rows_count_alone_where_their_fusion_stands_in_another():
    """A TPU's scatter stands so, beside the line that makes the new rows."""
    inner, entry = SCATTER.split("\nENTRY")
    between = """
%behind (a.1: bf16[64,16], at.1: s32[2,1], new.1: bf16[2,16]) -> bf16[64,16] {
  %a.1 = bf16[64,16]{1,0} parameter(0)
  %at.1 = s32[2,1]{1,0} parameter(1)
  %new.1 = bf16[2,16]{1,0} parameter(2)
  %twice = bf16[2,16]{1,0} add(%new.1, %new.1)
  ROOT %out.1 = bf16[64,16]{1,0} fusion(%a.1, %at.1, %twice), kind=kCustom, calls=%put
}
"""
    text = f"{inner}{between}\nENTRY{entry.replace('calls=%put', 'calls=%behind')}"
    assert traffic.count(text).bytes() == traffic.count(SCATTER).bytes()


def test_pages_that_the_engine_reads_by_hand():
    """256 rows of 28 heads, 7 padded to 8 for each of 4 keys: a tile of 64 holds 8 rows of one slot."""

    def array(kind, *dims):
        return compiled_text.Array(kind, dims)

    given = (array("bf16", 4, 2112, 128), array("bf16", 100, 64, 8, 128), array("s32", 256, 64), array("s32", 256, 4))
    made = (array("f32", 4, 4, 2048, 128), array("f32", 4, 4, 2048, 32))
    shared = []
    kernel = kernel_costs.paged(lambda rows: shared.append(rows) or [100] * 256, 256)["mosaic_gpu.*attend"]
    pages, queries, sums = 256 * 128 * 2 * 4 * 128 * 2, 4 * 2112 * 128 * 2, 256 * 4 * 8 * 160 * 4
    assert kernel(given, made)[1] == pages + queries + sums and shared == [8]
    alone = kernel_costs.paged(lambda rows: [100] * 256, 256, pages_alone=True)["mosaic_gpu.*attend"]
    assert alone(given, made)[1] == pages
    assert alone(given, made)[0] == 256 * 4 * (2 + 2) * 64 * 128 * 128  # scores, and mixed values, of 128 positions
    wide = array("bf16", 4, 2112, 512), array("bf16", 100, 64, 8, 512), *given[2:]
    assert alone(wide, made)[0] == 256 * 4 * (2 * 2 + 2) * 64 * 128 * 512  # two blocks make the scores


def test_pages_that_the_engine_reads_on_tpu_by_hand():
    """A tile of a prompt has 64 rows. 300 positions are five pages of 64, and two turns of 256 of the products."""

    def array(kind, *dims):
        return compiled_text.Array(kind, dims)

    shared, q = [], array("f32", 2048, 8, 128)
    tiles = kernel_costs.paged(lambda rows: shared.append(rows) or [300] * 32, 2048)
    formula = next(made for name, made in tiles.items() if re.search(name, "paged_rows_by_64.3 tpu_custom_call attend"))
    given = (array("s32", 128), array("s32", 32 * 64), q, array("bf16", 100, 64, 2, 128))
    flops, moved = formula(given, (q,))
    assert moved == 32 * 320 * 2 * 128 * 2 + 2 * (2048 * 8 * 128 * 4) and shared == [64]
    assert flops == 2 * 2 * (64 * 8 * 128) * (32 * 512)


def test_packed_rows_on_gpu_by_hand():
    """128 tokens are 6 pairs of 32 queries and 64 keys, and 3 pairs of 64 and 64, for each of 4 heads."""
    assert flash_gpu.TILES.keys() == kernel_costs.GPU_TILES.keys()
    for head, tiles in flash_gpu.TILES.items():
        found = {"forward": tiles.forward, "queries": tiles.by_queries, "keys": tiles.by_keys}
        assert {walk: (tile.queries, tile.keys) for walk, tile in found.items()} == kernel_costs.GPU_TILES[head]
    q, k = (compiled_text.Array("bf16", (1, 128, heads, 128)) for heads in (4, 2))
    flops, moved = kernel_costs.PACKED_ROWS["flash_backward_keys"]((q, k, k), (k, k))
    assert flops == 4 * 2 * (32 * 64 * 128) * (4 * 6)
    assert moved == 4 * (128 * 2 * 128 * 2) + 2 * (32 * 128 * 2) * (4 * 6)
    flops, moved = kernel_costs.PACKED_ROWS["flash_forward"]((q, k, k), (q,))
    assert flops == 2 * 2 * (64 * 64 * 128) * (4 * 3)
    assert moved == 2 * (128 * 4 * 128 * 2) + 2 * (64 * 128 * 2) * (4 * 3)


def test_packed_rows_on_hopper_by_hand():
    """256 tokens are 10 pairs of 64 rows and 64, and of both groups' 128 rows 6. With blocks of 128 keys they are 6 and 3."""
    for head, tiles in flash_hopper.TILES.items():
        found = {"forward": tiles.forward, "queries": tiles.by_queries, "keys": tiles.by_keys}
        assert {walk: (tile.own, tile.walked) for walk, tile in found.items()} == kernel_costs.HOPPER_TILES[head]
    assert warpgroups.GROUPS == kernel_costs.HOPPER_GROUPS
    q, k = (compiled_text.Array("bf16", (1, 256, heads, 128)) for heads in (4, 2))
    flops, moved = kernel_costs.PACKED_ROWS["flash_backward_keys_hopper"]((q, k, k), (k, k))
    assert flops == 4 * 2 * (64 * 64 * 128) * (4 * 10)
    assert moved == 4 * (256 * 2 * 128 * 2) + 2 * (64 * 128 * 2) * (4 * 6)
    flops, moved = kernel_costs.PACKED_ROWS["flash_forward_hopper"]((q, k, k), (q,))
    assert flops == 2 * 2 * (64 * 128 * 128) * (4 * 6)
    assert moved == 2 * (256 * 4 * 128 * 2) + 2 * (128 * 128 * 2) * (4 * 3)


CONVOLUTIONS = [  # lhs, rhs, out, attributes, FLOPs
    ("4,16", "16,8", "4,8", "dim_labels=bf_io->bf", 2 * 4 * 8 * 16),
    (  # a batch of three products [4, 16] x [16, 8], as TPUs write it
        "3,4,16",
        "3,16,8",
        "3,4,8",
        "window={size=3 stride=2 pad=0_0 lhs_dilate=3}, dim_labels=0bf_0io->0bf",
        2 * 3 * 4 * 8 * 16,
    ),
    ("5,1,1", "3,1,1", "5,1,1", "window={size=3 pad=1_1}, dim_labels=0bf_0io->0bf", 2 * 13),
]


@pytest.mark.parametrize("left, right, made, how, flops", CONVOLUTIONS)
def test_a_product_that_is_written_as_a_convolution(left, right, made, how, flops):
    text = (
        f"ENTRY %main (a: f32[{left}], b: f32[{right}]) -> f32[{made}] {{\n"
        f"  %a = f32[{left}] parameter(0)\n  %b = f32[{right}] parameter(1)\n"
        f"  ROOT %c = f32[{made}] convolution(%a, %b), {how}\n}}\n"
    )
    assert traffic.count(text).flops() == flops


def gradient(loop: bool, layers: int) -> str:
    """Returns the compiled text of a loss's gradient over `layers` products."""

    def layer(h, w):
        return jnp.tanh(h @ w), None

    def run(h, weights):
        if loop:
            return jnp.sum(jax.lax.scan(layer, h, weights)[0])
        for index in range(layers):
            h, _ = layer(h, weights[index])
        return jnp.sum(h)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 64), (layers, 64, 64))]
    return jax.jit(jax.grad(run, argnums=(0, 1))).lower(*shapes).compile().as_text()


@pytest.mark.parametrize("layers", [2, 4])
def test_a_loop_counts_as_its_turns(layers):
    product = 2 * 8 * 64 * 64
    scanned, written = traffic.count(gradient(True, layers)), traffic.count(gradient(False, layers))
    assert not scanned.unknown and not written.unknown
    assert scanned.flops() == written.flops() == 3 * layers * product
    weights = layers * 64 * 64 * 4
    assert 3 * weights <= written.bytes() and 3 * weights <= scanned.bytes() <= 3 * written.bytes()


def test_branches_and_constants_of_a_loop():
    program = compiled_text.read(TEXT)
    assert [(run.line.name, run.turns) for run in program.runs() if run.line.operation in ("dot", "copy-start")] == [
        ("c", 1),
        ("y", 14),
    ]
