"""Attention in Mosaic GPU, interpreted with race detection, against the reference; and lowering on each platform."""

from __future__ import annotations

import contextlib
import functools

import abstract_chips
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxrl_post.kernels import attention, attention_gpu
from jaxrl_post.kernels.pallas_gpu import pl, plgpu
from jaxrl_post.parallel import mesh as meshes

pytestmark = pytest.mark.usefixtures("quick_compilation")

PLACE = attention_gpu.PLACE
HOW = dict(scale=0.2, window=None, soft_cap=None)
ALSO = pytest.mark.shown("exact-scale")

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter of jax 0.10 knows no transposed operand of wgmma"
)


def _races() -> bool:
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks.get_races().races_found


def _case(K=2, G=3, H=64, page=64, counts=((0, 130, 1), (1, 10, 3), (2, 60, 10)), length=256, dead=2, seed=0):
    """Returns rows from `counts` (slot, first position, rows), then `dead` rows that are not real.

    Tables cover `length` positions. Pages that no slot has reached are not mapped, and no slot has the last page. A
    slot's entries, and the queries, do not depend on the page size."""
    noise = np.random.default_rng(seed)
    S, blocks = max(slot for slot, _, _ in counts) + 1, length // page
    where = [(slot, first + index) for slot, first, count in counts for index in range(count)] + [(S - 1, 0)] * dead
    real = np.arange(len(where)) < len(where) - dead
    q = noise.normal(size=(len(where), K * G, H))
    text = noise.normal(size=(S, length, 2 * K, H))
    pages = S * blocks + 3
    table = noise.permutation(pages - 1)[: S * blocks].reshape(S, blocks)
    held = noise.normal(size=(pages, page, 2 * K, H))
    held[table] = text.reshape(S, blocks, page, 2 * K, H)
    for slot, first, count in counts:
        table[slot, (first + count - 1) // page + 1 :] = pages + slot
    rows = attention.Rows(
        jnp.array([w[0] for w in where], jnp.int32),
        jnp.array([w[1] for w in where], jnp.int32),
        jnp.asarray(real),
        jnp.asarray(table, jnp.int32),
    )
    return jnp.asarray(q, jnp.bfloat16), attention.Cache(jnp.asarray(held, jnp.bfloat16)), rows


def _kernel(q, cache, rows, **how):
    out = np.asarray(
        attention_gpu.attention(q, cache.pages, rows, interpret=plgpu.InterpretGPUParams(detect_races=True), **how),
        np.float32,
    )
    assert not _races()
    return out


@pytest.fixture
def short_stretches(monkeypatch):
    """Sets two places a stretch, so that small cases have several stretches."""
    monkeypatch.setattr(attention_gpu, "STRETCH", 2 * PLACE)


@interpreted
@pytest.mark.parametrize(
    "case, how",
    [
        (dict(), dict()),
        (dict(K=1, G=5, H=256, page=16, length=208), dict(window=70, soft_cap=2.0)),
        (dict(K=1, G=2, H=512, counts=((0, 130, 1), (1, 10, 3)), length=192, dead=1), dict(window=100, soft_cap=2.0)),
        *(
            pytest.param(*given, marks=ALSO)
            for given in (
                (dict(), dict(window=20, soft_cap=2.0)),
                (dict(K=1, G=7, counts=((0, 200, 9), (1, 63, 2)), dead=0), dict(window=70)),
                (dict(K=1, G=1, H=128, counts=((0, 0, 1), (1, 64, 1), (2, 127, 1))), dict(soft_cap=5.0)),
                (dict(K=3, G=16, counts=((0, 120, 17),), dead=1), dict()),
                (dict(K=1, G=7, page=32, length=224), dict(window=20)),
                (dict(H=128, page=16, length=176), dict()),
                (dict(K=1, G=3, H=128, page=128), dict(soft_cap=5.0)),
                (dict(K=2, G=1, H=256, page=128, counts=((0, 0, 1), (1, 64, 1), (2, 127, 3))), dict(window=3)),
                (dict(K=1, G=9, H=256, counts=((0, 120, 17),), dead=1), dict()),
            )
        ),
    ],
    ids=[
        "ragged",
        "wide heads, small pages",
        "two sides of values",
        "window and cap",
        "long window",
        "single heads",
        "tiles of four rows",
        "pages of 32",
        "pages of 16",
        "pages of 128",
        "wide heads, large pages",
        "wide heads, odd groups",
    ],
)
def test_equals_the_reference(case, how, short_stretches):
    q, cache, rows = _case(**case)
    got = _kernel(q, cache, rows, **HOW | how)
    assert _near_the_reference(got, q, cache, rows, **HOW | how)
    assert not got[~np.asarray(rows.real)].any()


SINKS = jnp.array([-2.0, 0.5, 3.0, 60.0, -60.0, 0.0])  # of the six query heads of `_case`


@interpreted
@pytest.mark.parametrize("how", [dict(), pytest.param(dict(window=20, soft_cap=2.0), marks=ALSO)], ids=str)
def test_sinks_join_each_softmax(how, short_stretches):
    given, how = _case(), HOW | dict(sinks=SINKS) | how
    got = _kernel(*given, **how)
    assert _near_the_reference(got, *given, **how)
    assert not _near_the_reference(got, *given, **how | dict(sinks=None))
    assert not got[~np.asarray(given[2].real)].any()


def _near_the_reference(got, q, cache, rows, **how) -> bool:
    wide = attention.Cache(cache.pages.astype(jnp.float32))
    exact = np.asarray(attention.reference(q.astype(jnp.float32), wide, rows, **how))
    near = np.asarray(attention.reference(q, cache, rows, **how), np.float32)
    # q * scale, the weights and the result are rounded to bfloat16, 2^-9 each; values are of size 1 to 4
    return np.allclose(got, exact, atol=0.03, rtol=0.02) and np.allclose(got, near, atol=0.02, rtol=0.01)


SHAPES = [
    dict(),
    pytest.param(dict(K=1, H=256, page=16), marks=ALSO),
    pytest.param(dict(K=1, H=256, page=128), marks=ALSO),
    pytest.param(dict(K=1, H=512, page=32), marks=ALSO),
]


@interpreted
@pytest.mark.parametrize("shape", SHAPES)
def test_later_rows_and_other_slots_change_no_bit(shape, short_stretches):
    """Draft rows behind a row share its tile, and reach into another page and another stretch."""
    q, cache, rows = _case(counts=((0, 126, 8), (1, 40, 3)), **shape)
    base = _kernel(q, cache, rows, **HOW)
    alone = rows._replace(real=jnp.arange(q.shape[0]) < 2)
    assert base[:2].tobytes() == _kernel(q, cache, alone, **HOW)[:2].tobytes()
    turned = jnp.concatenate([jnp.arange(4, q.shape[0]), jnp.arange(4)])  # the slot's rows 4 to 7 begin a tile
    moved = attention.Rows(rows.slot[turned], rows.position[turned], rows.real[turned], rows.table)
    assert base[4:8].tobytes() == _kernel(q[turned], cache, moved, **HOW)[:4].tobytes()


@interpreted
@pytest.mark.parametrize(
    "page, how",
    [
        (16, dict(window=70)),
        pytest.param(32, dict(soft_cap=2.0), marks=ALSO),
        pytest.param(128, dict(window=20), marks=ALSO),
    ],
)
def test_the_page_size_changes_no_bit(page, how, short_stretches):
    shape = dict(K=1, H=128, counts=((0, 126, 8), (1, 40, 3)))
    base = _kernel(*_case(**shape), **HOW | how)
    assert base.tobytes() == _kernel(*_case(page=page, **shape), **HOW | how).tobytes()


@interpreted
@pytest.mark.parametrize("shape", SHAPES)
def test_stale_entries_may_be_infinite(shape, short_stretches):
    """Those of the last page too, which is read for entries of the table that are not mapped."""
    q, cache, rows = _case(counts=((0, 130, 1), (1, 10, 3)), **shape)
    base = _kernel(q, cache, rows, **HOW)
    page = int(rows.table[1, 0])  # slot 1 ends at position 12
    pages = cache.pages.at[page, 13:, 0::2].set(jnp.nan).at[page, 13:, 1::2].set(jnp.inf)
    ruined = attention.Cache(pages.at[-1, :, 0::2].set(jnp.nan).at[-1, :, 1::2].set(jnp.inf))
    assert base.tobytes() == _kernel(q, ruined, rows, **HOW).tobytes()


def _fetch_whole_pages(pages_ref, table_ref, slot, begin, places):
    REAL_FETCH(pages_ref, table_ref, slot, begin - lax.rem(begin, pages_ref.shape[1]), places)


def _fetch_a_page_late(pages_ref, table_ref, slot, begin, places):
    REAL_FETCH(pages_ref, table_ref, slot, begin + pages_ref.shape[1], places)


def _the_same_columns_twice(ref, index, left=0):
    return pl.ds(left, ref.shape[1])


def _the_first_values_twice(pages_ref, table_ref, slot, begin, places):
    some = (pl.ds(0, smem.shape[-1]) for _, _, smem, _ in places)
    REAL_FETCH(pages_ref, table_ref, slot, begin, [(a, at, *b) for (a, _, *b), at in zip(places, some, strict=True)])


REAL_FETCH = attention_gpu._fetch
FAULTS = {
    "the second half of a page is never read": (256, 128, "_fetch", _fetch_whole_pages),
    "pages are one too late": (256, 16, "_fetch", _fetch_a_page_late),
    "columns are those of the first accumulator": (256, 64, "_columns", _the_same_columns_twice),
    "values behind the last row stay": (256, 16, "_clear", lambda values, left: None),
    "both sides mix the first values": (512, 64, "_fetch", _the_first_values_twice),
}


@interpreted
@ALSO
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault, monkeypatch):
    H, page, name, faulty = FAULTS[fault]
    monkeypatch.setattr(attention_gpu, name, faulty)
    q, cache, rows = _case(K=1, H=H, page=page, counts=((0, 130, 1),), dead=0)
    cache = attention.Cache(cache.pages.at[-1, :, 1::2].set(jnp.nan))  # what tables without a page read
    assert not _near_the_reference(_kernel(q, cache, rows, **HOW), q, cache, rows, **HOW)


