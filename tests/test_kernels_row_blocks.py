"""Products, norms and functions of rows whose bits do not depend on the number of rows: against numpy, and against themselves."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.kernels import choice, product_gpu, product_tpu, row_blocks

SIZES = (16, 32, 64, 128, 256)
NOWHERE = frozenset()
FORMS = {
    "gpu": functools.partial(product_gpu.product, interpret=True),
    "tpu": functools.partial(product_tpu.product, interpret=True),
    "blocks": functools.partial(row_blocks.product, platforms=NOWHERE),
}
NORMS = {
    "gpu": functools.partial(product_gpu.norm, eps=1e-6, offset=1.0, interpret=True),
    "tpu": functools.partial(product_tpu.norm, eps=1e-6, offset=1.0, interpret=True),
    "blocks": lambda x, w: row_blocks.norm(plain_norm, x, w, 1e-6, 1.0, NOWHERE),
}


def plain_norm(rows, weight):
    wide = rows.astype(jnp.float32)
    unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (unit * (weight.astype(jnp.float32) + 1.0)).astype(rows.dtype)


def given(*shapes, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def bits(x):
    return np.asarray(x).tobytes()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("turned", [False, True])
def test_a_product_is_that_of_numpy_and_has_one_sum_for_every_number_of_rows(form, turned):
    rows, matrix = given((256, 1152), (48, 1152) if turned else (1152, 48))
    assert product_gpu.parts(1152, 48) > 1 < 1152 // product_tpu.depth(1152)  # sums of parts are in the comparison
    run = jax.jit(functools.partial(FORMS[form], dtype=jnp.float32, turned=turned))
    whole = run(rows, matrix)
    exact = np.asarray(rows, np.float64) @ np.asarray(matrix.T if turned else matrix, np.float64)
    assert np.abs(np.asarray(whole) - exact).max() < 1e-5 * np.abs(exact).max()
    for size in SIZES:
        assert bits(run(rows[:size], matrix)) == bits(whole[:size])
        assert bits(run(rows[::-1][:size], matrix)) == bits(whole[::-1][:size])  # at other places, beside others


def test_a_sum_whose_parts_follow_from_the_number_of_rows_has_other_bits(monkeypatch):
    """Planted: what compilers do."""
    rows, matrix = given((256, 1024), (1024, 48))
    run = functools.partial(FORMS["gpu"], dtype=jnp.float32)
    whole = run(rows, matrix)
    monkeypatch.setattr(product_gpu, "parts", lambda inputs, outputs: 1)
    assert bits(run(rows[:16], matrix)) != bits(whole[:16])


def test_whole_numbers_are_summed_without_an_error_and_cut_to_the_dtype():
    rng = np.random.default_rng(1)
    rows, matrix = (rng.integers(-8, 9, shape) for shape in ((70, 64), (64, 80)))
    for run in FORMS.values():
        out = run(jnp.asarray(rows, jnp.bfloat16), jnp.asarray(matrix, jnp.bfloat16), dtype=jnp.bfloat16)
        wanted = jnp.asarray(rows @ matrix, jnp.float32).astype(jnp.bfloat16)
        assert out.dtype == jnp.bfloat16 and bits(out) == bits(wanted)


@pytest.mark.parametrize("form", NORMS)
def test_a_norm_is_that_of_numpy_and_has_one_sum_for_every_number_of_rows(form):
    rows, weight = given((256, 96), (96,))
    run = jax.jit(NORMS[form])
    whole = run(rows, weight)
    wide = np.asarray(rows, np.float64)
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * (np.asarray(weight, np.float64) + 1)
    np.testing.assert_allclose(np.asarray(whole, np.float64), exact, rtol=2**-7, atol=2**-12)
    for size in SIZES:
        assert bits(run(rows[:size], weight)) == bits(whole[:size])
        assert bits(run(rows[::-1][:size], weight)) == bits(whole[::-1][:size])


def test_blocks_take_several_arrays_and_arrays_without_numbers():
    def run(x, y):
        assert x.shape[0] == y.shape[0] == row_blocks.BLOCK
        return x.sum(axis=1) + y, x[:, :0]

    x, y = given((37, 5), (37,), dtype=jnp.float32)
    total, nothing = row_blocks.in_blocks(run, x, y)
    np.testing.assert_allclose(total, np.asarray(x).sum(axis=1) + np.asarray(y), rtol=1e-5, atol=1e-6)
    assert nothing.shape == (37, 0)


def test_parts_follow_from_the_matrix_alone():
    """Of Qwen2.5-1.5B: o, down, gate and the head, by hand: the fewest parts with 132 programs, each of 256 numbers or more."""
    wanted = {(1536, 1536): 6, (8960, 1536): 7, (1536, 8960): 1, (1536, 151936): 1, (1536, 256): 6, (64, 64): 1}
    assert {sides: product_gpu.parts(*sides) for sides in wanted} == wanted


class Device:
    def __init__(self, platform, capability="9.0", kind="a device"):
        self.platform, self.device_kind, self.compute_capability = platform, kind, capability


@pytest.mark.parametrize(
    "device, devices, dtype, weights, sides, said",
    [
        (Device("cpu"), 8, jnp.float32, "int8", (33,), ""),
        (Device("gpu"), 1, jnp.bfloat16, "auto", (1536, 8960), ""),
        (Device("tpu", kind="TPU v6 lite"), 1, jnp.bfloat16, "auto", (1536, 8960), ""),
        (Device("tpu", kind="TPU v4"), 1, jnp.bfloat16, "auto", (), "written for TPU v5 and later"),
        (
            Device("tpu", kind="TPU v6 lite"),
            1,
            jnp.bfloat16,
            "auto",
            (1536, 200),
            "here are bfloat16 and a side of 200",
        ),
        (Device("gpu", "7.5"), 1, jnp.bfloat16, "auto", (), "written for compute capability 8.0 and later"),
        (Device("gpu"), 2, jnp.bfloat16, "auto", (), "runs on one device, and the engine's mesh has 2"),
        (Device("gpu"), 1, jnp.bfloat16, "int8", (), "engine.weights is 'int8'"),
        (Device("gpu"), 1, jnp.float32, "auto", (64,), "here are float32 and a side of 64"),
        (Device("gpu"), 1, jnp.bfloat16, "auto", (64, 50257), "here are bfloat16 and a side of 50257"),
    ],
)
def test_where_no_kernel_computes_them_the_reason_is_said(device, devices, dtype, weights, sides, said):
    reason = choice.without_products(device, devices, dtype, weights, sides)
    assert said in reason and bool(said) == bool(reason)
