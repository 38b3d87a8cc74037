"""Which device runs kernels, and what is said where a reference runs: against devices that are described by hand."""

import functools
from types import SimpleNamespace

import abstract_chips
import jax
import jax.numpy as jnp
import pytest
import test_kernels_attention_gpu as gpu

from jaxrl_post.kernels import attention, choice, flash_gpu, flash_hopper, flash_tpu, hardware, verify
from jaxrl_post.kernels.pallas_gpu import RECENT
from jaxrl_post.models.cache_kinds import RecurrentState

SHAPE = dict(heads=28, kv_heads=4, head_dim=128, page=64, rows=256, vocab=152064)


def device(platform, kind, **more):
    return SimpleNamespace(platform=platform, device_kind=kind, **more)


H100, A100 = (device("gpu", f"NVIDIA {name}", compute_capability=cc) for name, cc in (("H100", "9.0"), ("A100", "8.0")))
B200, T4 = (device("gpu", f"NVIDIA {name}", compute_capability=cc) for name, cc in (("B200", "10.0"), ("T4", "7.5")))
CPU, V5E = device("cpu", "cpu"), device("tpu", "TPU v5 lite")


@pytest.mark.parametrize(
    "one", [H100, V5E, device("tpu", "TPU v5"), device("tpu", "TPU v6 lite"), device("tpu", "TPU7x")]
)
def test_these_run_their_kernels(one):
    assert hardware.without_kernels(one) == "" and hardware.platforms(one) == hardware.PLATFORMS
    assert choice.reference_lines(one, jnp.bfloat16, **SHAPE) == []


@pytest.mark.parametrize(
    "one, reason",
    [
        (A100, "the kernels are written for compute capability 9.0, and NVIDIA A100 has 8.0"),
        (B200, "and NVIDIA B200 has 10.0"),
        (T4, "NVIDIA T4 has 7.5"),
        (device("gpu", "AMD"), "AMD has unknown"),
        (device("tpu", "TPU v3"), "for TPU v5 and later, and this is TPU v3"),
        (device("tpu", "Trillium"), "this is Trillium"),
    ],
)
def test_these_run_the_references_and_say_why(one, reason):
    assert hardware.platforms(one) == frozenset()
    (line,) = choice.reference_lines(one, jnp.bfloat16, **SHAPE)
    assert line.startswith("kernels: the jnp references compute attention and sampling, because ") and reason in line


@pytest.mark.parametrize(
    "one, changes, parts",
    [
        (H100, dict(head_dim=512, page=16), []),
        (
            H100,
            dict(head_dim=192),
            ["attention. The cuda kernel needs bfloat16 or float16, heads of 64, 128, 256 or 512"],
        ),
        (
            H100,
            dict(page=8),
            ["pages of 16 to 128; here are bfloat16, heads of 128, 28 and 4 heads a device, and pages of 8"],
        ),
        (H100, dict(vocab=2053), ["samples. The cuda kernel needs at least"]),
        (V5E, dict(head_dim=64), []),
        (V5E, dict(head_dim=96, vocab=200), ["attention. The tpu kernel needs", "samples. The tpu kernel needs"]),
        (H100, dict(cut_ways=1), []),
        (V5E, dict(cut_ways=1), []),
        (V5E, dict(cut_ways=4, vocab=38016), ["in 64 passes over the logits. Fewer need a multiple of 128 ids"]),
        (CPU, dict(head_dim=20, page=3), []),
    ],
)
def test_shapes_without_a_kernel_are_said(one, changes, parts):
    lines = choice.reference_lines(one, jnp.bfloat16, **(SHAPE | changes))
    assert len(lines) == len(parts) and all(part in line for part, line in zip(parts, lines, strict=True)), lines


def test_a_program_for_an_older_gpu_holds_no_kernel():
    q, cache, rows = gpu._case()
    logits, number = jax.ShapeDtypeStruct((8, 2048), jnp.float32), functools.partial(jax.ShapeDtypeStruct, (8,))
    given = (logits, jax.ShapeDtypeStruct((8, 2), jnp.uint32), number(jnp.int32), number(jnp.float32))
    for one, held in ((H100, True), (A100, False), (CPU, True)):
        how = dict(platforms=hardware.platforms(one))
        attend = functools.partial(attention.attention, **gpu.HOW, **how), (q, cache, rows)
        draw = functools.partial(verify.verify_sample, **how), given
        for run, asked in (attend, draw):
            with abstract_chips.hopper():
                text = jax.jit(run).trace(*asked).lower(lowering_platforms=("cuda",)).as_text()
            assert ("mosaic_gpu" in text) == held


