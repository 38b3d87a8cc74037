"""Arrays made piece by piece: each piece is read once, and blocks of rows may be cut anywhere."""

import jax
import numpy as np
import pytest

from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel import processes, relayout

HOST = np.arange(8 * 4 * 6, dtype=np.float32).reshape(8, 4, 6)


def home(sizes, names):
    return meshes.param_shardings(meshes.make_mesh(*sizes), {"w": names}, "learner")["w"]


@pytest.mark.parametrize("sizes, count", [((1, 4, 2), 8), ((2, 2, 1), 2), ((4, 1, 1), 1)])
def test_each_piece_is_read_once(sizes, count):
    there, read = home(sizes, ("embed", "heads", "head_dim")), []

    def of(index):
        read.append(index)
        return HOST[index]

    found = relayout.placed(HOST.shape, np.float32, there, of)
    assert len(read) == count and found.sharding == there
    assert np.array_equal(found, HOST)


@pytest.mark.parametrize("names", [("embed", "heads", "head_dim"), ("heads", "embed", None), (None, "embed", "heads")])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_blocks_of_rows_may_be_cut_anywhere(names, rows):
    there = home((1, 2, 2), names)
    blocks = (HOST[start : start + rows] for start in range(0, 8, rows))
    found = relayout.streamed(HOST.shape, np.float32, there, blocks)
    for shard in found.addressable_shards:
        assert np.array_equal(shard.data, HOST[shard.index])


def test_a_leaf_is_gathered_in_the_dtype_asked_for():
    placed = meshes.put(HOST, home((2, 2, 2), ("embed", "heads", "head_dim")))
    found = processes.gathered(placed, np.float16)
    assert found.dtype == np.float16 and np.array_equal(found, HOST.astype(np.float16))
    assert np.array_equal(processes.gathered(HOST, np.float32), HOST)


@pytest.mark.parametrize("shape, split", [((6, 8), 1), ((8, 3), 0), ((3, 5), None), ((), None)])
def test_a_host_holds_an_array_once_split_over_its_devices(shape, split):
    there = meshes.on_each_host(meshes.make_mesh(2, 2, 1), shape)
    piece = tuple(size // 4 if at == split else size for at, size in enumerate(shape))
    assert there.shard_shape(shape) == piece and there.device_set == set(jax.devices()[:4])
