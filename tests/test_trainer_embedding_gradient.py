"""The gradients of the embedding on GPUs and TPUs, against numpy's sums and XLA's own gradient."""

from __future__ import annotations

import dataclasses
import functools
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
from jaxrl_post.trainer import embedding

pytestmark = pytest.mark.usefixtures("quick_compilation")
EXACT, SINGLE = 1e-12, 5e-6
VOCAB, WIDTH = 11, 4
BOTH = pytest.mark.parametrize("sums", [embedding.in_pairs, embedding.in_pieces])


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch):
    monkeypatch.setattr(embedding, "PIECE", 4)


@functools.lru_cache
def added(sums):
    return jax.jit(sums, static_argnums=2)


def by_numpy(tokens, slopes, vocab: int = VOCAB):
    out = np.zeros((vocab, slopes.shape[1]), slopes.dtype)
    np.add.at(out, tokens, slopes)
    return out


@BOTH
@given(tokens=st.lists(st.integers(0, VOCAB - 1), min_size=14, max_size=14), seed=st.integers(0, 99))
def test_whole_numbers_add_up_exactly(sums, tokens, seed):
    """So every slope is there once, however often a token stands in the row."""
    slopes = np.random.default_rng(seed).integers(-50, 50, (14, WIDTH)).astype(np.float32)
    np.testing.assert_array_equal(added(sums)(jnp.array(tokens), slopes, VOCAB), by_numpy(np.array(tokens), slopes))


@BOTH
@pytest.mark.parametrize("count", [1, 2, 3, 64, 65, 1000])
def test_one_token_alone(sums, count):
    slopes = np.arange(count * WIDTH, dtype=np.float32).reshape(count, WIDTH)
    tokens = np.full(count, VOCAB - 1)
    np.testing.assert_array_equal(added(sums)(jnp.asarray(tokens), slopes, VOCAB), by_numpy(tokens, slopes))


@pytest.mark.parametrize("vocab", [152_064, 262_144, 1_000_003])
def test_a_key_holds_the_largest_tokens(monkeypatch, vocab):
    """A vocabulary of a million leaves less than a piece of 4,096 tokens to a key of 31 bits."""
    monkeypatch.setattr(embedding, "PIECE", 4096)
    noise = np.random.default_rng(vocab)
    tokens = noise.choice([0, 1, vocab // 2, vocab - 2, vocab - 1], 5000).astype(np.int32)
    slopes = noise.integers(-50, 50, (5000, 1)).astype(np.float32)
    made = jax.jit(embedding.in_pieces, static_argnums=2)(tokens, slopes, vocab)
    np.testing.assert_array_equal(made, by_numpy(tokens, slopes, vocab))


@BOTH
def test_a_sum_does_not_depend_on_other_tokens(sums):
    """Another token's slopes may change, and its places too. The bits of a sum stay."""
    noise = np.random.default_rng(0)
    tokens, slopes = noise.integers(0, 3, 200), noise.normal(size=(200, WIDTH)).astype(np.float32)
    mine = tokens == 1
    order = np.concatenate([np.flatnonzero(mine), np.flatnonzero(~mine)[::-1]])
    other = np.where(mine[:, None], slopes, -slopes)
    run = added(sums)
    one, two = run(jnp.asarray(tokens), slopes, 3), run(jnp.asarray(tokens[order]), other[order], 3)
    assert np.asarray(one[1]).tobytes() == np.asarray(two[1]).tobytes()
    assert not np.array_equal(one[0], two[0])


@BOTH
@pytest.mark.parametrize("sizes", [(1, 1, 1), pytest.param((2, 2, 2), marks=pytest.mark.extended)])
@pytest.mark.parametrize(
    "dtype, bound", [pytest.param(np.float64, EXACT, marks=pytest.mark.extended), (np.float32, SINGLE)]
)
def test_a_learner_has_the_gradient_of_xla(monkeypatch, dtype, bound, sizes, sums):
    groups = made_groups.groups()
    plain = arms.gradient(groups, dtype)
    monkeypatch.setattr(embedding, "for_platform", lambda mesh: embedding.in_order(mesh, sums))
    assert 0 < arms.worst(arms.gradient(groups, dtype, sizes=sizes), plain) <= bound


def test_embeddings_of_each_layer_have_the_gradient_of_xla_on_a_mesh(monkeypatch):
    model = dataclasses.replace(made_groups.MODEL, layer_embeds=6)
    groups = made_groups.groups()
    plain = arms.gradient(groups, model=model)
    assert np.abs(plain["layer_embed"]).max() > 0
    monkeypatch.setattr(embedding, "for_platform", lambda mesh: embedding.in_order(mesh, embedding.in_pieces))
    assert 0 < arms.worst(arms.gradient(groups, model=model, sizes=(2, 2, 2)), plain) <= SINGLE


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
    np.testing.assert_array_equal(embedding.in_pairs(tokens, slopes, VOCAB), right)
    fault(monkeypatch)
    assert not np.array_equal(embedding.in_pairs(tokens, slopes, VOCAB), right)


@pytest.mark.parametrize(
    "platform, count, sums",
    [
        ("cpu", 2, None),
        ("tpu", 1, None),
        ("tpu", 2, embedding.in_pieces),
        ("gpu", 1, embedding.in_pairs),
        ("cuda", 2, embedding.in_pairs),
    ],
)
def test_each_platform_has_its_sums(monkeypatch, platform, count, sums):
    devices = np.array([types.SimpleNamespace(platform=platform)] * count, object)
    mesh = types.SimpleNamespace(devices=devices, size=count)
    monkeypatch.setattr(embedding, "in_order", lambda _, sums: sums)
    assert embedding.for_platform(mesh) is sums


@BOTH
def test_rows_are_those_of_the_table(sums):
    table = jnp.arange(VOCAB * WIDTH, dtype=jnp.float32).reshape(VOCAB, WIDTH) / 3
    rows = embedding.in_order(meshes.make_mesh(), sums)
    found = jax.jit(rows, static_argnums=2)(table, jnp.array([4, 0, 4]), jnp.dtype(jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, table[jnp.array([4, 0, 4])].astype(jnp.bfloat16))