@pytest.mark.parametrize("size", [1, 2])
def test_under_vmap_sinks_are_shared_and_lower(size):
    q, cache, rows = jax.tree.map(lambda x: jnp.stack([x] * size), _case())
    run = jax.vmap(functools.partial(attention.attention, **HOW), in_axes=(0, 0, 0, None))
    with abstract_chips.hopper():
        assert "mosaic_gpu" in jax.jit(run).trace(q, cache, rows, SINKS).lower(lowering_platforms=("cuda",)).as_text()


def _lowered(platform: str, **shape) -> str:
    q, cache, rows = _case(**shape)
    run = functools.partial(attention.attention, **HOW)
    with abstract_chips.hopper() if platform == "cuda" else contextlib.nullcontext():
        return jax.jit(run).trace(q, cache, rows).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("page", [16, *(pytest.param(page, marks=ALSO) for page in (32, 64, 128))])
def test_heads_of_256_lower_for_every_page_size(page):
    assert "mosaic_gpu" in _lowered("cuda", H=256, page=page)


def test_the_platform_and_the_shapes_choose():
    assert "mosaic_gpu" in _lowered("cuda") and "mosaic_gpu" not in _lowered("cpu")
    assert "mosaic_gpu" not in _lowered("cuda", page=8)
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


@pytest.mark.parametrize("sinks", [(), (jnp.array([-2.0, 0.5, 3.0, 0.0]),)], ids=["plain", "sinks"])
def test_on_cpu_every_bit_is_the_references_also_when_devices_split_it(sinks):
    cases = [_case(K=2, G=2, seed=seed) for seed in range(2)]
    want = [np.asarray(attention.reference(*case, *sinks, **HOW)) for case in cases]
    assert np.asarray(attention.attention(*cases[0], *sinks, **HOW)).tobytes() == want[0].tobytes()
    mesh = meshes.make_mesh(data=2, tensor=2)
    run = meshes.by_heads(mesh, functools.partial(attention.attention, **HOW))
    axes = 0, 0, 0, *(None for _ in sinks)
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases)
    got = np.asarray(jax.jit(jax.vmap(run, axes, spmd_axis_name=meshes.REPLICAS))(*both, *sinks))
    assert got.tobytes() == np.stack(want).tobytes()
