"""The stack of layers for decode steps on GPUs, interpreted, against the layers that every other platform runs."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.engine import between_products
from jaxrl_post.engine.host.wire import EngineSettings
from jaxrl_post.kernels import attention, attention_gpu, rows_gpu
from jaxrl_post.kernels.pallas_gpu import plgpu
from jaxrl_post.models import cache_kinds, decode_stack, decoder
from jaxrl_post.models.model_config import Experts, LinearAttention, Lora
from jaxrl_post.parallel import mesh as meshes

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.skipif(
        not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter of jax 0.10 knows no transposed operand"
    ),
]

PAGE, BLOCKS, VOCAB = 16, 12, 40
CONFIG = decoder.ModelConfig(
    vocab_size=VOCAB, embed=96, layers=2, heads=6, kv_heads=2, head_dim=64, ffw=160, max_length=256, tied=True
)
FORMS = {
    "biases": dict(qkv_bias=True),
    "norms, sinks, window and cap": dict(
        qk_norm=True, sinks=True, windows=(40, None), attn_soft_cap=3.0, norm_offset=1.0, embed_scale=2.0
    ),
}
# Slot, first position and number of rows. The last rows are not real. Slot 0 has positions in two stretches.
ROWS, DEAD = ((0, 140, 1), (1, 5, 4), (2, 15, 2)), 1


def weights(config) -> dict:
    """Returns random weights of which none is zero."""
    noise = np.random.default_rng(1)
    params = decoder.init(config, 0)
    return jax.tree.map(lambda x: jnp.asarray(x + 0.1 * noise.normal(size=x.shape), jnp.bfloat16), params)


def rows() -> tuple[attention.Rows, jax.Array]:
    """Returns the rows and their tokens. The page of the row that is not real is another slot's."""
    noise = np.random.default_rng(2)
    where = [(slot, first + at) for slot, first, count in ROWS for at in range(count)] + [(0, 3)] * DEAD
    slot, position = np.array(where, np.int32).T
    table = noise.permutation(3 * BLOCKS).astype(np.int32).reshape(3, BLOCKS)
    real = np.arange(len(where)) < len(where) - DEAD
    made = attention.Rows(*map(jnp.asarray, (slot, position, real, table)))
    return made, jnp.asarray(noise.integers(0, VOCAB, len(where)), jnp.int32)


def caches(config, dtype) -> tuple:
    noise = np.random.default_rng(3)
    shape = 3 * BLOCKS, PAGE, config.kv_heads, 2 * config.head_dim
    return tuple(
        attention.Cache(jnp.asarray(noise.normal(size=shape), jnp.bfloat16).astype(dtype)) for _ in range(config.layers)
    )


def by_layers(config, params, rows, tokens, dtype) -> tuple:
    places = cache_kinds.places(config.kept)

    def attend(layer, q, k, v, cache, *, sinks=None, **how):
        place = places[layer]
        written = attention.write(cache[place], k, v, rows)
        out = attention.reference(q, written, rows, sinks, **how)
        return out, (*cache[:place], written, *cache[place + 1 :])

    params = jax.tree.map(lambda x: x.astype(dtype), params)
    return decoder.hidden(params, config, tokens, rows.position, attend, caches(config, dtype), dtype=dtype)


def by_kernels(config, params, rows, tokens) -> tuple:
    between = between_products.of(config, lambda run: run, rows, interpret=plgpu.InterpretGPUParams())
    given = params, config, tokens, rows.position, between, caches(config, jnp.bfloat16), jnp.bfloat16
    return decode_stack.hidden(*given)


@pytest.fixture
def short_stretches(monkeypatch):
    monkeypatch.setattr(attention_gpu, "STRETCH", 2 * attention_gpu.PLACE)


@pytest.mark.parametrize("form", FORMS)
def test_rows_have_the_values_of_the_layers(form, short_stretches):
    """They are as near to float32 as the layers are in bfloat16. What no real row writes stays as it is."""
    config = dataclasses.replace(CONFIG, **FORMS[form])
    params, (at, tokens) = weights(config), rows()
    got, want, exact = (
        run(config, params, at, tokens, *more)
        for run, more in ((by_kernels, ()), (by_layers, (jnp.bfloat16,)), (by_layers, (jnp.float32,)))
    )
    real = np.asarray(at.real)
    error = [np.abs(np.asarray(one[0], np.float32) - exact[0])[real] for one in (got, want)]
    assert error[0].max() < 1.5 * error[1].max() and error[0].mean() < 1.2 * error[1].mean()
    for mine, other, before in zip(got[1], want[1], caches(config, jnp.bfloat16), strict=True):
        mine, other, before = (np.asarray(x.pages, np.float32) for x in (mine, other, before))
        same = other == before
        assert np.array_equal(mine[same], before[same]) and (~same).any(axis=(2, 3)).sum() == real.sum()
        np.testing.assert_allclose(mine, other, atol=0.05, rtol=0.05)


