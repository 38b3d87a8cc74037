"""Tensor parallelism and replicas on forced devices: the same law, the same tokens but for near ties."""

from __future__ import annotations

import pytest

import engine_lab as lab
from jaxrl_post import mesh as meshes
from jaxrl_post.engine.engine import RowEngine

SIZES = dict(max_length=176, pages=200, row_sizes=(64,), slots=16)


def _asked(replicas):
    return lab.requests(16, samples=4, exact=128, longest_prompt=40, temperatures=(1.0,), seed=3, replicas=replicas)


@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 1, 2)], ids=["tensor2", "data2xtensor2"])
def test_sharded_engine_equals_one_device(shape):
    one = lab.run(lab.engine(**SIZES), _asked(1))
    mesh = meshes.make_mesh(*shape)
    asked = _asked(meshes.replicas(mesh))
    many = lab.run(lab.engine(mesh=mesh, **SIZES), asked)
    gaps, worst = lab.first_differences(one, many, asked, lab.weights(0))
    assert worst <= 1e-5
    assert all(gap < 1e-4 for gap in gaps), gaps
    assert sum(len(r) for r in many.values()) == 16 * 128


def test_kv_heads_that_cannot_be_split_are_refused():
    with pytest.raises(ValueError, match="mesh.tensor=4 does not divide the model's kv_heads=2; the nearest valid value is 2"):
        RowEngine(lab.TINY, lab.weights(0), meshes.make_mesh(1, 1, 4), **lab.BASE)
