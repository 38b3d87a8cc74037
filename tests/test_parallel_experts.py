"""Experts over several devices: values and gradients of one device, and the engine's tokens."""

from __future__ import annotations

import dataclasses
import functools
import re

import divided_experts as arms
import engine_lab as lab
import jax
import lora_arms
import numpy as np
import pytest

from jaxrl_post import config
from jaxrl_post.launch.parts import inputs
from jaxrl_post.launch.plan import memory_plan
from jaxrl_post.models import decoder, experts
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel.relayout import handed_over
from jaxrl_post.parallel.weight_sync import WeightLayout

pytestmark = pytest.mark.usefixtures("quick_compilation")

BOUND = {np.float64: 1e-12, np.float32: 5e-6}
MODEL = arms.SAMPLED
SPLITS = ["expert2", "expert4", "expert8", "expert2-tensor2", "data2-expert2", "fsdp2-expert2"]


whole = functools.cache(lambda dtype, learns: arms.layer(dtype, None, learns))  # once for all splits


@pytest.mark.parametrize("dtype", BOUND, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("split", SPLITS)
def test_the_layer_equals_one_device(split, dtype):
    for learns in (True, False):
        found = arms.gaps(arms.layer(dtype, arms.sizes(split), learns), whole(dtype, learns))
        assert max(found.values()) <= BOUND[dtype], found


@pytest.mark.parametrize("split, exchanged", [("data2", (0, 0)), ("expert4", (3, 1)), ("expert2-tensor2", (3, 1))])
def test_rows_travel_once_and_their_sums_once(split, exchanged):
    """Rows with their choices and gates come, sums go. Nothing travels where experts are not divided."""
    text = arms.program(arms.sizes(split))
    assert (len(re.findall(r"\ball_gather\[", text)), len(re.findall(r"\breduce_scatter\[", text))) == exchanged


@pytest.fixture(scope="module")
def alone():
    return arms.gradient(np.float64, {})


@pytest.mark.parametrize(
    "split", ["expert2", "data2-expert2-tensor2", pytest.param("fsdp2-expert4", marks=pytest.mark.extended)]
)
def test_the_learners_gradient_equals_that_of_one_device(split, alone):
    found = arms.gaps(arms.gradient(np.float64, arms.sizes(split)), alone)
    assert max(found.values()) <= BOUND[np.float64], found


SPLIT_ADDITIONS = ["expert2", pytest.param("data2-expert2-tensor2", marks=pytest.mark.extended)]


def _gap_of_additions(split: str) -> float:
    return lora_arms.gap(lora_arms.ROOTED, np.float64, arms.MODEL, sizes=arms.in_order(arms.sizes(split)))


@pytest.mark.parametrize("split", SPLIT_ADDITIONS)
def test_the_gradient_of_additions_is_that_of_merged_weights_by_the_chain_rule(split):
    assert _gap_of_additions(split) <= BOUND[np.float64]


@pytest.mark.extended
def test_additions_of_other_devices_experts_are_seen(monkeypatch):
    """The fault: every device takes the additions of the next one's experts."""
    real, ring = experts.mixed, [(0, 1), (1, 0)]

    def mixed(x, ids, gates, matrices, **how):
        moved = {
            name: jax.lax.ppermute(one, "expert", ring) for name, one in matrices.items() if name[-2:] in ("_a", "_b")
        }
        return real(x, ids, gates, {**matrices, **moved}, **how)

    monkeypatch.setattr(experts, "mixed", mixed)
    assert _gap_of_additions("expert2") > 1e-3


def _engine(split: str, **changes):
    return lab.engine(lab.weights(0, MODEL), MODEL, meshes.make_mesh(**arms.sizes(split)), **changes)


@pytest.fixture(scope="module")
def drawn():
    """Requests, and what one device makes of them."""
    asked = lab.requests(16, temperatures=(1.0,), seed=3)
    return asked, lab.run(_engine("data1"), asked)


@pytest.mark.parametrize("split", ["expert2", "expert2-tensor2"])
def test_the_engine_equals_one_device_but_for_near_ties(split, drawn):
    """And in one layout, requests that come one after another and fewer pages, so that some wait, change no bit."""
    asked, one = drawn
    engine = _engine(split)
    assert engine.layout.devices == np.prod([*arms.sizes(split).values()])
    many = lab.run(engine, asked)
    near, worst = lab.first_differences(one, many, asked, lab.weights(0, MODEL), MODEL)
    assert worst <= 1e-5 and all(gap < 1e-4 for gap in near), (worst, near)
    engine.reset()
    assert lab.same_bits(lab.run(engine, asked, submit_at=[3 * at for at in range(len(asked))]), many)
    if split == "expert2":
        scarce = _engine(split, pages=12)
        assert lab.same_bits(lab.run(scarce, asked), many)
        assert scarce.metrics()["sched/preemptions"] > 0


def _bits_arrive(placed, shardings, wanted):
    for got, want, home in zip(*map(jax.tree.leaves, (placed, wanted, shardings)), strict=True):
        assert got.sharding.is_equivalent_to(home, got.ndim) and np.array_equal(np.asarray(got), want)


@pytest.mark.parametrize(
    "learner, engine, case",
    [
        (dict(expert=2, tensor=2), None, "shared"),
        (dict(fsdp=2, expert=2), None, "relayout"),
        (dict(expert=4), dict(data=4), "relayout"),
        (dict(fsdp=2, expert=2), dict(expert=4), "relayout"),
    ],
    ids=str,
)
def test_weights_come_from_the_learners_layout_to_the_engines(learner, engine, case):
    ours = meshes.make_mesh(**learner)
    axes = decoder.axes(MODEL)
    homes = meshes.param_shardings(meshes.make_mesh(**engine) if engine else ours, axes, "engine")
    layout = WeightLayout(homes, np.float32)
    new = meshes.put(lab.weights(1, MODEL), meshes.param_shardings(ours, axes, "learner"))
    assert layout.case(new) == case
    _bits_arrive(layout.place(new), homes, lab.weights(1, MODEL))


@pytest.mark.parametrize("experts", [0, 1, 4], ids=["alike", "whole", "more"])
def test_weights_come_to_devices_of_the_engine_alone(experts):
    ours, theirs = meshes.make_split(1, 2, 1, 4, expert=2, engine_expert=experts)
    assert theirs.shape["expert"] == (experts or 2) and ours.devices.size == theirs.devices.size == 4
    axes = decoder.axes(MODEL)
    homes = meshes.param_shardings(theirs, axes, "engine")
    new = meshes.put(lab.weights(1, MODEL), meshes.param_shardings(ours, axes, "learner"))
    arrived = handed_over(jax.tree.leaves(new), jax.tree.leaves(homes))
    _bits_arrive(jax.tree.unflatten(jax.tree.structure(new), arrived), homes, lab.weights(1, MODEL))


@pytest.mark.parametrize("ways, near", [(3, 2), (5, 4), (7, 8)])
def test_experts_that_cannot_be_divided_are_refused(ways, near):
    mesh, shapes = meshes.make_mesh(expert=ways), decoder.abstract(MODEL)
    for room in ("learner", "engine"):
        with pytest.raises(
            ValueError,
            match=f"mesh.expert={ways} does not divide the model's expert=8; the nearest valid value is {near}$",
        ):
            meshes.check_divisible(mesh, decoder.axes(MODEL), shapes, room)


REFUSED = {
    ("mesh.expert=2", "scheduler.lend=0.4"): "mesh.expert=2 must be 1; the nearest valid .* is 1",
    ("mesh.engine_expert=2", "scheduler.lend=0.4"): "mesh.engine_expert=2 must be 0; the nearest valid .* is 0",
    ("mesh.engine=3", "mesh.expert=2"): "mesh.engine=3 must be a multiple of 2, .*; the nearest valid .* is 2",
    (
        "mesh.engine_expert=3",
    ): "mesh.engine_expert=3 makes replicas of 3 devices, .* the 4 .*; the nearest valid .* is 2",
    (
        "mesh.engine_expert=4",
        "mesh.engine_tensor=2",
    ): "mesh.engine_tensor=2 makes replicas of 8 devices, .* the 4 .*; the nearest valid .* is 1",
    ("mesh.expert=3", "batch.rows=4"): "batch.rows=4 must be a multiple of mesh.data.mesh.fsdp.mesh.expert=12",
}


@pytest.mark.parametrize("changes", REFUSED, ids=" ".join)
def test_configs_that_are_refused(changes):
    with pytest.raises(ValueError, match=REFUSED[changes]):
        config.resolve(
            config.default(), ["model.preset=demo", "mesh.data=4", "batch.rows=8", "scheduler.stream=4", *changes]
        )


def test_a_model_without_experts_is_refused():
    for name in ("expert", "engine_expert"):
        given = config.resolve(config.default(), ["model.preset=demo", f"mesh.{name}=2", "batch.rows=8", "mesh.data=2"])
        with pytest.raises(
            ValueError, match=f"mesh.{name}=2: the model .* has no experts .* nearest valid value is 1$"
        ):
            inputs._check_routers(
                given, lab.TINY if lab.EXPERTS is None else dataclasses.replace(lab.TINY, experts=None)
            )


def test_the_plan_divides_what_a_device_holds_of_the_experts():
    given = [
        config.resolve(config.default(), ["model.preset=demo", f"mesh.expert={ways}", "batch.rows=8"])
        for ways in (1, 2)
    ]
    one, two = ({item.what: item.bytes for item in memory_plan.memory(c, MODEL)} for c in given)
    experts = sum(
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(decoder.abstract(MODEL))
        if "experts_" in jax.tree_util.keystr(path)
    )
    for what, size in (
        ("weights (learner, float32)", 4),
        ("optimizer (two moments, float32)", 8),
        ("gradient (float32)", 4),
    ):
        assert one[what] - two[what] == size * experts // 2
