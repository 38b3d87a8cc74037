"""Grouped products without their devices: against a loop over groups, in values, gradients, bits of a row, and the blocks read."""

import functools

import grouped_walks as walks
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.kernels import grouped, grouped_gpu, grouped_tpu

pytestmark = pytest.mark.usefixtures("quick_compilation")
KERNELS = {"tpu": grouped_tpu, "cuda": grouped_gpu}
EXACT, SINGLE, SEEN = 1e-12, 5e-6, 1e-2
SIZES = {
    "uneven": (0, 70, 1, 0, 129, 3, 0),
    "fewer rows than a tile": (3, 0, 0, 5, 1, 0, 0),
    "one group has all": (0, 0, 0, 0, 0, 0, 300),
    "none": (0,) * 7,
    "others have rows behind": (10, 0, 100, 0, 60, 0, 1),
}
K, N = 32, 48


def case(sizes, dtype, behind=0, sides=(K, N)):
    rng = np.random.default_rng(5)
    M = sum(sizes) + behind
    shapes = (M, sides[0]), (len(sizes), *sides), (M, sides[1])
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def loop(rows, matrices, sizes, slope):
    """The product and both gradients, by numpy in float64, of rows that have a group."""
    ends = np.cumsum(sizes)
    given = [np.asarray(x, np.float64) for x in (rows, matrices, slope)]
    parts = [(slice(end - size, end), given[1][g]) for g, (end, size) in enumerate(zip(ends, sizes, strict=True))]
    out = np.concatenate([given[0][part] @ matrix for part, matrix in parts])
    by_rows = np.concatenate([given[2][part] @ matrix.T for part, matrix in parts])
    return out, by_rows, np.stack([given[0][part].T @ given[2][part] for part, _ in parts])


@pytest.mark.parametrize("dtype, bound", [(np.float64, EXACT), (np.float32, SINGLE)])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("platform", KERNELS)
def test_products_and_gradients_are_those_of_a_loop_over_groups(platform, name, dtype, bound):
    sizes, kernel = SIZES[name], KERNELS[platform]
    _agrees(kernel, sizes, dtype, bound, behind=40 if "behind" in name or name == "none" else 0)


@pytest.mark.parametrize("sides", [(32, 8), (8, 32)], ids=str)
def test_a_low_rank_addition_of_eight_has_the_kernel_of_gpus_too(sides):
    assert grouped_gpu.serves(jnp.bfloat16, jnp.bfloat16, *sides)
    assert not grouped_gpu.serves(jnp.bfloat16, jnp.bfloat16, 200, 32)
    _agrees(grouped_gpu, (3, 0, 5), np.float32, SINGLE, sides=sides)


def _agrees(kernel, sizes, dtype, bound, **more):
    with jax.enable_x64(dtype == np.float64):
        rows, matrices, slope = case(sizes, dtype, **more)
        counts, known = jnp.asarray(sizes, jnp.int32), sum(sizes)
        out = jax.jit(functools.partial(kernel.product, interpret=True))(rows, matrices, counts)
        back = jax.jit(functools.partial(grouped.gradients, kernel, interpret=True))(rows, matrices, counts, slope)
        found = [np.asarray(x)[:known] for x in (out, back[0])] + [np.asarray(back[1])]
    for own, exact in zip(found, loop(rows, matrices, sizes, slope), strict=True):
        assert own.shape == exact.shape
        assert np.all(np.abs(own - exact) <= bound * max(1.0, np.abs(exact).max(initial=0)))


@pytest.mark.parametrize("platform", KERNELS)
def test_neither_infinite_rows_of_others_nor_their_slopes_reach_a_group(platform):
    sizes, kernel = (3, 0, 5), KERNELS[platform]
    rows, matrices, slope = case(sizes, np.float32, behind=8)
    behind = np.arange(len(rows))[:, None] >= sum(sizes)
    rows, slope = (jnp.where(behind, np.nan, x) for x in (rows, slope))
    found = grouped.gradients(kernel, rows, matrices, jnp.asarray(sizes, jnp.int32), slope, interpret=True)
    assert np.isfinite(found[1]).all() and np.isfinite(found[0][: sum(sizes)]).all()


