"""Kernels of packed rows, run without their devices: against dense attention over whole rows, in values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_attend import dense

from jaxrl_post.kernels import flash, flash_gpu, flash_hopper, flash_tpu, warpgroups
from jaxrl_post.kernels.pallas_gpu import RECENT, plgpu
from jaxrl_post.trainer import attention

pytestmark = pytest.mark.usefixtures("quick_compilation")
EXACT, SINGLE, SEEN = 1e-12, 5e-6, 1e-2
GPU = functools.partial(flash_gpu.attention, tiles=flash_gpu.square(16), interpret=True)
WIDE = functools.partial(flash_gpu.attention, interpret=True)
TPU = functools.partial(flash_tpu.attention, interpret=True)
_TILES = [flash_hopper.Tile(*size) for size in ((16, 16, 2), (16, 16, 3), (16, 32, 2))]
HOPPER = functools.partial(
    flash_hopper.attention,
    tiles=flash_hopper.Tiles(*_TILES),
    interpret=plgpu.InterpretGPUParams(detect_races=True) if RECENT else None,
)
TOKENS = {GPU: 64, TPU: 256, HOPPER: 32}
interpreted = pytest.mark.skipif(not RECENT, reason="the interpreter of jax 0.10 knows no transposed operand of wgmma")
CASES = [dict(window=None, soft_cap=None), dict(window=21, soft_cap=None), dict(window=None, soft_cap=1.5)]
CASES += [dict(window=17, soft_cap=2.0)]
BOTH = dict(window=17, soft_cap=2.0)
NEAR = dict(window=5, soft_cap=None)
SINKS = (-2.0, 0.5, 3.0, -40.0)  # of the query heads


@pytest.fixture
def no_races():
    """Fails a test of the Mosaic GPU interpreter in which a thread reads what another one may be writing."""
    yield
    if RECENT:
        from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

        found = gpu_callbacks.get_races()
        assert found is None or not found.races_found


def case(T, dtype=np.float32, N=4, K=2, H=8):
    """Rows whose segments begin and end inside blocks; the first row ends with padding."""
    rng = np.random.default_rng(3)
    parts = [rng.normal(size=(2, T, heads, H)).astype(dtype) for heads in (N, K, K, N)]
    ends = np.array([[T // 7, T // 2 + 1, T // 2 + 2, T - T // 5], [T // 2, T, T, T]])
    ids = 1 + (np.arange(T)[None, :, None] >= ends[:, None, :]).sum(-1)
    return [jnp.asarray(x) for x in parts], jnp.asarray(np.where(ids == 5, 0, ids), jnp.int32)


def results(form, T, dtype=np.float32, H=8, **how):
    """The output and the gradients by q, k and v."""
    with jax.enable_x64(dtype == np.float64):
        (*given, slope), ids = case(T, dtype, H=H)
        run = functools.partial(form, scale=0.4, **how)

        def both(q, k, v):
            out, back = jax.vjp(lambda *x: run(*x, ids), q, k, v)
            return out, *back(slope)

        return [np.asarray(x) for x in jax.jit(both)(*given)]


@pytest.mark.parametrize("form, T, H", [(WIDE, 128, 256), (WIDE, 64, 512), (TPU, 128, 512)], ids=["gpu", "gpu", "tpu"])
def test_wide_heads(form, T, H):
    """With the tiles of a run, where they differ by head size."""
    dtype, bound = (np.float64, EXACT) if form is WIDE else (np.float32, SINGLE)
    how = dict(H=H, window=50, soft_cap=2.0)
    assert far(results(form, T, dtype, **how), results(reference, T, dtype, **how)) <= bound


def sink_results(form, T, dtype=np.float32, **how):
    """The output and the gradients by q, k, v and the sinks."""
    with jax.enable_x64(dtype == np.float64):
        (*given, slope), ids = case(T, dtype)
        run = functools.partial(form, scale=0.4, **how)

        def both(*given):
            out, back = jax.vjp(lambda q, k, v, sinks: run(q, k, v, ids, sinks=sinks), *given)
            return out, *back(slope)

        return [np.asarray(x) for x in jax.jit(both)(*given, jnp.array(SINKS, dtype))]


def reference(q, k, v, ids, **how):
    positions = jnp.broadcast_to(jnp.arange(q.shape[1]), ids.shape)
    return dense(positions, ids)(0, q, k, v, None, **how)[0]


def far(found, expected):
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, expected, strict=True))


def test_the_gpu_kernel():
    assert far(results(GPU, 48, **BOTH), results(reference, 48, **BOTH)) <= SINGLE


@pytest.mark.parametrize("how", [BOTH, pytest.param(CASES[0], marks=pytest.mark.extended)], ids=str)
@pytest.mark.parametrize("form", [GPU, attention.blocks], ids=["gpu", "blocks"])
def test_sinks_and_their_gradient(form, how):
    found, expected = (sink_results(one, 64, np.float64, **how) for one in (form, reference))
    assert far(found, expected) <= EXACT
    assert far(found[:4], results(reference, 64, np.float64, **how)) >= SEEN


@pytest.mark.extended
@pytest.mark.parametrize("how", [CASES[0], BOTH], ids=str)
def test_sinks_on_tpus(how):
    assert far(sink_results(TPU, 256, **how), sink_results(reference, 256, **how)) <= SINGLE


@pytest.mark.extended
@pytest.mark.parametrize("form", [GPU, TPU], ids=["gpu", "tpu"])
def test_the_gradient_of_a_sink_is_float32_beside_halves(form):
    (*given, slope), ids = case(256, jnp.bfloat16)
    sinks = jnp.array(SINKS, jnp.float32)
    found, expected = (
        jax.jit(jax.grad(lambda x, run=run: jnp.vdot(run(*given, ids, sinks=x, scale=0.4, **BOTH), slope)))(sinks)
        for run in (form, reference)
    )
    assert found.dtype == jnp.float32 and far([found], [expected]) <= 0.02


@pytest.mark.extended
@pytest.mark.parametrize("how", [CASES[0], BOTH], ids=str)
@pytest.mark.parametrize("sizes", [((16, 8), (8, 32), (32, 16)), ((8, 32), (32, 8), (16, 32))], ids=str)
def test_tiles_whose_sides_differ(sizes, how):
    tiles = flash_gpu.Tiles(*(flash_gpu.Tile(*size) for size in sizes))
    form = functools.partial(flash_gpu.attention, tiles=tiles, interpret=True)
    assert far(results(form, 64, **how), results(reference, 64, **how)) <= SINGLE


@pytest.mark.extended
@pytest.mark.parametrize("how", CASES, ids=str)
@pytest.mark.parametrize("form", [GPU, TPU], ids=["gpu", "tpu"])
def test_values_and_gradients(form, how):
    T = TOKENS[form]
    assert far(results(form, T, **how), results(reference, T, **how)) <= SINGLE


@interpreted
def test_the_hopper_kernel(no_races):
    """With sinks, a window and a cap, over several tiles, and segments that begin and end inside of every kind of block."""
    assert far(sink_results(HOPPER, 64, **BOTH), sink_results(reference, 64, **BOTH)) <= SINGLE


@interpreted
@pytest.mark.extended
@pytest.mark.parametrize("how", [CASES[0], NEAR], ids=str)
def test_the_hopper_kernel_in_one_tile(how, no_races):
    assert far(results(HOPPER, 32, **how), results(reference, 32, **how)) <= SINGLE


@interpreted
@pytest.mark.extended
def test_scores_of_any_size_on_hopper(monkeypatch, no_races):
    """In float32, where scores of hundreds are off by their last bits. A query's first blocks may hold no key that it sees."""
    right = case
    monkeypatch.setitem(globals(), "case", lambda *given, **sizes: _enlarged(*right(*given, **sizes)))
    assert far(results(HOPPER, 32, **CASES[0]), results(reference, 32, **CASES[0])) <= 1e-3


