"""Weights handed from the devices that learn to those that generate: every bit, every layout, the learner's untouched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.launch.jobs import roles
from jaxrl_post.models import decoder
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel.relayout import handed_over
from jaxrl_post.parallel.weight_sync import WeightLayout

AWKWARD = np.array([0x80000000, 0x00000001, 0x7FC00001, 0xFF800000, 0x3F800000, 0xBF7FFFFF], np.uint32).view(np.float32)


def bits(array):
    return np.asarray(array).view(np.uint32 if array.dtype == np.float32 else np.uint16)


@pytest.mark.parametrize("data, fsdp, tensor", [(4, 1, 1), (1, 4, 1), (1, 1, 4), (1, 2, 2), (2, 2, 1)])
@pytest.mark.parametrize("axes", [("vocab", "embed"), ("embed", "ffw"), ("embed",), ("heads", None, "embed")])
def test_every_bit_arrives(data, fsdp, tensor, axes):
    learner, engine = meshes.make_split(data, fsdp, tensor, 4)
    home = {
        room: meshes.param_shardings(mesh, {"w": axes}, room)["w"]
        for room, mesh in (("learner", learner), ("engine", engine))
    }
    host = np.resize(AWKWARD, (8,) * len(axes))
    new = meshes.put(host, home["learner"])
    arrived = handed_over([new], [home["engine"]])[0]
    assert arrived.sharding == home["engine"] and arrived.sharding.device_set.isdisjoint(new.sharding.device_set)
    for shard in arrived.addressable_shards:
        np.testing.assert_array_equal(bits(np.asarray(shard.data)), bits(host[shard.index]))
    np.testing.assert_array_equal(bits(np.asarray(new)), bits(host))


def test_it_arrives_in_the_engines_dtype(monkeypatch):
    learner, engine = meshes.make_split(1, 2, 1, 2)
    host = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    new = meshes.put(host, meshes.param_shardings(learner, {"w": ("embed", "ffw")}, "learner")["w"])
    layout = WeightLayout({"w": meshes.param_shardings(engine, {"w": ("embed", "ffw")}, "engine")["w"]}, jnp.bfloat16)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    arrived = layout.place({"w": new})["w"]
    np.testing.assert_array_equal(bits(np.asarray(arrived)), bits(host.astype(jnp.bfloat16)))


@pytest.mark.parametrize("count", [4, 2])
def test_a_whole_model_arrives_as_a_copy_through_the_host_brings_it(count):
    """`device_put` alone is the other way. Old leaves are freed, and the learner's stay."""
    model = PRESETS["tiny"]
    learner, engine = meshes.make_split(1, 2, 2, count)
    params = meshes.put(decoder.init(model, 0), meshes.param_shardings(learner, decoder.axes(model), "learner"))
    layout = WeightLayout(meshes.param_shardings(engine, decoder.axes(model), "engine"), np.float32)
    assert layout.case(params) == "relayout"
    placed = layout.place(params)
    other = jax.tree.map(jax.device_put, params, layout.shardings)
    for one, two in zip(jax.tree.leaves(placed), jax.tree.leaves(other), strict=True):
        assert one.sharding.is_equivalent_to(two.sharding, one.ndim)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))
    replaced = layout.replace(placed, params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(placed))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, replaced)))


def test_the_two_meshes_share_no_device():
    learner, engine = meshes.make_split(2, 1, 2, 2)
    assert learner.devices.shape == (2, 1, 1, 2) and engine.devices.shape == (1, 1, 1, 2)
    assert set(learner.devices.flat).isdisjoint(engine.devices.flat)


@pytest.mark.parametrize(
    "sizes, sentence",
    [
        (
            (2, 2, 1, 5),
            r"4 devices that learn and mesh.engine=5 that generate are needed in each of 1 processes, and 8 are there",
        )
    ],
)
def test_too_few_devices_are_one_sentence(sizes, sentence):
    with pytest.raises(ValueError, match=sentence):
        meshes.make_split(*sizes)


@pytest.mark.parametrize(
    "sizes, sentence",
    [
        ((2, 1, 1, 4), r"mesh.engine=4: 2 processes hand weights over .* it must be data\*fsdp\*tensor=2"),
        ((3, 1, 1, 3), r"3 devices that learn cannot be divided among 2 processes; the nearest valid product is 4"),
    ],
)
def test_processes_have_equal_parts(sizes, sentence):
    with pytest.raises(ValueError, match=sentence):
        meshes.make_split(*sizes, devices=roles.planned_here(2, 8))
