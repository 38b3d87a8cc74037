"""verify_sample's kernels against the reference, interpreted with race detection; lowering; a vocabulary in parts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import abstract_chips
import engine_lab as lab
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreted_tpu
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as interpreted_gpu
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from jaxrl_post.engine import row_program
from jaxrl_post.engine.compiled import Programs
from jaxrl_post.engine.host.wire import TABLE, EngineSettings
from jaxrl_post.engine.row_state import RowProgram
from jaxrl_post.kernels import sampling, sampling_gpu, sampling_tpu, thresholds, tiles, verify
from jaxrl_post.kernels.pallas_tpu import pltpu
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes

pytestmark = pytest.mark.usefixtures("quick_compilation")

ON_TPU = functools.partial(sampling_tpu.statistics, interpret=pltpu.InterpretParams(detect_races=True))
ON_GPU = functools.partial(sampling_gpu.statistics, interpret=InterpretGPUParams(detect_races=True))
SHELLS = {"tpu": ON_TPU, "gpu": ON_GPU}
CUSTOM_CALL = {"tpu": "tpu_custom_call", "cuda": "mosaic_gpu_v2"}


def given(rows: int, vocab: int, seed: int = 0) -> tuple:
    """Returns logits, seeds, positions and temperatures. Half of one row's ids are not allowed."""
    noise = np.random.default_rng(seed)
    logits = (noise.normal(size=(rows, vocab)) * 3).astype(np.float32)
    logits[rows // 2, : vocab // 2] = -np.inf
    seeds, at = noise.integers(0, 2**32, (rows, 2), dtype=np.uint32), noise.integers(0, 4000, rows).astype(np.int32)
    heat = np.resize([1.0, 0.6, 0.0, 2.0], rows).astype(np.float32)
    return tuple(map(jnp.asarray, (logits, seeds, at, heat)))


def cut(logits, heat):
    rows = heat.size
    return jax.jit(thresholds.find)(
        logits,
        heat,
        jnp.asarray(np.resize([0, 5, 40], rows).astype(np.int32)),
        jnp.asarray(np.resize([1.0, 0.9], rows).astype(np.float32)),
    )


reference = jax.jit(sampling.sample)


jitted = functools.cache(lambda shell, drawing=tiles.sampled: jax.jit(verify.drawn_by(shell, drawing=drawing)))


def drawn(shell, *args) -> sampling.Drawn:
    return jitted(shell)(*args)


def assert_alike(got: sampling.Drawn, want: sampling.Drawn, close: float = 1e-5) -> None:
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.argmax_tokens, want.argmax_tokens)
    for name in ("logprobs", "entropies", "plain"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=close, rtol=close, err_msg=name)


def no_races() -> bool:
    found = [interpreted_tpu.races, interpreted_gpu._races]
    return any(f is not None for f in found) and not any(f is not None and f.races_found for f in found)


@pytest.fixture(autouse=True)
def clean_interpreters():
    yield
    pltpu.reset_tpu_interpret_mode_state()
    interpreted_gpu.reset_gpu_interpret_mode_state()


@pytest.mark.parametrize("rows, vocab", [(9, 1024), pytest.param(2, 9300, marks=pytest.mark.extended)])
@pytest.mark.parametrize("shell", SHELLS)
def test_agrees_with_the_reference_and_has_no_race(shell, rows, vocab):
    logits, seeds, at, heat = given(rows, vocab)
    for lowest in (jnp.full(rows, -jnp.inf), cut(logits, heat)):
        args = (logits, seeds, at, heat, lowest)
        assert_alike(drawn(SHELLS[shell], *args), reference(*args))
    assert no_races()


