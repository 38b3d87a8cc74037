"""Tensor parallelism and replicas on forced devices: the same law, and the same tokens but for near ties."""

from __future__ import annotations

import re

import engine_lab as lab
import pytest

from jaxrl_post.parallel import mesh as meshes

pytestmark = pytest.mark.usefixtures("quick_compilation")

SIZES = dict(max_length=176, pages=200, row_sizes=(64,), slots=16)


def _asked(replicas):
    return lab.requests(16, samples=4, exact=128, longest_prompt=40, temperatures=(1.0,), seed=3, replicas=replicas)


@pytest.mark.parametrize(
    "shape", [pytest.param((1, 1, 2), marks=pytest.mark.extended), (2, 1, 2)], ids=["tensor2", "data2xtensor2"]
)
def test_sharded_engine_equals_one_device(shape):
    one = lab.run(lab.engine(**SIZES), _asked(1))
    mesh = meshes.make_mesh(*shape)
    asked = _asked(meshes.replicas(mesh))
    many = lab.run(lab.engine(mesh=mesh, **SIZES), asked)
    gaps, worst = lab.first_differences(one, many, asked, lab.weights(0))
    assert worst <= 1e-5
    assert all(gap < 1e-4 for gap in gaps), gaps
    assert sum(len(r) for r in many.values()) == 16 * 128


@pytest.mark.extended
@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 1)], ids=["data2", "fsdp2"])
def test_replicas_meet_once_a_step(shape):
    """Each replica walks over its own pages, as far as it must. In a step they only agree on whether to continue."""
    engine = lab.engine(
        mesh=meshes.make_mesh(*shape), drafting=lab.drafting("ours", [], replicas=2), cost=lab.FREE_ROWS
    )
    programs = {
        name: program for name, program in engine.device.programs.compiled.items() if name.startswith("dispatch")
    }
    assert len(programs) == 2  # one with drafts, one without
    for name, program in programs.items():
        meetings = [
            re.search('op_name="([^"]*)"', line)[1]
            for line in program.as_text().splitlines()
            if re.search(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\(", line)
        ]
        assert [where for where in meetings if "while/" in where] == ["jit(dispatch)/while/cond/reduce_max"], name
        assert len(meetings) > 1  # the result for the host is gathered behind the loop


def test_kv_heads_that_cannot_be_split_are_refused():
    with pytest.raises(
        ValueError, match="mesh.tensor=4 does not divide the model's kv_heads=2; the nearest valid value is 2"
    ):
        lab.made(lab.TINY, lab.weights(0), meshes.make_mesh(1, 1, 4))