@pytest.mark.extended
@pytest.mark.parametrize("how", CASES, ids=str)
def test_the_gpu_kernel_in_x64(how):
    assert far(results(GPU, 64, np.float64, **how), results(reference, 64, np.float64, **how)) <= EXACT


def test_scores_of_any_size(monkeypatch):
    """A query's first blocks may hold no key that it sees, and what it sees may have scores far below 0."""
    right = case
    monkeypatch.setitem(globals(), "case", lambda *given, **sizes: _enlarged(*right(*given, **sizes)))
    for how in (dict(window=None, soft_cap=None), dict(window=17, soft_cap=None), dict(window=17, soft_cap=300.0)):
        assert far(results(GPU, 64, np.float64, **how), results(reference, 64, np.float64, **how)) <= 1e-10


def _enlarged(given, ids):
    q, k, *others = given
    return [30 * q, 30 * k, *others], ids


@pytest.mark.extended
@pytest.mark.parametrize("how", CASES, ids=str)
def test_the_loop_of_long_rows(monkeypatch, how):
    monkeypatch.setattr(attention, "WRITTEN_OUT", 16)
    monkeypatch.setattr(attention, "LOOPED", 24)  # the last block is filled up
    assert far(results(attention.blocks, 64, np.float64, **how), results(reference, 64, np.float64, **how)) <= EXACT


