"""Swap cases: which one it is, that nothing moves when shared, and what is refused."""

from __future__ import annotations

import engine_lab as lab
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
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
