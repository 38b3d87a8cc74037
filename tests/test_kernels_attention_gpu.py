"""Attention in Mosaic GPU, interpreted with race detection, against the reference; and lowering on each platform."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.kernels import attention, attention_gpu
from jaxrl_post.kernels.pallas_gpu import plgpu
from jaxrl_post.parallel import mesh as meshes

pytestmark = pytest.mark.usefixtures("quick_compilation")

PAGE = attention_gpu.PAGE
HOW = dict(scale=0.2, window=None, soft_cap=None)


interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter of jax 0.10 knows no transposed operand of wgmma"
)


def _races() -> bool:
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks.get_races().races_found


def _case(K=2, G=3, H=64, counts=((0, 130, 1), (1, 10, 3), (2, 60, 10)), blocks=4, dead=2, seed=0):
    """Returns rows from `counts` (slot, first position, rows), then `dead` rows that are not real.

    Pages that no slot has reached are not mapped."""
    noise = np.random.default_rng(seed)
    S = max(slot for slot, _, _ in counts) + 1
    pages = S * blocks + 3
    table = noise.permutation(pages)[: S * blocks].reshape(S, blocks)
    for slot, first, count in counts:
        table[slot, (first + count - 1) // PAGE + 1 :] = pages + slot
    where = [(slot, first + index) for slot, first, count in counts for index in range(count)] + [(S - 1, 0)] * dead
    real = np.arange(len(where)) < len(where) - dead
    rows = attention.Rows(
        jnp.array([w[0] for w in where], jnp.int32),
        jnp.array([w[1] for w in where], jnp.int32),
        jnp.asarray(real),
        jnp.asarray(table, jnp.int32),
    )
    cache = attention.Cache(jnp.asarray(noise.normal(size=(pages, PAGE, 2 * K, H)), jnp.bfloat16))
    return jnp.asarray(noise.normal(size=(len(where), K * G, H)), jnp.bfloat16), cache, rows


def _kernel(q, cache, rows, **how):
    out = np.asarray(
        attention_gpu.attention(q, cache.pages, rows, interpret=plgpu.InterpretGPUParams(detect_races=True), **how),
        np.float32,
    )
    assert not _races()
    return out


@pytest.fixture
def short_stretches(monkeypatch):
    """Sets two pages a stretch, so that small cases have several stretches."""
    monkeypatch.setattr(attention_gpu, "STRETCH", 2 * PAGE)


@interpreted
@pytest.mark.parametrize(
    "case, how",
    [
        (dict(), dict()),
        (dict(), dict(window=20, soft_cap=2.0)),
        *(
            pytest.param(*given, marks=pytest.mark.extended)
            for given in (
                (dict(K=1, G=7, counts=((0, 200, 9), (1, 63, 2)), dead=0), dict(window=70)),
                (dict(K=1, G=1, H=128, counts=((0, 0, 1), (1, 64, 1), (2, 127, 1))), dict(soft_cap=5.0)),
                (dict(K=3, G=16, counts=((0, 120, 17),), dead=1), dict()),
            )
        ),
    ],
    ids=["ragged", "window and cap", "long window", "single heads", "tiles of four rows"],
)
def test_equals_the_reference(case, how, short_stretches):
    q, cache, rows = _case(**case)
    got = _kernel(q, cache, rows, **HOW | how)
    exact = attention.reference(
        q.astype(jnp.float32) * 1, attention.Cache(cache.pages.astype(jnp.float32)), rows, **HOW | how
    )
    # q * scale, the weights and the result are rounded to bfloat16, 2^-9 each; values are of size 1 to 4
    np.testing.assert_allclose(got, np.asarray(exact), atol=0.03, rtol=0.02)
    near = np.asarray(attention.reference(q, cache, rows, **HOW | how), np.float32)
    np.testing.assert_allclose(got, near, atol=0.02, rtol=0.01)
    assert not got[~np.asarray(rows.real)].any()


@interpreted
def test_later_rows_and_other_slots_change_no_bit(short_stretches):
    """Draft rows behind a row share its tile, and reach into another page and another stretch."""
    q, cache, rows = _case(counts=((0, 126, 8), (1, 40, 3)))
    base = _kernel(q, cache, rows, **HOW)
    alone = rows._replace(real=jnp.arange(q.shape[0]) < 2)
    assert base[:2].tobytes() == _kernel(q, cache, alone, **HOW)[:2].tobytes()
    turned = jnp.concatenate([jnp.arange(4, q.shape[0]), jnp.arange(4)])  # the slot's rows 4 to 7 begin a tile
    moved = attention.Rows(rows.slot[turned], rows.position[turned], rows.real[turned], rows.table)
    assert base[4:8].tobytes() == _kernel(q[turned], cache, moved, **HOW)[:4].tobytes()


@interpreted
def test_stale_entries_may_be_infinite(short_stretches):
    q, cache, rows = _case()
    base = _kernel(q, cache, rows, **HOW)
    page = int(rows.table[1, 0])  # slot 1 ends at position 12
    ruined = attention.Cache(cache.pages.at[page, 13:, 0::2].set(jnp.nan).at[page, 13:, 1::2].set(jnp.inf))
    assert base.tobytes() == _kernel(q, ruined, rows, **HOW).tobytes()


def _lowered(platform: str, **shape) -> str:
    q, cache, rows = _case(**shape)
    run = functools.partial(attention.attention, **HOW)
    return jax.jit(run).trace(q, cache, rows).lower(lowering_platforms=(platform,)).as_text()


def test_the_platform_and_the_shapes_choose():
    assert "mosaic_gpu" in _lowered("cuda") and "mosaic_gpu" not in _lowered("cpu")
    q, cache, rows = _case()
    wide = attention.Cache(cache.pages.astype(jnp.float32))
    assert attention.serving(q, cache)["cuda"] == attention_gpu.attention
    assert not attention.serving(q, cache, frozenset())
    assert not attention.serving(q.astype(jnp.float32), wide)
    text = (
        jax.jit(functools.partial(attention.attention, **HOW))
        .trace(q.astype(jnp.float32), wide, rows)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert "mosaic_gpu" not in text


def test_on_cpu_every_bit_is_the_references_also_when_devices_split_it():
    cases = [_case(K=2, G=2, seed=seed) for seed in range(2)]
    want = [np.asarray(attention.reference(*case, **HOW)) for case in cases]
    assert np.asarray(attention.attention(*cases[0], **HOW)).tobytes() == want[0].tobytes()
    mesh = meshes.make_mesh(data=2, tensor=2)
    run = meshes.by_heads(mesh, functools.partial(attention.attention, **HOW))
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases)
    got = np.asarray(jax.jit(jax.vmap(run, spmd_axis_name=meshes.REPLICAS))(*both))
    assert got.tobytes() == np.stack(want).tobytes()