def test_a_row_knows_only_its_slot(short_stretches):
    config = dataclasses.replace(CONFIG, **FORMS["biases"])
    params, (at, tokens) = weights(config), rows()
    whole = np.asarray(by_kernels(config, params, at, tokens)[0], np.float32)
    alone = at._replace(real=at.real & (at.slot == 1))
    apart = np.asarray(by_kernels(config, params, alone, tokens)[0], np.float32)
    assert np.array_equal(whole[np.asarray(alone.real)], apart[np.asarray(alone.real)])


@pytest.mark.parametrize("inputs, outputs", [(1536, 1536), (8960, 1536), (3584, 152064), (200, 64)])
def test_parts_of_a_product_fill_a_gpu_and_are_equal_for_few_rows(inputs, outputs):
    many = [rows_gpu.parts(rows, inputs, outputs) for rows in (16, 32, 64, 256)]
    assert many[0] == many[1] == many[2] >= many[3] and all(inputs % one == 0 for one in many)
    assert many[0] == {(1536, 1536): 8, (8960, 1536): 8, (3584, 152064): 1, (200, 64): 1}[inputs, outputs]
    x, matrix = (np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((3, 256), (256, 5)))
    made = rows_gpu.product(jnp.asarray(x), jnp.asarray(matrix))
    assert len(made) == rows_gpu.parts(3, 256, 5) == 2
    np.testing.assert_allclose(made.sum(axis=0), x @ matrix, atol=1e-4)


@pytest.mark.parametrize(
    "change, served",
    [
        (dict(), True),
        (dict(qk_norm=True, sinks=True), True),
        (dict(head_dim=96), False),
        (dict(experts=Experts(4, 2, 32)), False),
        (dict(lora=Lora(4, 8.0, ("q",))), False),
        (dict(linear=LinearAttention(2, 4, 8, 8, 4, layers=(0,))), False),
        (dict(post_norms=True), False),
        (dict(rotary_dim=32), False),
        (dict(shared_layers=1), False),
    ],
)
def test_other_layers_keep_their_own_form(change, served):
    config = dataclasses.replace(CONFIG, **change)
    assert between_products.serves(config, jnp.bfloat16, PAGE) == served
    assert not between_products.serves(config, jnp.float32, PAGE)


def chips(kind: str, capability: str, tensor: int = 1) -> types.SimpleNamespace:
    """Returns what stands for a mesh of one replica."""
    platform = "gpu" if capability else "cpu"
    device = types.SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)
    return types.SimpleNamespace(devices=np.array([device] * tensor), shape={meshes.TENSOR: tensor})


@pytest.mark.parametrize(
    "mesh, change, products, said",
    [
        (chips("NVIDIA H100", "9.0"), dict(), "parts 1", ""),
        (chips("NVIDIA H100", "9.0"), dict(products="library"), "library", ""),
        (chips("NVIDIA H100", "9.0"), dict(products="fixed"), "fixed 1", ""),
        (chips("NVIDIA H100", "9.0", tensor=2), dict(), "library", "need one device a replica, and here are 2"),
        (chips("NVIDIA H100", "9.0"), dict(kv="int8"), "library", "know no codes of 8 bits"),
        (chips("NVIDIA H100", "9.0"), dict(slots=24), "parts 1", "here are 24 slots and (64,) rows"),
        (chips("NVIDIA A100", "8.0"), dict(), "library", "compute capability 9.0, and NVIDIA A100 has 8.0"),
        (chips("cpu", ""), dict(), "library", ""),
        (chips("cpu", ""), dict(one_graph=True), "library", "cpu has no CUDA graphs"),
    ],
)
def test_a_run_says_where_other_kernels_run(mesh, change, products, said):
    sizes = EngineSettings(
        **dict(slots=16, max_length=96, page_size=PAGE, pages=96, row_sizes=(64,), head_rows=64, steps_per_dispatch=8)
        | dict(dtype=jnp.bfloat16)
        | change
    )
    assert between_products.resolved(CONFIG, mesh, sizes).products_key == products
    lines = between_products.lines(CONFIG, mesh.devices.flat[0], len(mesh.devices), sizes)
    assert len(lines) == bool(said) and all(said in line for line in lines)
