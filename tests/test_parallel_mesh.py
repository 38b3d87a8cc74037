"""Who gets which piece: the shards themselves, and what is refused."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh

MODEL = decoder.ModelConfig(vocab_size=32, embed=16, layers=1, heads=4, kv_heads=2, head_dim=4, ffw=24, max_length=64)


def pieces(array):
    """Device index along (data, fsdp, tensor) -> its piece."""
    return {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}


def test_axes_and_order():
    m = mesh.make_mesh(2, 2, 2)
    assert m.axis_names == ("data", "fsdp", "expert", "tensor")
    assert dict(m.shape) == dict(data=2, fsdp=2, expert=1, tensor=2)
    assert m.devices.ravel().tolist() == jax.devices()[:8] and mesh.replicas(m) == 4


def test_learner_cuts_embed_over_fsdp_and_heads_over_tensor():
    m = mesh.make_mesh(2, 2, 2)
    host = np.arange(16 * 4 * 4, dtype=np.float32).reshape(16, 4, 4)
    there = mesh.put({"q": host}, mesh.param_shardings(m, {"q": ("embed", "heads", "head_dim")}, "learner"))["q"]
    for d, f, t in np.ndindex(2, 2, 2):
        np.testing.assert_array_equal(pieces(there)[m.devices[d, f, 0, t]], host[8 * f : 8 * f + 8, 2 * t : 2 * t + 2])


def test_engine_cuts_over_tensor_only():
    m = mesh.make_mesh(2, 2, 2)
    host = np.arange(16 * 4 * 4, dtype=np.float32).reshape(16, 4, 4)
    there = mesh.put(host, mesh.param_shardings(m, {"q": ("embed", "heads", "head_dim")}, "engine")["q"])
    for d, f, t in np.ndindex(2, 2, 2):
        np.testing.assert_array_equal(pieces(there)[m.devices[d, f, 0, t]], host[:, 2 * t : 2 * t + 2])


def test_a_mesh_axis_cuts_one_dimension_only():
    m = mesh.make_mesh(1, 1, 2)
    there = mesh.put(np.zeros((32, 24)), mesh.param_shardings(m, {"w": ("vocab", "ffw")}, "learner")["w"])
    assert {piece.shape for piece in pieces(there).values()} == {(16, 24)}


@pytest.mark.parametrize("sharding", [mesh.batch_sharding, mesh.slot_sharding])
def test_rows_and_replicas_lie_along_data_and_fsdp(sharding):
    m = mesh.make_mesh(2, 2, 2)
    host = np.arange(8 * 3).reshape(8, 3).astype(np.int32)
    there = pieces(mesh.put(host, sharding(m)))
    for d, f, t in np.ndindex(2, 2, 2):
        at = 2 * (2 * d + f)
        np.testing.assert_array_equal(there[m.devices[d, f, 0, t]], host[at : at + 2])


def test_cache_and_heads_and_replicated():
    m = mesh.make_mesh(2, 1, 2)
    assert {p.shape for p in pieces(mesh.put(np.zeros((2, 5, 8, 4, 3)), mesh.cache_sharding(m))).values()} == {
        (1, 5, 8, 2, 3)
    }
    heads = mesh.put(np.zeros((2, 5, 4, 3)), mesh.heads_sharding(m))
    assert {p.shape for p in pieces(heads).values()} == {(1, 5, 2, 3)}
    assert {p.shape for p in pieces(mesh.put(np.float32(3), mesh.replicated(m))).values()} == {()}


def test_constraints_work_inside_jit():
    m = mesh.make_mesh(2, 2, 2)
    double = jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, mesh.batch_sharding(m)))
    out = double(np.ones((8, 2), np.float32))
    assert out.sharding.is_equivalent_to(mesh.batch_sharding(m), 2)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((0, 1, 1), "every axis must be at least 1, got data=0"),
        ((3, 3, 1), r"3\*3\*1=9 devices were asked for and 8 are there; the largest valid product is 8"),
    ],
)
def test_impossible_meshes(sizes, message):
    with pytest.raises(ValueError, match=message):
        mesh.make_mesh(*sizes)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((1, 1, 4), r"mesh.tensor=4 does not divide the model's kv_heads=2; the nearest valid value is 2"),
        ((1, 3, 1), r"mesh.fsdp=3 does not divide the model's embed=16; the nearest valid value is 2"),
    ],
)
def test_impossible_divisions(sizes, message):
    with pytest.raises(ValueError, match=message):
        mesh.check_divisible(mesh.make_mesh(*sizes), decoder.axes(MODEL), decoder.abstract(MODEL), "learner")


@pytest.mark.parametrize("tensor, near", [(8, 4), (7, 4), (3, 2)])
def test_the_nearest_tensor_divides_everything_that_it_splits(tensor, near):
    """Qwen2.5-7B: 28 heads, 4 kv_heads. 7 divides the heads alone."""
    qwen = decoder.ModelConfig(
        vocab_size=512, embed=3584, layers=1, heads=28, kv_heads=4, head_dim=128, ffw=18944, max_length=64
    )
    counts = {"heads": qwen.heads, "kv_heads": qwen.kv_heads}
    axes, shapes = decoder.axes(qwen), decoder.abstract(qwen)
    mesh.check_divisible(mesh.make_mesh(1, 1, near), axes, shapes, "engine", counts)
    with pytest.raises(ValueError, match=f"mesh.tensor={tensor} does not .*; the nearest valid value is {near}$"):
        mesh.check_divisible(mesh.make_mesh(1, 1, tensor), axes, shapes, "engine", counts)


def test_the_engine_does_not_divide_embed():
    mesh.check_divisible(mesh.make_mesh(1, 3, 1), decoder.axes(MODEL), decoder.abstract(MODEL), "engine")


def test_unknown_room_and_name():
    m = mesh.make_mesh(1, 1, 1)
    with pytest.raises(ValueError, match="room must be one of learner, engine, got 'kitchen'"):
        mesh.param_shardings(m, {"w": ("embed",)}, "kitchen")
    with pytest.raises(ValueError, match="unknown logical axis 'embd'"):
        mesh.param_shardings(m, {"w": ("embd",)}, "learner")


@pytest.mark.parametrize(
    "sizes, axis", [((4, 1, 1), "data"), ((1, 4, 1), "fsdp"), ((2, 1, 2), "data"), ((1, 2, 2), "fsdp")]
)
def test_a_mesh_in_two_keeps_replicas_whole(sizes, axis):
    """The last replicas go, each with all its devices, along the axis that splits the learner's weights."""
    whole = mesh.make_mesh(*sizes)
    stays, goes = mesh.divided(whole, mesh.replicas(whole) // 2, whole)
    ids = [[device.id for device in part.devices.flat] for part in (whole, stays, goes)]
    assert ids[1] + ids[2] == ids[0] and len(ids[1]) == len(ids[2]) == 2
    assert stays.shape["tensor"] == goes.shape["tensor"] == sizes[2] and goes.shape[axis] == 2 // sizes[2]


@pytest.mark.parametrize(
    "shards, fsdp, want", [(2, 1, (2, 1)), (2, 4, (1, 2)), (3, 2, (3, 1)), (6, 4, (3, 2)), (1, 8, (1, 1))]
)
def test_lent_shards_divide_what_the_learner_divides(shards, fsdp, want):
    assert mesh.along(shards, fsdp) == want


def test_of_three_replicas_one_goes():
    whole = mesh.make_mesh(3)
    stays, goes = mesh.divided(whole, 2, whole)
    assert (stays.size, goes.size) == (2, 1)


class Device:
    """One of several processes."""

    def __init__(self, id, process_index):
        self.id, self.process_index = id, process_index


def of_two(monkeypatch, sizes):
    """A mesh over the devices of two processes."""
    count = int(np.prod(sizes))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "local_device_count", lambda: count // 2)
    devices = np.array([Device(n, 2 * n // count) for n in range(count)], object).reshape(sizes)
    return SimpleNamespace(devices=devices, shape=dict(zip(("data", "fsdp", "tensor"), sizes)), size=devices.size)


def test_of_two_processes_each_keeps_half_of_its_replicas(monkeypatch):
    monkeypatch.setattr(mesh, "_mesh", lambda devices, sizes: ([device.id for device in devices], sizes))
    whole = of_two(monkeypatch, (4, 1, 1))
    assert mesh.divided(whole, 2, whole) == (([0, 2], (2, 1, 1, 1)), ([1, 3], (2, 1, 1, 1)))


@pytest.mark.parametrize(
    "sizes, apart",
    [
        ((2, 1, 1), False),
        ((1, 4, 1), False),
        ((2, 1, 2), False),
        ((2, 1, 4), False),
        ((1, 1, 4), False),
        ((4, 1, 1), True),
    ],
)
def test_what_several_processes_cannot_lend_is_one_sentence(sizes, apart, monkeypatch):
    """One replica a process, split weights, a replica that is all of a process or lies in both, devices of its own."""
    whole = of_two(monkeypatch, sizes)
    learner = of_two(monkeypatch, sizes) if apart else whole
    with pytest.raises(
        ValueError,
        match="scheduler.lend: each of 2 processes lends half of its replicas .* the nearest valid lend is 0",
    ):
        mesh.divided(whole, whole.size // sizes[2] // 2, learner)
