"""Swap cases: which one it is, that nothing moves when shared, and what is refused."""

from __future__ import annotations

import engine_lab as lab
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel import weight_sync
from jaxrl_post.parallel.weight_sync import WeightLayout


def _layout(mesh, dtype=np.float32):
    return WeightLayout(meshes.param_shardings(mesh, decoder.axes(lab.TINY), "engine"), dtype)


def _learner(mesh, seed=0):
    return meshes.put(lab.weights(seed), meshes.param_shardings(mesh, decoder.axes(lab.TINY), "learner"))


def _addresses(tree):
    return [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


def test_shared_moves_no_bytes():
    mesh = meshes.make_mesh()
    layout, first, second = _layout(mesh), _learner(mesh), _learner(mesh, 1)
    assert layout.case(first) == "shared"
    assert _addresses(layout.place(first)) == _addresses(first)
    assert _addresses(layout.replace(first, second)) == _addresses(second)


def test_cast_writes_into_the_old_buffers():
    mesh = meshes.make_mesh()
    layout, first, second = _layout(mesh, jnp.bfloat16), _learner(mesh), _learner(mesh, 1)
    assert layout.case(first) == "cast"
    old = layout.place(first)
    where = sorted(_addresses(old))
    new = layout.replace(old, second)
    assert sorted(_addresses(new)) == where
    for got, want in zip(jax.tree.leaves(new), jax.tree.leaves(second)):
        assert np.array_equal(np.asarray(got), np.asarray(want).astype(jnp.bfloat16))
    assert all(not x.is_deleted() for x in jax.tree.leaves(second))


def test_relayout_from_fsdp():
    mesh = meshes.make_mesh(1, 2, 2)
    layout, params = _layout(mesh), _learner(mesh)
    assert layout.case(params) == "relayout"
    placed = layout.replace(layout.place(params), _learner(mesh, 1))
    for got, want, at in zip(
        jax.tree.leaves(placed), jax.tree.leaves(lab.weights(1)), jax.tree.leaves(layout.shardings)
    ):
        assert np.array_equal(np.asarray(got), want) and got.sharding.is_equivalent_to(at, got.ndim)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_element_that_is_not_finite_is_seen_and_large_ones_are_none(dtype):
    largest = {
        "a": jnp.full((3, 50), jnp.finfo(dtype).max, dtype),
        "b": {"c": jnp.full(7, jnp.finfo(dtype).min, dtype)},
    }
    assert bool(weight_sync.all_finite(largest))
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        assert not bool(weight_sync.all_finite({**largest, "a": largest["a"].at[2, 49].set(bad)}))
        assert not bool(weight_sync.all_finite({**largest, "b": {"c": largest["b"]["c"].at[0].set(bad)}}))


def _unread(tree):
    raise AssertionError("weights were read to check them")


@pytest.mark.parametrize(
    "changes", [{}, dict(dtype=jnp.bfloat16), dict(weights="int8")], ids=["shared", "cast", "code"]
)
def test_what_the_caller_knows_of_the_weights_is_taken(changes, monkeypatch):
    """What is said decides, not what the weights hold. Refused weights use up nothing."""
    engine, asked = lab.engine(**changes), lab.requests(8)
    before, new = lab.run(engine, asked), _learner(meshes.make_mesh(), 1)
    monkeypatch.setattr(weight_sync, "_finite", _unread)
    with pytest.raises(weight_sync.NotFinite, match="not finite"):
        engine.swap(new, 1, jnp.bool_(False))
    engine.reset()
    assert engine.version == 0 and lab.same_bits(before, lab.run(engine, asked))
    engine.swap(new, 1, jnp.bool_(True))
    with pytest.raises(AssertionError, match="were read"):
        engine.swap(new, 2)
    monkeypatch.undo()
    engine.reset()
    assert engine.version == 1 and not lab.same_bits(before, lab.run(engine, asked))


def test_refusals_leave_the_old_version_running():
    engine = lab.engine()
    asked = lab.requests(8)
    before = lab.run(engine, asked)
    good = _learner(meshes.make_mesh(), 1)
    for params, version, sentence in [
        (good, 0, "version 0 must be greater than the current 0"),
        ({"embed": good["embed"]}, 1, "in another tree"),
        ({**good, "embed": good["embed"][:-1]}, 1, r"\['embed'\] has shape \(39, 32\), in use is \(40, 32\)"),
        ({**good, "embed": good["embed"].at[0, 0].set(jnp.nan)}, 1, "not finite"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            engine.swap(params, version)
    engine.reset()
    assert engine.version == 0 and lab.same_bits(before, lab.run(engine, asked))
