"""Attention over tiles of prompts against attention row by row. The kernel of TPUs has tests of its own."""

from __future__ import annotations

import functools

import abstract_chips
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxrl_post.kernels import attention, attention_gpu, prompt_attention
from jaxrl_post.kernels.pallas_gpu import plgpu

pytestmark = pytest.mark.usefixtures("quick_compilation")

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter of jax 0.10 knows no transposed operand of wgmma"
)

TILE, N, K, BLOCKS, PAGES = 16, 6, 2, 6, 24
HOW = dict(scale=0.3, window=None, soft_cap=None)
FIRST, COUNT = (0, 16, 32, 0, 0), (16, 16, 3, 9, 0)  # tiles of a prompt, of a short one, and an idle tile
OF = (0, 0, 0, 1, 2)  # the prompt of each tile


def case(page=8, head_dim=8, dtype=jnp.float32):
    noise = np.random.default_rng(1)
    table = noise.permutation(PAGES)[: 3 * BLOCKS].reshape(3, BLOCKS)
    table[1, 2:] = table[2] = PAGES  # not mapped
    rows = prompt_attention.rows_of(*(jnp.asarray(x, jnp.int32) for x in (FIRST, COUNT, table[list(OF)])), TILE)
    cache = attention.Cache(jnp.asarray(noise.normal(size=(PAGES, page, 2 * K, head_dim)), dtype))
    return jnp.asarray(noise.normal(size=(len(OF) * TILE, N, head_dim)), dtype), cache, rows


def test_rows_of_tiles():
    _, _, rows = case()
    real = np.asarray(rows.real).reshape(-1, TILE)
    assert real.sum(axis=1).tolist() == [*COUNT]
    positions = [np.asarray(rows.position).reshape(-1, TILE)[i][real[i]].tolist() for i in range(5)]
    assert positions == [list(range(first, first + count)) for first, count in zip(FIRST, COUNT)]


ALSO = pytest.mark.extended


@pytest.mark.parametrize(
    "window, cap, turn",
    [
        (12, 3.0, 24),
        *(pytest.param(*how, turn, marks=ALSO) for how in ((None, None), (5, None)) for turn in (8, 24, 256)),
    ],
)
def test_equals_attention_row_by_row(window, cap, turn, monkeypatch):
    monkeypatch.setattr(prompt_attention, "TURN", turn)
    q, cache, rows = case()
    how = HOW | dict(window=window, soft_cap=cap)
    got, want = (np.asarray(run(q, cache, rows, **how)) for run in (prompt_attention.attention, attention.reference))
    np.testing.assert_allclose(got, want, atol=2e-6)
    assert not got[~np.asarray(rows.real)].any(), "a row that is not real attends to nothing"


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_join_each_softmax(window):
    q, cache, rows = case()
    sinks, how = jnp.array([-2.0, 0.5, 3.0, 60.0, -60.0, 0.0]), HOW | dict(window=window)
    runs = prompt_attention.attention, attention.reference
    got, want = (np.asarray(run(q, cache, rows, sinks, **how)) for run in runs)
    np.testing.assert_allclose(got, want, atol=2e-6)
    assert not got[~np.asarray(rows.real)].any(), "a row that is not real attends to nothing"
    assert not np.allclose(got, prompt_attention.attention(q, cache, rows, **how), atol=1e-2)


def test_place_company_and_stale_pages_change_no_bit():
    q, cache, rows = case()
    base = np.asarray(prompt_attention.attention(q, cache, rows, **HOW)).reshape(5, TILE, -1)
    order = jnp.array([4, 2, 3, 0, 1])  # also: no turn of the longest prompt beside the short one
    tiles = (jnp.asarray(x, jnp.int32)[order] for x in (FIRST, COUNT))
    moved = prompt_attention.rows_of(*tiles, rows.table[order], TILE)
    out = prompt_attention.attention(q.reshape(5, TILE, N, -1)[order].reshape(q.shape), cache, moved, **HOW)
    assert np.asarray(out).reshape(5, TILE, -1)[np.argsort(order)].tobytes() == base.tobytes()
    alone = prompt_attention.rows_of(jnp.array(FIRST), jnp.array([0, 0, 0, 9, 0]), rows.table, TILE)
    out = np.asarray(prompt_attention.attention(q, cache, alone, **HOW)).reshape(5, TILE, -1)
    assert out[3].tobytes() == base[3].tobytes()
    stale = int(rows.table[3, 1]), 1  # position 9 of the short prompt, behind its last one
    ruined = attention.Cache(cache.pages.at[stale].set(jnp.inf))
    out = np.asarray(prompt_attention.attention(q, ruined, rows, **HOW)).reshape(5, TILE, -1)
    assert out[3].tobytes() == base[3].tobytes()


@interpreted
@pytest.mark.extended
def test_the_kernel_on_gpus_computes_tiles():
    q, cache, rows = case(page=attention_gpu.PLACE, head_dim=64, dtype=jnp.bfloat16)
    how = dict(scale=0.1, window=None, soft_cap=None)
    got = attention_gpu.attention(q, cache.pages, rows, interpret=plgpu.InterpretGPUParams(), **how)
    want, real = attention.reference(q, cache, rows, **how), np.asarray(rows.real)
    got, want = (np.asarray(x, np.float32)[real] for x in (got, want))
    np.testing.assert_allclose(got, want, atol=0.02, rtol=0.01)


@pytest.mark.parametrize("platform, page", [("tpu", 8), pytest.param("cuda", 64, marks=ALSO)])
def test_the_platforms_kernel_is_lowered(platform, page):
    """Under vmap, as the replicas of an engine are."""
    q, cache, rows = case(page=page, head_dim=128, dtype=jnp.bfloat16)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0, 0, 0, 0))
    def run(q, pages, first, count, table):
        rows = prompt_attention.rows_of(first, count, table, TILE)
        return prompt_attention.attention(q, attention.Cache(pages), rows, **HOW)

    given = [x[None] for x in (q, cache.pages, jnp.array(FIRST), jnp.array(COUNT), rows.table)]
    chip = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    one = AbstractMesh(
        (1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=chip if platform == "tpu" else abstract_chips.H100
    )
    with jax.sharding.use_abstract_mesh(one):
        text = run.trace(*given).lower(lowering_platforms=(platform,)).as_text()
    assert {"tpu": "tpu_custom_call", "cuda": "mosaic_gpu"}[platform] in text