@pytest.mark.parametrize("shell", ["gpu", pytest.param("tpu", marks=pytest.mark.extended)])
def test_given_ids_have_their_log_probs_in_one_part_of_the_vocabulary_and_in_two(shell):
    logits, seeds, at, heat = given(9, 2048)
    ids, lowest = jnp.asarray([-1, 3, 2047, 0, 700, -1, 1023, 1024, 1500], jnp.int32), cut(logits, heat)
    want = reference(logits, seeds, at, heat, lowest, ids)
    assert np.isneginf(want.logprobs).any() and np.isfinite(want.logprobs).any()
    scaled = np.where(logits >= lowest[:, None], logits, -np.inf) / np.where(heat == 0, 1, heat)[:, None]
    by_hand = np.array(scaled - jax.nn.logsumexp(scaled, axis=-1, keepdims=True))[np.arange(9), np.maximum(ids, 0)]
    np.testing.assert_allclose(want.logprobs[ids >= 0], by_hand[ids >= 0], atol=1e-5, rtol=1e-5)
    numbers = (seeds, at, heat, lowest)
    halves = []
    for first, half in enumerate((logits[:, :1024], logits[:, 1024:])):
        sampled = tiles.part(half, SHELLS[shell](half, *tiles.row_numbers(heat, lowest)), *numbers, first)
        halves.append(tiles.given_part(sampled, half, ids, heat, lowest, first))
    parts = jax.tree.map(lambda *both: jnp.stack(both), *halves)
    for got in (drawn(SHELLS[shell], logits, *numbers, ids), tiles.drawn(parts, heat)):
        np.testing.assert_array_equal(got.tokens, want.tokens)
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5, rtol=1e-5)


