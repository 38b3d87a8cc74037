"""A step whose processes have disks of their own: it is joined from small indexes, and reads as one step."""

from __future__ import annotations

import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from jaxrl_post.runs.checkpoint import disks
from jaxrl_post.runs.checkpoint.arrays import handler, named


@pytest.fixture
def given():
    keys = jax.random.split(jax.random.key(0), 40)
    return named({f"layer_{at:02d}": jax.random.normal(key, (64, 100)) for at, key in enumerate(keys)})


def test_arrays_are_joined_from_their_index_and_read_once_the_files_are_there(given, tmp_path, monkeypatch):
    monkeypatch.setattr(disks, "_FILE", 1 << 16)  # so that values fill many files
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    handler(given, disks._primary(0)).save(epath.Path(there), args=disks._asked(given))
    wrote = there / "ocdbt.process_0"
    assert not (there / "manifest.ocdbt").exists() and len([*(wrote / "d").iterdir()]) > 5
    text = disks._index(wrote)
    assert len(text) < 20_000 < sum(leaf.nbytes for leaf in given.values()) / 50
    disks._write_index(here / "ocdbt.process_0", text)
    handler(given, disks._primary(None)).finalize(epath.Path(here))
    shutil.rmtree(here / "ocdbt.process_0")
    assert sorted(path.name for path in here.iterdir()) == ["d", "manifest.ocdbt"]
    shutil.copytree(there, here, dirs_exist_ok=True)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in given.items()}
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:  # which knows nothing of the join
        found = reader.restore(here, args=ocp.args.StandardRestore(shapes))
    for name, leaf in given.items():
        np.testing.assert_array_equal(found[name], leaf)


def test_one_disk_is_kept_by_process_0_and_own_disks_by_each(monkeypatch):
    for index in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        assert disks.ONE_DISK.writes == (index == 0) and not disks.ONE_DISK.own
        assert disks.OwnDisks().writes and disks.OwnDisks().own