@pytest.mark.parametrize(
    "one, dtype, sides, said",
    [
        (CPU, jnp.float32, dict(embed=8, ffw=8), ""),
        (
            H100,
            jnp.bfloat16,
            dict(embed=2048, ffw=192),
            "the cuda kernel of grouped products reads the experts that rows",
        ),
        (
            A100,
            jnp.bfloat16,
            dict(embed=2880, ffw=2880),
            "the cuda kernel of grouped products reads the experts that rows",
        ),
        (
            V5E,
            jnp.bfloat16,
            dict(embed=2048, ffw=768),
            "the tpu kernel of grouped products reads the experts that rows",
        ),
        (V5E, jnp.float32, dict(embed=2048, ffw=768), "because the tpu kernel needs bfloat16 or float16"),
        (H100, jnp.bfloat16, dict(embed=2048, ffw=200), "here are bfloat16 and matrices of 2048 x 200"),
        (T4, jnp.bfloat16, dict(embed=2048, ffw=768), "because the kernel is written for compute capability 8.0"),
    ],
)
def test_what_multiplies_rows_with_experts_is_said(one, dtype, sides, said):
    line = choice.experts_line(one, dtype, **sides)
    assert said in line and bool(said) == bool(line)


@pytest.mark.parametrize(
    "one, sides, ways, said",
    [
        (CPU, (16, 16), 1, ""),
        (V5E, (128, 128), 1, ""),
        (H100, (128, 128), 4, ""),
        (
            V5E,
            (16, 16),
            1,
            "the tpu kernel needs float32 states whose sides are 128, and at most 512 rows; here are states",
        ),
        (
            H100,
            (16, 128),
            1,
            "the cuda kernel needs float32 states whose sides are 64 or 128; here are states of 16 x 128",
        ),
        (A100, (128, 128), 1, ""),
        (T4, (128, 128), 1, "because the kernel is written for compute capability 8.0"),
    ],
)
def test_what_walks_recurrent_rows_is_said(one, sides, ways, said):
    line = choice.recurrent_line(
        one,
        RecurrentState(key_heads=16, value_heads=32, key_dim=sides[0], value_dim=sides[1], width=4),
        ways=ways,
        rows=256,
    )
    assert said in line and bool(said) == bool(line)


@pytest.mark.parametrize(
    "one, sides, tokens, said",
    [
        (CPU, (16, 16), 100, ""),
        (V5E, (128, 128), 4096, ""),
        (V5E, (128, 64), 4096, "because the tpu kernel needs float32 states whose sides are 128"),
        (V5E, (128, 128), 100, "here are states of 128 x 128 and rows of 100 tokens"),
        (device("tpu", "TPU v3"), (128, 128), 4096, "for TPU v5 and later, and this is TPU v3"),
        (H100, (128, 128), 4096, "because the kernel is written for TPUs"),
    ],
)
def test_what_computes_the_learners_delta_rule_is_said(one, sides, tokens, said):
    kind = RecurrentState(key_heads=16, value_heads=32, key_dim=sides[0], value_dim=sides[1], width=4)
    line = choice.delta_rule_line(one, kind, ways=2, tokens=tokens)
    assert said in line and bool(said) == bool(line)


ON_HOPPER = (flash_hopper if RECENT else flash_gpu).attention


@pytest.mark.parametrize(
    "one, changes, kernel",
    [
        (H100, {}, ON_HOPPER),
        (H100, dict(head_dim=64), ON_HOPPER),
        (H100, dict(head_dim=256), flash_gpu.attention),
        (H100, dict(tokens=4096 + 64), flash_gpu.attention),
        (H100, dict(branches=True), flash_gpu.attention),
        (A100, {}, flash_gpu.attention),
        (B200, {}, flash_gpu.attention),
        (V5E, {}, flash_tpu.attention),
        (T4, {}, None),
        (CPU, {}, None),
    ],
)
def test_which_kernel_packed_rows_have(one, changes, kernel):
    sizes = dict(heads=28, kv_heads=4, head_dim=128, tokens=4096) | changes
    form, line = choice.of_packed_rows(one, jnp.bfloat16, **sizes)
    assert form == kernel and bool(line) == (kernel is None and one is not CPU)
