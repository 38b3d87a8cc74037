"""Attention of texts that share beginnings: against dense attention whose mask follows each token's own way to the root."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.kernels import branches_tpu, flash_gpu
from jaxrl_post.kernels.branches import of_rows, visits
from jaxrl_post.trainer import attention

pytestmark = pytest.mark.usefixtures("quick_compilation")
EXACT, SINGLE, SEEN = 1e-12, 5e-6, 1e-2
B, N, K, H = 2, 4, 2, 8
GPU = functools.partial(flash_gpu.attention, tiles=flash_gpu.square(16), interpret=True)
TILED = flash_gpu.Tiles(flash_gpu.Tile(16, 8), flash_gpu.Tile(8, 32), flash_gpu.Tile(32, 16))
UNEVEN = functools.partial(flash_gpu.attention, tiles=TILED, interpret=True)
TPU = functools.partial(branches_tpu.attention, own=32, other=16, interpret=True)
BROAD = functools.partial(branches_tpu.attention, own=16, other=64, interpret=True)
CASES = [dict(window=None, soft_cap=None), dict(window=9, soft_cap=2.0)]
SINKS = (-2.0, 0.5, 3.0, -40.0)


def rows(T, seed=0):
    """Rows of several trees each, some of them a text alone, and the token before each token in its text, -1 for none."""
    rng = np.random.default_rng(seed)
    until, positions, before = (np.zeros((B, T), np.int32) for _ in range(3))

    def grow(b, begin, end, parent, depth):
        """A stretch from `begin` on and, behind it, what continues it up to `end`."""
        own = end if depth == 3 else min(int(rng.integers(begin + 1, end + 1)), begin + 1 + (end - begin) // 2)
        for t in range(begin, own):
            before[b, t] = parent if t == begin else t - 1
            positions[b, t] = 0 if before[b, t] < 0 else positions[b, before[b, t]] + 1
            until[b, t] = end
        last = own - 1
        while own < end:
            upto = int(rng.integers(own + 1, end + 1))
            grow(b, own, upto, last, depth + 1)
            own = upto

    for b in range(B):
        at = 0
        while at < T:
            upto = min(at + int(rng.integers(1, T)), T)
            grow(b, at, upto, -1, 0)
            at = upto
    return of_rows(jnp.asarray(until), jnp.asarray(positions)), before


def way(before, window):
    """bool[B, T, T]: which keys are on the query's own way to the root, at most `window` of them with itself."""
    seen = np.zeros((*before.shape, before.shape[1]), bool)
    for b, t in np.ndindex(before.shape):
        at, left = t, before.shape[1] if window is None else window
        while at >= 0 and left:
            seen[b, t, at], at, left = True, before[b, at], left - 1
    return seen


def dense(q, k, v, sinks, seen, scale, soft_cap):
    scores = scale * jnp.einsum("btkgh,bskh->bkgts", q.reshape(*q.shape[:2], K, N // K, H), k)
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    own = jnp.broadcast_to(sinks.reshape(1, K, N // K, 1, 1), (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, own], -1), axis=-1)[..., :-1]
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)


def results(run, T, dtype=np.float64):
    """The output and the gradients by q, k, v and the sinks."""
    rng = np.random.default_rng(3)
    with jax.enable_x64(dtype == np.float64):
        q, k, v, slope = (jnp.asarray(rng.normal(size=(B, T, heads, H)), dtype) for heads in (N, K, K, N))
        out, back = jax.vjp(jax.jit(run), q, k, v, jnp.asarray(SINKS, dtype))
        return [np.asarray(x) for x in (out, *back(slope))]


def compared(form, T, how, seed=0, dtype=np.float64, branches=None):
    texts, before = rows(T, seed)
    found = results(lambda q, k, v, s: form(q, k, v, branches or texts, s, scale=0.4, **how), T, dtype)
    seen = jnp.asarray(way(before, how["window"]))
    expected = results(lambda q, k, v, s: dense(q, k, v, s, seen, 0.4, how["soft_cap"]), T, dtype)
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("how", CASES, ids=str)
@pytest.mark.parametrize("form", [GPU, attention.blocks], ids=["gpu", "blocks"])
def test_values_and_gradients(form, how):
    assert compared(form, 64, how) <= EXACT


@pytest.mark.parametrize("how", CASES, ids=str)
def test_the_kernel_of_tpus(how):
    assert compared(TPU, 64, how, dtype=np.float32) <= SINGLE


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("how", CASES, ids=str)
@pytest.mark.parametrize("form", [UNEVEN, TPU, BROAD], ids=["gpu", "tpu", "broad"])
def test_blocks_whose_sides_differ(form, how, seed):
    dtype, bound = (np.float64, EXACT) if form is UNEVEN else (np.float32, SINGLE)
    assert compared(form, 128, how, seed, dtype) <= bound


def test_the_loop_of_long_rows(monkeypatch):
    monkeypatch.setattr(attention, "WRITTEN_OUT", 16)
    monkeypatch.setattr(attention, "LOOPED", 24)  # the last block is filled up
    assert compared(attention.blocks, 64, CASES[1]) <= EXACT


@pytest.mark.parametrize("form", [GPU, TPU, attention.blocks], ids=["gpu", "tpu", "blocks"])
def test_a_branch_that_sees_the_one_before_it_is_found(form):
    texts, _ = rows(64)
    wrong = texts._replace(until=jnp.maximum(texts.until, jnp.roll(texts.until, -1, axis=1)))
    dtype = np.float32 if form is TPU else np.float64
    assert compared(form, 64, CASES[0], dtype=dtype, branches=wrong) >= SEEN


@pytest.mark.parametrize("window", [None, 9])
def test_blocks_that_meet_are_those_that_see_each_other(window):
    """Every pair that sees each other is met by both sides. Without a window no other block is."""
    texts, before = rows(128, 1)
    seen = way(before, window).reshape(B, 8, 16, 16, 8).any(axis=(2, 4))
    for side, expected in zip(visits(texts, 16, 8, window), (seen, seen.swapaxes(1, 2)), strict=True):
        met = np.zeros(expected.shape, bool)
        for b, own in np.ndindex(expected.shape[:2]):
            count = int(side.counts[b, own])
            numbers = np.asarray(side.numbers[b, own])
            assert (np.diff(numbers[:count]) > 0).all() and (numbers[count:] == numbers[count - 1]).all()
            met[b, own, numbers[:count]] = True
        assert met[expected].all() and (window is not None or not met[~expected].any())
