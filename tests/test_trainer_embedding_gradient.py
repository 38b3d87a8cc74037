"""The gradient of the embedding that adds up in a fixed order, against numpy's sums and XLA's own gradient."""

from __future__ import annotations

import types

import gradient_arms as arms
import jax
import jax.numpy as jnp
import made_groups
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.trainer import embedding_gradient

pytestmark = pytest.mark.usefixtures("quick_compilation")
EXACT, SINGLE = 1e-12, 5e-6
VOCAB, WIDTH = 11, 4
added = jax.jit(embedding_gradient.sums, static_argnums=2)


def by_numpy(tokens, slopes, vocab: int = VOCAB):
    out = np.zeros((vocab, slopes.shape[1]), slopes.dtype)
    np.add.at(out, tokens, slopes)
    return out


@given(st.lists(st.integers(0, VOCAB - 1), min_size=12, max_size=12), st.integers(0, 99))
def test_whole_numbers_add_up_exactly(tokens, seed):
    """So every slope is there once, however often a token stands in the row."""
    slopes = np.random.default_rng(seed).integers(-50, 50, (12, WIDTH)).astype(np.float32)
    np.testing.assert_array_equal(added(jnp.array(tokens), slopes, VOCAB), by_numpy(np.array(tokens), slopes))


@pytest.mark.parametrize("count", [1, 2, 3, 64, 65, 1000])
def test_one_token_alone(count):
    slopes = np.arange(count * WIDTH, dtype=np.float32).reshape(count, WIDTH)
    tokens = np.full(count, VOCAB - 1)
    np.testing.assert_array_equal(added(jnp.asarray(tokens), slopes, VOCAB), by_numpy(tokens, slopes))


def test_a_sum_does_not_depend_on_other_tokens():
    """Another token's slopes may change, and its places too. The bits of a sum stay."""
    noise = np.random.default_rng(0)
    tokens, slopes = noise.integers(0, 3, 200), noise.normal(size=(200, WIDTH)).astype(np.float32)
    mine = tokens == 1
    order = np.concatenate([np.flatnonzero(mine), np.flatnonzero(~mine)[::-1]])
    other = np.where(mine[:, None], slopes, -slopes)
    one, two = added(jnp.asarray(tokens), slopes, 3), added(jnp.asarray(tokens[order]), other[order], 3)
    assert np.asarray(one[1]).tobytes() == np.asarray(two[1]).tobytes()
    assert not np.array_equal(one[0], two[0])


@pytest.mark.parametrize("sizes", [(1, 1, 1), pytest.param((2, 2, 2), marks=pytest.mark.extended)])
@pytest.mark.parametrize(
    "dtype, bound", [pytest.param(np.float64, EXACT, marks=pytest.mark.extended), (np.float32, SINGLE)]
)
def test_a_learner_has_the_gradient_of_xla(monkeypatch, dtype, bound, sizes):
    groups = made_groups.groups()
    plain = arms.gradient(groups, dtype)
    monkeypatch.setattr(embedding_gradient, "for_platform", embedding_gradient.in_order)
    assert 0 < arms.worst(arms.gradient(groups, dtype, sizes=sizes), plain) <= bound


def adds_every_neighbour(monkeypatch):
    """Sums run on into the token before."""
    right = jnp.where
    monkeypatch.setattr(jnp, "where", lambda some, one, other: one if np.isscalar(other) else right(some, one, other))


def drops_the_last_token(monkeypatch):
    right = jnp.append
    monkeypatch.setattr(jnp, "append", lambda x, last: right(x, not last))


@pytest.mark.parametrize("fault", [adds_every_neighbour, drops_the_last_token])
def test_planted_faults_are_seen(monkeypatch, fault):
    tokens, slopes = jnp.array([3, 1, 3, 0]), jnp.ones((4, WIDTH))
    right = by_numpy(np.asarray(tokens), np.asarray(slopes))
    np.testing.assert_array_equal(embedding_gradient.sums(tokens, slopes, VOCAB), right)
    fault(monkeypatch)
    assert not np.array_equal(embedding_gradient.sums(tokens, slopes, VOCAB), right)


@pytest.mark.parametrize("platform, ordered", [("cpu", False), ("tpu", False), ("gpu", True), ("cuda", True)])
def test_gpus_alone_need_it(monkeypatch, platform, ordered):
    mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform=platform)], object))
    monkeypatch.setattr(embedding_gradient, "in_order", lambda mesh: mesh)
    assert embedding_gradient.for_platform(mesh) is (mesh if ordered else None)


def test_rows_are_those_of_the_table():
    table = jnp.arange(VOCAB * WIDTH, dtype=jnp.float32).reshape(VOCAB, WIDTH) / 3
    rows = embedding_gradient.in_order(meshes.make_mesh())
    found = jax.jit(rows, static_argnums=2)(table, jnp.array([4, 0, 4]), jnp.dtype(jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, table[jnp.array([4, 0, 4])].astype(jnp.bfloat16))