@pytest.mark.parametrize("platform", KERNELS)
def test_the_bits_of_a_row_depend_on_nothing_but_the_row(platform):
    rng, kernel = np.random.default_rng(1), KERNELS[platform]
    matrices = jnp.asarray(rng.normal(size=(4, K, N)), jnp.bfloat16)
    row = rng.normal(size=K)
    seen = set()
    for before, after in ((0, 0), (1, 2), (63, 70), (127, 1), (130, 260)):
        others = rng.normal(size=(before + after + 1, K))
        others[before] = row
        sizes = jnp.asarray([before - before // 2, 0, before // 2 + 1 + after // 2, after - after // 2], jnp.int32)
        out = kernel.product(jnp.asarray(others, jnp.bfloat16), matrices, sizes, interpret=True)
        seen.add(np.asarray(out[before], np.float32).tobytes())
    assert len(seen) == 1


def test_the_choice_is_by_shape_and_platform_and_a_cpu_runs_ragged_dot():
    rows, matrices, _ = case((3, 0, 5), jnp.bfloat16)
    sizes = jnp.asarray((3, 0, 5), jnp.int32)

    def lowered(platform, *given, **how):
        def both(rows, matrices):
            out, back = jax.vjp(lambda *x: grouped.product(*x, sizes, **how), rows, matrices)
            return out, back(out)

        return jax.jit(both).trace(*given).lower(lowering_platforms=(platform,)).as_text()

    for platform, call in (("tpu", "tpu_custom_call"), ("cuda", "triton")):
        if platform == "tpu":  # Triton asks for a device; the compile tier lowers for one
            assert lowered(platform, rows, matrices).count(f"@{call}") == 3
        assert call not in lowered(platform, rows, matrices, platforms=frozenset())
        assert call not in lowered(platform, rows.astype(jnp.float32), matrices.astype(jnp.float32))
    exact = [jax.lax.ragged_dot(rows, matrices, sizes)]
    exact += jax.vjp(lambda *x: jax.lax.ragged_dot(*x, sizes), rows, matrices)[1](exact[0])
    out, back = jax.vjp(lambda *x: grouped.product(*x, sizes), rows, matrices)
    for own, other in zip([out, *back(out)], exact, strict=True):
        assert np.array_equal(np.asarray(own, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("inputs, outputs", [(2048, 768), (2048, 192), (192, 2048), (2880, 720), (720, 2880)])
def test_a_walk_reads_the_chosen_experts_once_and_no_others(platform, inputs, outputs):
    """The show compile-experts walks 1,000 routings of each number of rows."""
    rng = np.random.default_rng(2)
    for rows in (4, 16, 64):
        sizes = walks.routings(rng, 5, rows, 128, 8)
        read = walks.READ[platform](sizes, rows * 8, inputs, outputs)
        assert np.array_equal(read, walks.chosen(sizes, inputs, outputs))


def test_matrices_lie_as_a_tpu_keeps_them():
    """As the show compile-experts found at full depth, where another order is a copy of all experts in every step."""
    found = {
        sides: grouped_tpu.turned(*sides) for sides in ((2048, 768), (2048, 192), (192, 2048), (2880, 720), (720, 2880))
    }
    assert [sides for sides, one in found.items() if one] == [(2048, 192), (2880, 720)]


@pytest.mark.parametrize("platform, reread", [("tpu", 1), ("cuda", 4)])
def test_an_expert_with_many_rows_is_read_once_on_a_tpu_and_once_for_each_block_of_rows_on_a_gpu(platform, reread):
    sizes = np.array([[3, 250, 0, 3]], np.int32)
    read, whole = walks.READ[platform](sizes, 256, 2048, 768), 2048 * 768 * walks.BYTES
    assert read == (2 + reread) * whole
