"""Attention in Pallas for TPUs, interpreted, against the reference; bits of rows that share a tile; planted faults."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxrl_post.kernels import attention, attention_tpu, prompt_attention
from jaxrl_post.kernels.pallas_tpu import pltpu

ALSO = pytest.mark.shown("exact-scale")
HOW = dict(scale=0.2, window=None, soft_cap=None)
DRAFTS = ((0, 252, 9), (1, 40, 3))  # slot, first position, rows: drafts behind four rows reach into another turn


def case(K=1, G=3, H=128, page=16, blocks=18, counts=((0, 130, 1), (1, 10, 3), (2, 250, 12)), dead=2, seed=0):
    """Returns rows from `counts`, then `dead` rows that are not real. Pages that no slot has reached are not mapped."""
    noise = np.random.default_rng(seed)
    S = max(slot for slot, _, _ in counts) + 1
    pages = S * blocks + 3
    table = noise.permutation(pages)[: S * blocks].reshape(S, blocks)
    for slot, first, count in counts:
        table[slot, (first + count - 1) // page + 1 :] = pages + slot
    where = [(slot, first + at) for slot, first, count in counts for at in range(count)] + [(S - 1, 0)] * dead
    slot, position = (jnp.array(column, jnp.int32) for column in zip(*where, strict=True))
    real = jnp.arange(len(where)) < len(where) - dead
    shape = jax.eval_shape(lambda: attention.empty(pages, page, K, H, jnp.bfloat16)).pages.shape
    cache = attention.Cache(jnp.asarray(noise.normal(size=shape), jnp.bfloat16))
    rows = attention.Rows(slot, position, real, jnp.asarray(table, jnp.int32))
    return jnp.asarray(noise.normal(size=(len(where), K * G, H)), jnp.bfloat16), cache, rows


def interpreted(run=attention_tpu.attention, **how):
    """Returns the kernel, compiled for the CPU: (q, cache, rows) -> numpy."""
    made = jax.jit(lambda q, cache, rows: run(q, cache.pages, rows, interpret=True, **HOW | how))
    return lambda q, cache, rows: np.asarray(made(q, cache, rows).astype(jnp.float32))


def compare(got, q, cache, rows, how) -> None:
    """Fails where results are further from the reference's than rounding to bfloat16 explains."""
    exact = attention.reference(
        q.astype(jnp.float32), attention.Cache(cache.pages.astype(jnp.float32)), rows, **HOW | how
    )
    # q * scale, the weights and the result are rounded to bfloat16, 2^-9 each; values are of size 1 to 4
    np.testing.assert_allclose(got, np.asarray(exact), atol=0.03, rtol=0.02)
    near = np.asarray(attention.reference(q, cache, rows, **HOW | how), np.float32)
    np.testing.assert_allclose(got, near, atol=0.02, rtol=0.01)
    assert not got[~np.asarray(rows.real)].any()


def equal_to_the_reference(given, **how):
    compare(interpreted(**how)(*given), *given, how)


CASES = {
    "ragged": (dict(), dict()),
    "heads of 64, window and cap": (dict(K=2, H=64), dict(window=20, soft_cap=2.0)),
    "heads of 256, long window": (dict(H=256, G=7, page=64, blocks=5, dead=0), dict(window=200)),
    "heads of 512, window and cap": (
        dict(K=2, H=512, G=4, counts=((0, 130, 1), (1, 250, 9))),
        dict(window=20, soft_cap=2.0),
    ),
    "tiles of four rows": (dict(K=2, G=16, page=256, blocks=3), dict()),
    "single heads of 64": (dict(K=4, G=1, H=64, page=8, blocks=40), dict(soft_cap=5.0)),
    "one tile a row": (dict(G=60, page=128, blocks=4), dict(window=7)),
    "first positions": (dict(counts=((0, 0, 1), (1, 255, 1), (2, 256, 1)), page=32, blocks=9), dict()),
    "heads of 64 and one wide group": (dict(K=2, G=8, H=64, counts=((0, 511, 17),), page=128, blocks=6), dict()),
}


@pytest.mark.parametrize("name", [*list(CASES)[:2], *(pytest.param(name, marks=ALSO) for name in list(CASES)[2:])])
def test_equals_the_reference(name):
    made, how = CASES[name]
    equal_to_the_reference(case(**made), **how)


@ALSO
@pytest.mark.parametrize("entries", [3 * 18, 1], ids=["three tiles a call", "one tile a call"])
def test_calls_with_parts_of_the_page_table_agree(entries, monkeypatch):
    given = case(counts=((0, 130, 1), (2, 5, 20), (3, 30, 9)))
    whole = interpreted()(*given)
    monkeypatch.setattr(attention_tpu, "TABLE", entries)
    assert interpreted()(*given).tobytes() == whole.tobytes()


