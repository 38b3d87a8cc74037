"""Every form of finding the thresholds of top-k and top-p: against a twin in numpy, with ties, and row by row."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampler
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreted_tpu

from jaxrl_post.kernels import choice, thresholds, thresholds_gpu, thresholds_tpu
from jaxrl_post.kernels.pallas_tpu import pltpu

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB, ROWS = 33 * 1024 + 3 * 128, 24


FORMS = {
    name: jax.jit(functools.partial(form.keys, interpret=True))
    for name, form in (("gpu", thresholds_gpu), ("tpu", thresholds_tpu))
} | {"anywhere": jax.jit(thresholds.bisected)}


def given(rows: int = ROWS, vocab: int = VOCAB) -> tuple[np.ndarray, ...]:
    """Returns logits with ties, holes and zeros of both signs, and temperatures, top-k and top-p of all kinds."""
    noise = np.random.default_rng(0)
    logits = (noise.normal(size=(rows, vocab)) * 3).astype(np.float32)
    logits[3], logits[4, : vocab // 2], logits[5], logits[7, ::3], logits[7, 1::3] = (
        0.5,
        -np.inf,
        np.round(logits[5]),
        -0.0,
        0.0,
    )
    logits[[8, 12]] -= 40
    logits[15::8, 5000:] = -np.inf  # fewer ids are there than their top-k
    heat = np.resize([1.0, 0.6, 0.0, 2.0], rows).astype(np.float32)
    top_k = np.resize([0, 1, 5, 600, 20, 519, 520, 9000], rows).astype(np.int32)
    top_p = np.resize([1.0, 0.9, 0.5, 0.7, 0.1], rows).astype(np.float32)
    # More ids tie at the k-th place than a list of the highest holds. Without the others one id has the share.
    logits[13], logits[13, 5:1005], logits[13, 200], heat[13] = -np.inf, 0, 1, 1
    for row in np.flatnonzero((heat > 0) & (top_p < 1)):
        top_p[row] = _between(logits[row], heat[row], top_k[row], top_p[row])
    top_p[13] = 0.004
    return logits, heat, top_k, top_p


def _between(logits: np.ndarray, heat: float, top_k: int, top_p: float) -> float:
    """Returns the middle between the masses before and behind the ids at which a share of `top_p` is met."""
    values, counts = np.unique(-logits.astype(np.float64), return_counts=True)
    before = np.cumsum(counts) - counts
    values, counts = (x[before < (top_k or logits.size)] for x in (values, counts))
    mass = np.cumsum(counts * np.exp((values[0] - values) / heat))
    at = int(np.argmax(mass >= top_p * mass[-1]))
    return float((mass[at] + (mass[at - 1] if at else 0.0)) / 2 / mass[-1])


def found(form: str, numbers: tuple[np.ndarray, ...]) -> np.ndarray:
    lowest = thresholds.find(*map(jnp.asarray, numbers), {"cpu": FORMS[form]})
    return np.asarray(lowest)


@pytest.mark.parametrize("form", FORMS)
def test_the_twin_keeps_the_same_ids(form):
    logits, heat, top_k, top_p = given()
    lowest = found(form, given())
    for row in range(ROWS):
        if heat[row] == 0 or (top_k[row] == 0 and top_p[row] >= 1):
            assert lowest[row] == -np.inf
            continue
        allowed, _ = sampler.cut(logits[row], float(heat[row]), int(top_k[row]), float(top_p[row]))
        assert np.array_equal(logits[row] >= lowest[row], allowed), row


@pytest.mark.parametrize("form", FORMS)
def test_a_row_knows_only_itself(form):
    """Other rows, and other numbers of rows, change no bit. Nor does a second replica."""
    numbers, order = given(), np.array([7, 0, 13, 20, 5, 5, 11])
    whole = found(form, numbers)
    assert found(form, tuple(x[order] for x in numbers)).tobytes() == whole[order].tobytes()
    pair = [jnp.asarray(x.reshape(2, ROWS // 2, *x.shape[1:])) for x in numbers]
    keys = jax.jit(jax.vmap(thresholds.of_all_rows(FORMS[form])))(*pair)
    assert np.asarray(keys).reshape(-1).tobytes() == np.asarray(FORMS[form](*map(jnp.asarray, numbers))).tobytes()


def test_the_kernel_has_no_race():
    numbers = tuple(jnp.asarray(x[:9, :1152]) for x in given()[:1]) + tuple(jnp.asarray(x[:9]) for x in given()[1:])
    run = jax.jit(lambda *x: thresholds_tpu.keys(*x, interpret=pltpu.InterpretParams(detect_races=True)))
    try:
        assert np.array_equal(run(*numbers), jax.jit(thresholds.bisected)(*numbers))
        assert interpreted_tpu.races is not None and not interpreted_tpu.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("count", [1, 24, 128])
def test_the_highest_are_those_of_a_sort(count):
    logits = jnp.asarray(given()[0])
    for one, two in zip(thresholds.highest(logits, count), jax.lax.top_k(logits, count), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_vocabulary_that_devices_share_is_bisected():
    class Shards:
        count = 2

    everywhere = frozenset({"cuda", "tpu"})
    assert choice.of_thresholds(8, VOCAB, Shards(), everywhere) == {}
    assert set(choice.of_thresholds(8, VOCAB, None, everywhere)) == everywhere
    assert choice.of_thresholds(8, VOCAB, None, frozenset()) == {}
    assert choice.of_thresholds(8, 1000, None, everywhere) == {}
