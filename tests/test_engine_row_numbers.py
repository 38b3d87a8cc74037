"""The whole numbers of a step: one kernel computes what XLA's operations do, and a whole engine runs on it."""

from __future__ import annotations

import functools

import engine_lab as lab
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_post.engine import row_numbers
from jaxrl_post.engine.host import wire as c
from jaxrl_post.engine.host.wire import EngineSettings
from jaxrl_post.kernels import choice, mapped, row_tiles, small_arrays
from jaxrl_post.parallel import mesh as meshes

pytestmark = pytest.mark.usefixtures("quick_compilation")

SLOTS, ROWS, WIDTH, LENGTH, EMIT = 8, 16, 4, 64, 16
SIZES = EngineSettings(
    slots=SLOTS, max_length=LENGTH, page_size=16, pages=32, row_sizes=(ROWS,), head_rows=ROWS, steps_per_dispatch=4
)
as_kernel = functools.partial(small_arrays.run_as_kernel, interpret=True)


@st.composite
def steps(draw):
    """Returns the packed matrix, progress, uses, drafts, the texts, and what the head rows sample."""
    noise = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    packed = np.zeros((SLOTS, c.TABLE + 4), np.int32)
    known = noise.integers(1, LENGTH - 1, SLOTS)
    packed[:, c.ACTIVE] = noise.integers(0, 2, SLOTS)
    packed[:, c.NUM_TOKENS] = np.maximum(known - noise.integers(0, EMIT - 1, SLOTS), 0)
    packed[:, c.LIMIT] = noise.integers(known, LENGTH + 1)
    packed[:, c.MAPPED] = noise.integers(known, LENGTH + 1)
    packed[:, c.ORDER] = noise.permutation(SLOTS)
    packed[:, c.LEADER] = noise.integers(0, SLOTS, SLOTS)
    packed[:, c.SEED0 : c.TOP_P + 1] = noise.integers(-(1 << 31), 1 << 31, (SLOTS, 5))
    packed[:, c.FIRST_END : c.TABLE] = noise.integers(-1, 4, (SLOTS, c.TABLE - c.FIRST_END))
    one = noise.random(SLOTS) < 0.7
    done = np.where(one, known - 1, noise.integers(0, known))
    progress = known, done, known + noise.integers(0, 5, SLOTS), noise.integers(0, 2, SLOTS)
    worth = np.minimum.accumulate(noise.random((SLOTS, WIDTH)) * noise.integers(0, 2, (SLOTS, 1)), axis=1)
    offered = (worth > 0).sum(axis=1)
    tokens = noise.integers(0, 4, (SLOTS, LENGTH))
    ints = functools.partial(jnp.asarray, dtype=jnp.int32)
    progress = row_numbers.Progress(*map(ints, progress))
    drafts = (jnp.asarray(worth, jnp.float32), ints(offered))
    return ints(packed), progress, drafts, ints(tokens), ints(noise.integers(0, 4, ROWS))


@functools.cache
def _both(drafting: bool, states: bool):
    """Returns the functions of a step, by XLA and by the kernels, jitted."""

    def step(form, packed, progress, drafts, tokens, sampled):
        of = row_numbers.fixed(packed)
        rows = form(
            functools.partial(row_numbers.rows_of, SIZES, ROWS, states),
            (of, progress, *(drafts if drafting else ())),
            (tokens, packed),
        )
        uses = jnp.arange(row_numbers.USED, dtype=jnp.int32)
        given = progress, uses, of, rows, sampled
        found = form(functools.partial(row_numbers.settled, SIZES), given, (packed,), row_numbers.MOVED)
        plan = rows.plan
        cut = functools.partial(row_tiles.joined, 2, ROWS)
        return rows, found, form(cut, (plan.slot, rows.position, plan.real))

    return [jax.jit(functools.partial(step, form)) for form in (small_arrays.run, as_kernel)]


@settings(max_examples=30, deadline=None)
@given(steps(), st.booleans(), st.booleans())
def test_a_kernel_finds_the_same_numbers(step, drafting, states):
    one, other = (run(*step) for run in _both(drafting, states))
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x, y)


def test_lengths_that_fit_no_kernel_are_computed_by_xla():
    def total(values):
        return (jnp.sum(values[0]) + values[0],)

    for length, fits in ((8, True), (9, False), (512, False)):
        values = (jnp.arange(length, dtype=jnp.int32),)
        assert small_arrays.fits(values) == fits
        text = str(jax.make_jaxpr(lambda x: as_kernel(total, x))(values))
        assert ("pallas_call" in text) == fits
        np.testing.assert_array_equal(as_kernel(total, values)[0], total(values)[0])


@pytest.mark.parametrize("drafter", [pytest.param("", marks=pytest.mark.extended), "ours"])
def test_an_engine_on_these_kernels_has_the_same_rollouts(monkeypatch, drafter):
    """Also over two replicas."""
    asked = lab.requests(12, longest=20, replicas=2)
    want = lab.run(lab.engine(mesh=meshes.make_mesh(2, 1, 1)), asked)

    def form(function, values, tables=(), in_place=0):
        return mapped.alone(functools.partial(as_kernel, function, in_place=in_place))(values, tuple(tables))

    called = []
    monkeypatch.setattr(choice, "of_small_arrays", lambda device, spread: called.append(device) or form)
    more = dict(drafting=lab.drafting(drafter, lab.groups_of(asked, want), replicas=2)) if drafter else {}
    # No other test has engines of these sizes, so none gets these programs.
    engine = lab.engine(mesh=meshes.make_mesh(2, 1, 1), slots=16, steps_per_dispatch=3, **more)
    assert lab.same_bits(want, lab.run(engine, asked)) and called
    assert not drafter or engine.metrics()["rows/draft_accepted"] > 20