@ALSO
@pytest.mark.parametrize("H, tile, pairs", [(128, 64, 512), (64, 16, 512), (128, 64, 100)])
def test_tiles_of_prompts_equal_the_reference(H, tile, pairs, monkeypatch):
    monkeypatch.setattr(attention_tpu, "PROMPT_PAIRS", pairs)
    _, cache, many = case(K=2, H=H, counts=((0, 290, 1), (1, 40, 1)))
    first, count = jnp.array([3 * tile, 0, 0, 2 * tile]), jnp.array([tile, 9, 0, 3])
    rows = prompt_attention.rows_of(first, count, many.table[jnp.array([0, 1, 1, 0])], tile)
    q = jnp.asarray(np.random.default_rng(4).normal(size=(4 * tile, 6, H)), jnp.bfloat16)
    compare(interpreted(attention_tpu.prompt_attention)(q, cache, rows), q, cache, rows, {})


SINKS = jnp.array([-2.0, 0.5, 3.0, 60.0, -60.0, 0.0])  # of six query heads


@pytest.mark.parametrize("H", [64, pytest.param(128, marks=ALSO)])
def test_sinks_join_each_softmax(H):
    given, how = case(K=2, H=H, dead=1), dict(window=20, soft_cap=2.0, sinks=SINKS)
    got = interpreted(**how)(*given)
    compare(got, *given, how)
    with pytest.raises(AssertionError):
        compare(got, *given, how | dict(sinks=None))


@ALSO
def test_sinks_of_tiles_of_prompts():
    _, cache, many = case(K=2, counts=((0, 290, 1), (1, 40, 1)))
    rows = prompt_attention.rows_of(
        jnp.array([192, 0, 0, 128]), jnp.array([64, 9, 0, 3]), many.table[jnp.array([0, 1, 1, 0])], 64
    )
    q = jnp.asarray(np.random.default_rng(4).normal(size=(4 * 64, 6, 128)), jnp.bfloat16)
    how = dict(sinks=SINKS)
    compare(interpreted(attention_tpu.prompt_attention, **how)(q, cache, rows), q, cache, rows, how)


# ---- bits


def company_changes_no_bit(**how):
    """Every row alone, with other neighbours and at another place of a tile gives the bits that it has in company.

    The bits are those of float32: rounding to bfloat16 would hide most faults."""
    q, cache, rows = case(counts=DRAFTS)
    run, R = interpreted(attention_tpu.unrounded, pairs=attention_tpu.PAIRS, **how), q.shape[0]
    base = run(q, cache, rows)
    for row in range(9):
        alone = run(q, cache, rows._replace(real=jnp.arange(R) == row))
        assert base[row].tobytes() == alone[row].tobytes(), f"row {row} alone"
    for row in (2, 4):
        others = run(jnp.where((jnp.arange(R) == row)[:, None, None], q, 30.0 * q[::-1]), cache, rows)
        assert base[row].tobytes() == others[row].tobytes(), f"row {row} beside others"
    turned = jnp.concatenate([jnp.arange(3, R), jnp.arange(3)])  # the slot's rows 3 to 8 begin a tile
    moved = attention.Rows(rows.slot[turned], rows.position[turned], rows.real[turned], rows.table)
    assert base[3:9].tobytes() == run(q[turned], cache, moved)[:6].tobytes()


ALSO_BITS = [pytest.param(how, marks=ALSO) for how in (dict(window=100, soft_cap=3.0), dict(sinks=SINKS[:3]))]


@pytest.mark.parametrize("how", [dict(), *ALSO_BITS], ids=["plain", "window and cap", "sinks"])
def test_other_rows_of_a_tile_change_no_bit(how):
    company_changes_no_bit(**how)


def stale_entries_change_no_bit():
    q, cache, rows = case(counts=DRAFTS)
    run = interpreted(window=100)
    base = run(q, cache, rows)
    page = int(rows.table[1, 2])  # slot 1 ends at position 42
    seen = jnp.unique(jnp.concatenate([rows.table[0, 9:17], rows.table[1, :3]]))
    ruined = cache.pages.at[page, 11:, 0::2].set(jnp.nan).at[page, 11:, 1::2].set(jnp.inf)
    kept = jnp.zeros(ruined.shape[0], bool).at[seen].set(True)
    ruined = jnp.where(kept[:, None, None, None], ruined, jnp.nan)
    assert np.isfinite(base).all() and base.tobytes() == run(q, attention.Cache(ruined), rows).tobytes()


def test_stale_entries_may_be_infinite():
    stale_entries_change_no_bit()