@pytest.mark.parametrize("form", [GPU, HOPPER], ids=["gpu", "hopper"])
@pytest.mark.parametrize("scale", [0.0, -0.1])
def test_a_scale_of_0_or_below_is_refused(scale, form):
    (q, k, v, _), ids = case(16)
    with pytest.raises(ValueError, match=f"scale={scale} must be above 0"):
        form(q, k, v, ids, scale=scale, window=None, soft_cap=None)


def test_stretches_by_hand():
    ids = jnp.array([[1, 1, 1, 2, 2, 0, 0, 0]])
    first, last = flash_gpu.stretches(ids, None)
    np.testing.assert_array_equal(first, [[0, 0, 0, 3, 3, 5, 5, 5]])
    np.testing.assert_array_equal(last, [[2, 2, 2, 4, 4, 7, 7, 7]])
    first, last = flash_gpu.stretches(ids, 2)
    np.testing.assert_array_equal(first, [[0, 0, 1, 3, 3, 5, 5, 6]])
    np.testing.assert_array_equal(last, [[1, 2, 2, 4, 4, 6, 7, 7]])


@pytest.mark.parametrize("window", [None, 21])
def test_hopper_groups_multiply_the_blocks_that_hold_a_seen_pair(window):
    """And the ring holds what either group multiplies. Tiles as in a run, smaller."""
    ids, tile = np.repeat([1, 2, 3, 4, 0], [50, 7, 61, 33, 41])[None], flash_hopper.Tile(8, 16, 2)
    first, last = (np.asarray(x) for x in flash.stretches(jnp.asarray(ids), window))
    at = np.arange(ids.shape[1])
    seen = (at[None] >= first[0][:, None]) & (at[None] <= at[:, None])
    for walk, pairs, ends in ((warpgroups.over_keys, seen, first), (warpgroups.over_queries, seen.T, last)):
        met = pairs.reshape(len(at) // tile.own, tile.own, -1, tile.walked).any(axis=(1, 3))
        for base in range(0, len(at), 2 * tile.own):
            walks = [walk(tile, ends, 0, base, base + group * tile.own) for group in (0, 1)]
            for group, one in enumerate(walks):
                np.testing.assert_array_equal(
                    np.flatnonzero(met[base // tile.own + group]), np.arange(one.first, one.last)
                )
            held = range(min(one.first for one in walks), max(one.last for one in walks))
            assert all((one.begin, one.end) == (held.start, held.stop) for one in walks)


@pytest.mark.parametrize(
    "kernel, shape, served",
    [
        (flash_gpu, ("bfloat16", 28, 4, 128, 4096), True),
        (flash_gpu, ("float32", 28, 4, 128, 4096), False),
        (flash_gpu, ("bfloat16", 32, 4, 512, 4096), True),
        (flash_gpu, ("bfloat16", 28, 4, 192, 4096), False),
        (flash_gpu, ("bfloat16", 28, 4, 128, 4100), False),
        (flash_hopper, ("bfloat16", 28, 4, 128, 4096), RECENT),
        (flash_hopper, ("float16", 14, 2, 64, 128), RECENT),
        (flash_hopper, ("float32", 28, 4, 128, 4096), False),
        (flash_hopper, ("bfloat16", 28, 4, 256, 4096), False),
        (flash_hopper, ("bfloat16", 28, 4, 128, 4160), False),
        (flash_hopper, ("bfloat16", 28, 3, 128, 4096), False),
        (flash_tpu, ("bfloat16", 14, 2, 64, 4096), True),
        (flash_tpu, ("float32", 8, 4, 256, 1024), True),
        (flash_tpu, ("bfloat16", 32, 4, 512, 4096), True),
        (flash_tpu, ("bfloat16", 8, 4, 128, 192), False),
        (flash_tpu, ("float64", 8, 4, 128, 256), False),
    ],
)
def test_which_shapes_a_kernel_takes(kernel, shape, served):
    dtype, *sizes = shape
    assert kernel.serves(jnp.dtype(dtype), *sizes) is served


# ---- planted faults


def segments_leak(monkeypatch):
    right = flash_gpu.stretches
    monkeypatch.setattr(flash_gpu, "stretches", lambda ids, window: right(jnp.ones_like(ids), window))


def windows_are_one_longer(monkeypatch):
    right = flash_gpu.stretches
    monkeypatch.setattr(flash_gpu, "stretches", lambda ids, window: right(ids, window and window + 1))


def the_cap_has_no_slope(monkeypatch):
    right = flash_gpu._How.scores

    monkeypatch.setattr(flash_gpu._How, "scores", lambda how, product: (right(how, product)[0], 1.0))


def weights_are_powers_of_e(monkeypatch):
    monkeypatch.setattr(flash_gpu._How, "power", lambda how, x: jnp.exp(x))


def unseen_keys_have_a_weight(monkeypatch):
    monkeypatch.setattr(flash_gpu, "UNSEEN", -1.0)


def a_query_sees_the_next_key(monkeypatch):
    right = flash_gpu._seen
    monkeypatch.setattr(flash_gpu, "_seen", lambda own, other, first: right(own + 1, other, first))


def hopper_segments_leak(monkeypatch):
    right = flash.stretches
    monkeypatch.setattr(flash, "stretches", lambda ids, window: right(jnp.ones_like(ids), window))


def hopper_windows_are_one_longer(monkeypatch):
    right = flash.stretches
    monkeypatch.setattr(flash, "stretches", lambda ids, window: right(ids, window + 1))


def hopper_rows_see_one_more(monkeypatch):
    right = warpgroups._inside
    monkeypatch.setattr(warpgroups, "_inside", lambda token, low, high: right(token, low, high + 1))


def tpu_segments_leak(monkeypatch):
    right = flash_tpu.splash_attention.SegmentIds
    monkeypatch.setattr(
        flash_tpu.splash_attention, "SegmentIds", lambda q, kv: right(jnp.ones_like(q), jnp.ones_like(kv))
    )


def tpu_windows_are_one_longer(monkeypatch):
    right = flash_tpu._kernel
    monkeypatch.setattr(flash_tpu, "_kernel", lambda heads, T, window, *more: right(heads, T, window + 1, *more))


FAULTS = [
    segments_leak,
    windows_are_one_longer,
    the_cap_has_no_slope,
    a_query_sees_the_next_key,
    weights_are_powers_of_e,
    unseen_keys_have_a_weight,
]
TPU_FAULTS = [tpu_segments_leak, tpu_windows_are_one_longer]
HOPPER_FAULTS = [hopper_segments_leak, hopper_windows_are_one_longer, hopper_rows_see_one_more]


@pytest.mark.extended
@pytest.mark.parametrize("fault", [*FAULTS, *TPU_FAULTS, *(pytest.param(x, marks=interpreted) for x in HOPPER_FAULTS)])
def test_planted_faults_are_seen(fault, monkeypatch):
    form = TPU if fault in TPU_FAULTS else HOPPER if fault in HOPPER_FAULTS else GPU
    how = NEAR if form is HOPPER else BOTH
    fault(monkeypatch)
    assert far(results(form, TOKENS[form], **how), results(reference, TOKENS[form], **how)) >= SEEN
