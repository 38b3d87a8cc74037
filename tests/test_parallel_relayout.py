"""Arrays on their way between shardings: every bit arrives, none of it through the host, and links are counted."""

import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel import relayout

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
import host_bytes

AXES = {"embed": ("vocab", "embed"), "up": ("embed", "ffw"), "norm": (None,)}
AWKWARD = np.array([0x80000000, 0x00000001, 0x7F7FFFFF, 0xFF800000, 0x3F800000, 0xBF7FFFFF], np.uint32).view(np.float32)
HOST = {name: np.resize(AWKWARD, (8,) * len(axes)) for name, axes in AXES.items()}


def mesh(first, data, fsdp, tensor):
    devices = np.array(jax.devices()[first : first + data * fsdp * tensor]).reshape(data, fsdp, 1, tensor)
    return Mesh(devices, meshes.AXES, axis_types=(AxisType.Auto,) * 4)


def turned(data, fsdp, tensor):
    """The same devices in another order, as on a ring."""
    return Mesh(mesh(0, data, fsdp, tensor).devices[:, ::-1], meshes.AXES, axis_types=(AxisType.Auto,) * 4)


def homes(of, room):
    return jax.tree.leaves(meshes.param_shardings(of, AXES, room))


def learned(of):
    return jax.tree.leaves(meshes.put(HOST, meshes.param_shardings(of, AXES, "learner")))


def assert_arrived(leaves, there):
    for leaf, home, host in zip(leaves, there, jax.tree.leaves(HOST), strict=True):
        assert leaf.sharding.is_equivalent_to(home, leaf.ndim)
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data).view(np.uint32), host[shard.index].view(np.uint32))


SAME = [
    (mesh(0, 1, 4, 1), mesh(0, 4, 1, 1)),
    (mesh(0, 1, 2, 2), mesh(0, 2, 1, 2)),
    (mesh(0, 1, 4, 2), mesh(0, 2, 1, 4)),
]
TURNED = [(mesh(0, 1, 4, 1), turned(1, 4, 1)), (turned(1, 2, 2), mesh(0, 4, 1, 1))]
OTHER = [
    (mesh(0, *sizes), mesh(4, *engine))
    for sizes, engine in itertools.product(
        ((1, 4, 1), (1, 2, 2), (2, 2, 1)), ((4, 1, 1), (2, 1, 2), (2, 1, 1), (3, 1, 1))
    )
]
OVERLAPPING = [
    (mesh(0, 1, 4, 1), mesh(0, 2, 1, 1)),
    (mesh(0, 2, 1, 2), mesh(2, 2, 1, 2)),
    (mesh(2, 1, 2, 1), mesh(0, 4, 1, 1)),
]


@pytest.mark.parametrize("source, engine", SAME + TURNED + OTHER + OVERLAPPING)
def test_every_bit_arrives_and_none_passes_the_host(source, engine):
    leaves, there = learned(source), homes(engine, "engine")
    with host_bytes.counted() as found, jax.transfer_guard_host_to_device("disallow_explicit"):
        arrived = jax.block_until_ready([relayout.brought_to(leaf, home) for leaf, home in zip(leaves, there)])
    assert found.weights == 0
    assert_arrived(arrived, there)
    for leaf, host in zip(leaves, jax.tree.leaves(HOST)):
        np.testing.assert_array_equal(np.asarray(leaf), host)


def test_the_way_through_the_host_is_counted_and_refused():
    """Of jax.device_put alone, so that the counter and the guard are known to see it."""
    leaf, home = learned(mesh(0, 1, 4, 1))[0], homes(mesh(0, 4, 1, 1), "engine")[0]
    with host_bytes.counted() as found:
        jax.block_until_ready(jax.device_put(leaf, home, may_alias=False))
    assert found.down == leaf.nbytes and found.up == 4 * leaf.nbytes
    leaf = learned(mesh(0, 1, 4, 1))[0]
    with (
        pytest.raises(Exception, match="Disallowed host-to-device"),
        jax.transfer_guard_host_to_device("disallow_explicit"),
    ):
        jax.device_put(leaf, home, may_alias=False)


def test_copies_share_no_memory_with_what_they_were_made_of():
    """The learner donates its weights at its next step. The norms need not move at all."""
    leaves, there = learned(mesh(0, 1, 4, 1)), homes(mesh(0, 4, 1, 1), "engine")
    made = relayout.relaid(leaves, there)
    for leaf in leaves:
        leaf.delete()
    assert_arrived(made, there)
    narrow = relayout.relaid(learned(mesh(0, 1, 4, 1)), there, jnp.dtype(jnp.bfloat16))
    assert [leaf.dtype for leaf in narrow] == [jnp.bfloat16] * 3


def test_groups_have_a_bound_and_leaves_of_one_kind_come_together(monkeypatch):
    where = meshes.param_shardings(mesh(0, 1, 2, 1), {"w": ("embed", "ffw")}, "learner")["w"]
    leaves = [meshes.put(np.zeros((4, width), np.float32), where) for width in (8, 2, 8, 2, 8, 64)]
    monkeypatch.setattr(relayout, "GROUP", 300)
    found = relayout.groups(leaves, [where] * 6)
    assert found == [[0, 2], [4, 1, 3], [5]]  # of 128, 128; 128, 32, 32; 1,024 bytes
    assert relayout.groups([], []) == []


def test_links_of_a_swap_by_hand():
    """[8, 8] float32 is 256 bytes: 64 a piece over fsdp=4. Each of 4 devices has one piece and needs the other three."""
    leaf = learned(mesh(0, 1, 4, 1))[0]
    home = homes(mesh(0, 4, 1, 1), "engine")[0]
    found = relayout.links([leaf], [home], np.float32)
    assert found == {"in place": 256, "between devices of a process": 768, "between processes": 0, "between slices": 0}
    apart = relayout.links([leaf], [homes(mesh(4, 2, 1, 1), "engine")[0]], jnp.bfloat16)
    assert apart == {"in place": 0, "between devices of a process": 256, "between processes": 0, "between slices": 0}


def test_links_between_processes_and_slices():
    class Device:
        def __init__(self, process_index, slice_index):
            self.process_index, self.slice_index = process_index, slice_index

    first, second, third = Device(0, 0), Device(1, 0), Device(1, 1)
    pairs = ((first, first), (first, second), (second, third))
    found = [relayout.LINKS[relayout.distance(*pair)] for pair in pairs]
    assert found == ["in place", "between processes", "between slices"]


def test_a_piece_that_no_device_of_the_process_has_is_one_sentence():
    leaf = learned(mesh(0, 1, 4, 1))[0]
    with pytest.raises(ValueError, match="device 4 of process 0 needs a piece that no device of its process has"):
        relayout._pieces(leaf, homes(mesh(4, 1, 2, 1), "learner")[0])