@ALSO
@pytest.mark.parametrize("counts", [((0, 30, 2), (1, 300, 1)), ((0, 250, 12),)], ids=["two slots", "two turns"])
def test_no_copy_is_read_before_it_is_there(counts, monkeypatch):
    """The interpreter that finds races knows no strided load of words, so this test packs them itself."""

    def words(near, place, pair):
        _, parts, positions, lines, lanes = near.shape
        both = (pltpu.bitcast(near[place, part].reshape(-1, lanes), jnp.uint32) for part in range(parts))
        return jnp.concatenate([x.reshape(positions, lines // 2, lanes)[:, pair] for x in both], axis=1)

    monkeypatch.setattr(attention_tpu, "_words", words)
    given = case(counts=counts, page=64, blocks=6, dead=1)
    found = attention_tpu.attention(
        given[0], given[1].pages, given[2], interpret=pltpu.InterpretParams(detect_races=True), **HOW
    )
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found
    compare(np.asarray(found, np.float32), *given, {})
    pltpu.reset_tpu_interpret_mode_state()


# ---- planted faults: each must fail one of the checks above


def normalised_in_every_turn(patch):
    """Divides by the mass after each turn, as jax's ragged paged attention does.

    It multiplies by the reciprocal, as a TPU divides: (mass * x) / mass is x where the division is exact to a bit."""
    attend, finish = attention_tpu._attend, attention_tpu._finish

    def mass(s, refs, head):
        found = attention_tpu._across(refs.mass[head], s.L)
        return jnp.where(found > 0, found, 1.0)

    def normalised(s, refs, tile, head, *rest):
        refs.mixed[head] = refs.mixed[head] * mass(s, refs, head)
        attend(s, refs, tile, head, *rest)
        refs.mixed[head] = refs.mixed[head] * (1.0 / mass(s, refs, head))

    def done(s, refs):
        refs.mass[...] = jnp.ones(refs.mass.shape, jnp.float32)
        finish(s, refs)

    patch.setattr(attention_tpu, "_attend", normalised)
    patch.setattr(attention_tpu, "_finish", done)


def one_peak_for_the_tile(patch):
    real = attention_tpu._softened

    def softened(peak, scores, seen):
        return real(jnp.full_like(peak, jnp.max(jnp.where(seen, scores, attention_tpu.BIG_NEGATIVE))), scores, seen)

    patch.setattr(attention_tpu, "_softened", softened)


def mask_off_by_one(patch):
    real = attention_tpu._seen
    patch.setattr(attention_tpu, "_seen", lambda s, base: real(s, base - 1))


def page_of_another_turn(patch):
    real = attention_tpu._words
    patch.setattr(attention_tpu, "_words", lambda near, place, pair: real(near, (place + 1) % near.shape[0], pair))


def key_and_value_swapped(patch):
    real = attention_tpu._words
    patch.setattr(attention_tpu, "_words", lambda *given: real(*given) << 16 | real(*given) >> 16)


def infinite_entries_kept(patch):
    patch.setattr(attention_tpu, "_fresh", lambda s, turn, low, end: jnp.ones((attention_tpu.BLOCK, s.L), bool))


def results_of_the_next_rows(patch):
    real = attention_tpu._tile

    def tile(refs, number):
        found = real(refs, number)
        return found._replace(position=found.position + (number == 1))

    patch.setattr(attention_tpu, "_tile", tile)


FAULTS = {  # fault -> the check that catches it
    normalised_in_every_turn: company_changes_no_bit,
    one_peak_for_the_tile: company_changes_no_bit,
    mask_off_by_one: lambda: equal_to_the_reference(case()),
    page_of_another_turn: lambda: equal_to_the_reference(case()),
    key_and_value_swapped: lambda: equal_to_the_reference(case()),
    results_of_the_next_rows: lambda: equal_to_the_reference(case()),
    infinite_entries_kept: stale_entries_change_no_bit,
}


@ALSO
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        FAULTS[fault]()


# ---- what is lowered and chosen


@pytest.mark.parametrize("shape", [dict(), dict(K=2, H=64), dict(K=2, H=512, page=8, blocks=40)], ids=str)
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
def test_it_is_lowered_for_tpu(shape, sinks):
    q, cache, rows = case(**shape)
    own = None if sinks is None else sinks[: q.shape[1]]
    run = jax.jit(functools.partial(attention.attention, sinks=own, **HOW))
    chip = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    one = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=chip)
    with jax.sharding.use_abstract_mesh(one):
        text = run.trace(q, cache, rows).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text and "paged_rows_by_" in text
    assert attention.serving(q, cache)["tpu"] == attention_tpu.attention


@pytest.mark.parametrize(
    "shape, served",
    [
        ((28, 4, 128, 64), True),
        ((7, 1, 128, 8), True),
        ((14, 2, 64, 64), True),
        ((32, 8, 64, 16), True),
        ((16, 8, 256, 256), True),
        ((32, 4, 512, 64), True),
        ((7, 1, 64, 64), False),  # one row a position, and words hold two
        ((28, 4, 96, 64), False),
        ((28, 4, 128, 24), False),
        ((28, 4, 128, 512), False),
        ((24, 3, 128, 64), False),
    ],
)
def test_the_shapes_choose(shape, served):
    heads, kv_heads, head_dim, page = shape
    assert attention_tpu.serves(jnp.bfloat16, jnp.bfloat16, heads, kv_heads, head_dim, page) == served
    assert not attention_tpu.serves(jnp.float32, jnp.float32, heads, kv_heads, head_dim, page)