def test_one_kernel_for_each_row_draws_what_the_tile_math_draws():
    """Bit for bit, with thresholds and without, and for given ids. Three tiles are no power of 2."""
    by_row = functools.partial(sampling_gpu.sampled, interpret=True)
    logits, seeds, at, heat = given(9, 2052)
    ids = jnp.asarray([-1, 3, 2047, 0, 700, -1, 1023, 1024, 1500], jnp.int32)
    for lowest, own in ((None, None), (cut(logits, heat), ids)):
        args = (logits, seeds, at, heat, lowest, own)
        for one, two in zip(jitted(ON_GPU, by_row)(*args), jitted(ON_GPU)(*args), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


def test_odd_vocabularies_on_tpu():
    assert sampling_tpu.serves(5, 2053) and not sampling_gpu.serves(5, 2053)
    logits, seeds, at, heat = given(5, 2053)
    assert_alike(drawn(ON_TPU, logits, seeds, at, heat, None), reference(logits, seeds, at, heat))


@pytest.mark.parametrize("shell", SHELLS)
def test_extremes(shell):
    """One allowed id, a tile without any, logits far from 0, equal logits, and temperatures of 0.01 and 100."""
    logits, seeds, at, heat = given(6, 2300)
    wide = np.array(logits)
    wide[0], wide[0, 1700] = -np.inf, 3.0
    wide[1, 1024:2048] = -np.inf
    wide[2] += 3e4
    wide[3] = 0.25
    heat = jnp.asarray([1.0, 0.7, 1.0, 1.0, 0.01, 100.0], jnp.float32)
    lowest = jnp.asarray([-np.inf, -np.inf, -np.inf, 0.25, -1.0, -np.inf], jnp.float32)
    args = (jnp.asarray(wide), seeds, at, heat, lowest)
    got, want = drawn(SHELLS[shell], *args), reference(*args)
    assert_alike(got, want, close=5e-3)  # the reference's sums near 3e4 round to 2e-3
    assert got.tokens[0] == 1700 and got.logprobs[0] == 0
    assert got.argmax_tokens[3] == 0 and abs(got.entropies[3] - np.log(2300)) < 1e-5


@pytest.mark.parametrize("shell", SHELLS)
def test_a_row_knows_only_itself(shell):
    logits, seeds, at, heat = given(9, 2052)
    draw = functools.partial(drawn, SHELLS[shell])
    whole, order = draw(logits, seeds, at, heat, None), np.array([7, 2, 5])
    for one, two in zip(whole, draw(*(x[order] for x in (logits, seeds, at, heat)), None), strict=True):
        assert np.asarray(one)[order].tobytes() == np.asarray(two).tobytes()


def test_planted_tile_math_without_the_threshold_fails(monkeypatch):
    real = tiles.of_tile
    monkeypatch.setattr(
        tiles, "of_tile", lambda logits, there, lowest, inverse: real(logits, there, tiles.LOWEST / 10, inverse)
    )
    logits, seeds, at, heat = given(9, 2052)
    args = (logits, seeds, at, heat, cut(logits, heat))
    shell = functools.partial(ON_GPU)  # ON_GPU itself was traced before, and its trace kept
    with pytest.raises(AssertionError):
        assert_alike(drawn(shell, *args), reference(*args))


@pytest.mark.extended
@pytest.mark.parametrize("ways, vocab", [(2, 4500), (4, 1100)])
def test_a_vocabulary_in_parts_is_drawn_from_as_a_whole(ways, vocab):
    """Also with padded parts, with parts of padding only, and under vmap over two replicas, as in the engine."""
    mesh = meshes.make_mesh(2, 1, ways)
    statistics = functools.partial(sampling_tpu.statistics, interpret=True)
    draw = verify.drawn_by(statistics, verify.Shards(functools.partial(meshes.by_vocab, mesh), meshes.TENSOR, ways))
    logits, seeds, at, heat = given(12, vocab)
    lowest = cut(logits, heat)
    want = reference(logits, seeds, at, heat, lowest)
    pair = [x.reshape(2, 6, *x.shape[1:]) for x in (logits, seeds, at, heat, lowest)]
    got = jax.jit(jax.vmap(draw, spmd_axis_name=meshes.REPLICAS))(*pair)
    assert_alike(sampling.Drawn(*(x.reshape(-1) for x in got)), want)


@pytest.mark.parametrize("platform", CUSTOM_CALL)
@pytest.mark.parametrize("vocab", [152064, 2053, 512])
def test_lowers_to_the_kernel_that_serves(platform, vocab):
    shape = jax.ShapeDtypeStruct
    args = (
        shape((160, vocab), jnp.float32),
        shape((160, 2), jnp.uint32),
        shape((160,), jnp.int32),
        shape((160,), jnp.float32),
        shape((160,), jnp.float32),
    )
    with abstract_chips.hopper() if platform == "cuda" else contextlib.nullcontext():
        text = jax.jit(verify.verify_sample).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert (CUSTOM_CALL[platform] in text) == verify.KERNELS[platform].serves(160, vocab)
    text = jax.jit(verify.verify_sample).trace(*args).lower(lowering_platforms=("cpu",)).as_text()
    assert "custom_call" not in text.replace("stablehlo.custom_call @Sharding", "")


def test_on_cpu_it_is_the_reference_bit_for_bit():
    args = given(32, 2056)
    for one, two in zip(jax.jit(verify.verify_sample)(*args), jax.jit(sampling.sample)(*args), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


@pytest.mark.parametrize("platform", CUSTOM_CALL)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2)])
def test_the_row_program_holds_the_kernel(platform, shape):
    """Lowers the engine's dispatch for a platform that is not present, on one device and on several."""
    mesh, config = meshes.make_mesh(*shape), dataclasses.replace(lab.TINY, vocab_size=2056)
    sizes = EngineSettings(
        replicas=meshes.replicas(mesh),
        slots=4,
        max_length=32,
        page_size=16,
        pages=8,
        row_sizes=(8,),
        head_rows=4,
        steps_per_dispatch=2,
        restricted=True,
    )
    programs = Programs(config, mesh, sizes)
    homes = meshes.param_shardings(mesh, decoder.axes(config), "engine")
    params = jax.tree.map(
        lambda x, home: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=home), decoder.abstract(config), homes
    )
    sizes, chips = programs.sizes, mesh
    if platform == "cuda":
        chips = abstract_chips.mesh_of(mesh)
        run = functools.partial(meshes.by_vocab, chips)
        sizes = dataclasses.replace(sizes, shards=sizes.shards and sizes.shards._replace(run=run))
    run = jax.jit(
        functools.partial(
            row_program.dispatch,
            RowProgram(
                rows=8,
                sizes=sizes,
                config=config,
                dtype=jnp.float32,
                drafter=programs.drafter,
                spread=functools.partial(meshes.by_heads, chips),
                spread_states=lambda read: read,
            ),
        )
    )
    packed = jax.ShapeDtypeStruct((sizes.replicas, 4, TABLE + sizes.blocks), jnp.int32)
    state, tables = jax.eval_shape(lambda: programs.blanks(programs.drafter))
    with abstract_chips.hopper(chips) if platform == "cuda" else contextlib.nullcontext():
        traced = run.trace(params, tables, state, packed, jax.ShapeDtypeStruct((3,), jnp.int32))
        assert CUSTOM_CALL[platform] in traced.lower(lowering_platforms=(platform,)).as_text()
