"""Paged attention against a plain softmax over each row's own text."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.kernels import attention

pytestmark = pytest.mark.usefixtures("quick_compilation")

R, S, N, K, H, PAGE, PAGES, BLOCKS = 9, 4, 6, 2, 8, 4, 20, 5


def _case(seed=0):
    noise = np.random.default_rng(seed)
    table = noise.permutation(PAGES)[: S * BLOCKS].reshape(S, BLOCKS).astype(np.int32)
    slot = np.array([0, 0, 0, 1, 2, 2, 3, 3, 3], np.int32)
    position = np.array([0, 1, 2, 16, 6, 7, 9, 10, 11], np.int32)
    real = np.array([1, 1, 1, 1, 1, 1, 1, 1, 0], bool)
    keys = noise.normal(size=(S, BLOCKS * PAGE, K, H)).astype(np.float32)
    values = noise.normal(size=(S, BLOCKS * PAGE, K, H)).astype(np.float32)
    cache = attention.Cache(jnp.asarray(noise.normal(size=(PAGES, PAGE, 2 * K, H)), jnp.float32) * 50)
    for s in range(S):
        reach = position[slot == s].max() + 1
        rows = attention.Rows(jnp.full(reach, s), jnp.arange(reach), jnp.ones(reach, bool), jnp.asarray(table))
        cache = attention.write(cache, jnp.asarray(keys[s, :reach]), jnp.asarray(values[s, :reach]), rows)
    rows = attention.Rows(*map(jnp.asarray, (slot, position, real, table)))
    q = noise.normal(size=(R, N, H)).astype(np.float32)
    return q, cache, rows, keys, values


def _plain(q, keys, values, slot, position, scale, window, cap, sinks=None):
    out = np.zeros(q.shape)
    for r in range(R):
        low = 0 if window is None else max(0, position[r] - window + 1)
        for n in range(N):
            k = keys[slot[r], low : position[r] + 1, n // (N // K)].astype(np.float64)
            v = values[slot[r], low : position[r] + 1, n // (N // K)]
            s = k @ q[r, n] * scale
            s = cap * np.tanh(s / cap) if cap else s
            s = s if sinks is None else np.append(s, sinks[n])
            w = np.exp(s - s.max())
            out[r, n] = w[: len(v)] @ v / w.sum()
    return out


@pytest.mark.parametrize("window,cap", [(None, None), (3, None), (None, 2.0), (5, 1.5)])
def test_equals_plain_softmax(window, cap):
    q, cache, rows, keys, values = _case()
    got = np.asarray(attention.attention(jnp.asarray(q), cache, rows, scale=0.3, window=window, soft_cap=cap))
    want = _plain(q, keys, values, rows.slot, rows.position, 0.3, window, cap)
    np.testing.assert_allclose(got[:-1], want[:-1], atol=2e-6)
    assert not got[-1].any(), "a row that is not real attends to nothing"


SINKS = np.array([-2.0, 0.5, 3.0, 60.0, -60.0, 0.0], np.float32)


@pytest.mark.parametrize("window, cap", [(None, None), (3, 2.0)])
def test_sinks_join_each_softmax(window, cap):
    q, cache, rows, keys, values = _case()
    how = dict(scale=0.3, window=window, soft_cap=cap)
    got = np.asarray(attention.attention(jnp.asarray(q), cache, rows, jnp.asarray(SINKS), **how))
    want = _plain(q, keys, values, rows.slot, rows.position, 0.3, window, cap, SINKS.astype(np.float64))
    np.testing.assert_allclose(got[:-1], want[:-1], atol=2e-6)
    assert not got[-1].any(), "a row that is not real attends to nothing"
    alone = attention.attention(
        jnp.asarray(q), cache, rows._replace(real=rows.real & (rows.slot != 1)), jnp.asarray(SINKS), **how
    )
    assert np.delete(got, 3, axis=0).tobytes() == np.delete(np.asarray(alone), 3, axis=0).tobytes()


def test_stale_pages_longer_company_and_page_ids_change_no_bit():
    q, cache, rows, *_ = _case()
    how = dict(scale=0.3, window=None, soft_cap=None)
    base = np.asarray(attention.attention(jnp.asarray(q), cache, rows, **how))
    alone = rows._replace(real=rows.real & (rows.slot != 1))
    short = np.asarray(attention.attention(jnp.asarray(q), cache, alone, **how))
    keep = np.asarray(alone.real)
    assert base[keep].tobytes() == short[keep].tobytes()
    turn = np.random.default_rng(3).permutation(PAGES)
    moved = attention.Cache(cache.pages[np.argsort(turn)])
    again = attention.attention(jnp.asarray(q), moved, rows._replace(table=jnp.asarray(turn)[rows.table]), **how)
    assert base.tobytes() == np.asarray(again).tobytes()


def test_write_drops_unreal_rows_and_copy_drops_pages_out_of_range():
    _, cache, rows, *_ = _case()
    new = jnp.ones((R, K, H))
    written = attention.write(cache, new, new, rows._replace(real=jnp.zeros(R, bool)))
    assert np.array_equal(written.pages, cache.pages)
    copied = attention.copy(cache, jnp.array([3, 4]), jnp.array([7, PAGES]))
    assert np.array_equal(copied.pages[7], cache.pages[3]) and np.array_equal(copied.pages[:7], cache.pages[:7])


def test_heads_of_64_share_a_row_and_mean_the_same():
    rows, noise = _case()[2], np.random.default_rng(7)
    q, k, v = (jnp.asarray(noise.normal(size=(R, heads, 64)), jnp.float32) for heads in (N, K, K))
    shared, apart = attention.empty(PAGES, PAGE, K, 64, jnp.float32), jnp.zeros((PAGES, PAGE, 2 * K, 64))
    assert shared.pages.shape == (PAGES, PAGE, K, 128)
    shared, apart = (attention.write(one, k, v, rows) for one in (shared, attention.Cache(apart)))
    row = int(np.flatnonzero(np.asarray(rows.real))[0])
    page, offset = int(rows.table[rows.slot[row], rows.position[row] // PAGE]), int(rows.position[row]) % PAGE
    assert np.array_equal(shared.pages[page, offset], np.concatenate([k[row], v[row]], axis=1))
    how = dict(scale=0.1, window=None, soft_cap=None)
    found = (np.asarray(attention.attention(q, one, rows, **how)) for one in (shared, apart))
    assert next(found).tobytes() == next(found).tobytes()


def test_stale_values_may_be_infinite():
    q, cache, rows, *_ = _case()
    how = dict(scale=0.3, window=None, soft_cap=None)
    base = np.asarray(attention.attention(jnp.asarray(q), cache, rows, **how))
    page, offset = int(rows.table[0, 0]), 3  # behind the last position of slot 0, in its own page
    ruined = attention.Cache(cache.pages.at[page, offset, 0::2].set(jnp.nan).at[page, offset, 1::2].set(jnp.inf))
    again = np.asarray(attention.attention(jnp.asarray(q), ruined, rows, **how))
    assert base.tobytes() == again.tobytes()


def test_positions_of_a_turn_are_the_same_whatever_the_page(monkeypatch):
    """Several pages a turn, also where the table does not hold whole turns, and one page that is as long as a turn."""
    monkeypatch.setattr(attention, "TURN", 8)
    q, cache, rows, *_ = _case()
    two = attention.Cache(jnp.zeros((S * 3, 8, 2 * K, H)))  # 20 positions of a slot are three pages of eight
    table, wide = np.asarray(rows.table), np.zeros((S, 24, 2 * K, H), np.float32)
    wide[:, : BLOCKS * PAGE] = np.asarray(cache.pages)[table].reshape(S, BLOCKS * PAGE, 2 * K, H)
    two = attention.Cache(jnp.asarray(wide.reshape(two.pages.shape)))
    how = dict(scale=0.3, window=5, soft_cap=1.5)
    got = attention.attention(jnp.asarray(q), cache, rows, **how)
    want = attention.attention(jnp.asarray(q), two, rows._replace(table=jnp.arange(S * 3).reshape(S, 3)), **how)
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
