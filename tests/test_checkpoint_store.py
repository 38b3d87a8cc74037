"""Steps are whole or not there: kills at every file operation, full disks, keys, and what is kept."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from saved_steps import ABOUT, host, names, same, saved, saves, tree

from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.runs.checkpoint import store
from jaxrl_post.runs.checkpoint.store import SaveFailed


class Killed(BaseException):
    pass


def test_what_was_saved_comes_back(tmp_path):
    assert saves(tmp_path).newest() is None
    found = saved(tmp_path, 3, 7).newest()
    same(found, 7)
    assert jax.tree.structure(found.arrays(tree())) == jax.tree.structure(tree())
    assert found.about == ABOUT | {"step": 7, "arrays": found.about["arrays"]}
    listed = json.loads((found.path / "MANIFEST.json").read_text())["files"]
    there = {path.relative_to(found.path).as_posix() for path in found.path.rglob("*") if path.is_file()}
    assert set(listed) == there - {"MANIFEST.json"}


def test_onto_another_sharding(tmp_path):
    saved(tmp_path, 1)
    rows = meshes.batch_sharding(meshes.make_mesh(fsdp=4))
    like = tree()
    like["params"]["w"] = jax.ShapeDtypeStruct((40, 30), jnp.float32, sharding=rows)
    found = saves(tmp_path).newest().arrays(like)["params"]["w"]
    assert found.sharding == rows and np.array_equal(found, tree(1)["params"]["w"])


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t | {"more": t["step"]},
        lambda t: t | {"step": jnp.float32(0)},
        lambda t: t | {"params": {"w": t["params"]["w"][:30], "b": t["params"]["b"]}},
    ],
    ids=["name", "dtype", "shape"],
)
def test_another_tree_is_refused(tmp_path, change):
    """Orbax would cast and cut without a word."""
    saved(tmp_path, 1)
    with pytest.raises(ValueError, match="it belongs to another model or optimizer"):
        saves(tmp_path).newest().arrays(change(tree()))


def test_a_numpy_scalar_is_refused(tmp_path):
    with pytest.raises(TypeError, match="params.w is a float32, only jax arrays are saved"):
        saves(tmp_path).save(1, {"params": {"w": np.float32(1)}}, {}, {})
    assert not (tmp_path / "checkpoints").exists()


def test_without_its_key_no_step_is_moved(tmp_path):
    saved(tmp_path, 1)
    (tmp_path / "checkpoints" / store.KEY).unlink()
    with pytest.raises(ValueError, match="without it no checkpoint can be verified"):
        saves(tmp_path).newest()
    assert names(tmp_path) == ["step_000001"]


def test_the_key_is_the_owners_alone(tmp_path):
    saved(tmp_path, 1)
    assert (tmp_path / "checkpoints" / store.KEY).stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_said_retried_and_ends_the_run_in_the_end(tmp_path, monkeypatch):
    said = []
    ours = saves(tmp_path, said=said)
    ours.save(1, tree(1), host(1), ABOUT)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(store.shutil, "disk_usage", lambda path: usage._replace(free=1000))
        ours.save(2, tree(2), host(2), ABOUT)
        ours.save(3, tree(3), host(3), ABOUT)
    assert [line.split(":")[0] for line in said] == ["CHECKPOINT FAILED"] * 2
    assert "and 1,000 are free" in said[0] and "the newest whole one is step 1" in said[0]
    ours.save(4, tree(4), host(4), ABOUT)  # there is room again, and the count begins anew
    with monkeypatch.context() as patch:
        patch.setattr(store.shutil, "disk_usage", lambda path: usage._replace(free=1000))
        ours.save(5, tree(5), host(5), ABOUT)
        ours.save(6, tree(6), host(6), ABOUT)
        with pytest.raises(SaveFailed, match="the newest whole one is step 4; 3 saves in a row failed"):
            ours.save(7, tree(7), host(7), ABOUT)
    same(saves(tmp_path).newest(), 4)


def test_a_step_is_saved_although_an_older_one_cannot_be_removed(tmp_path, monkeypatch):
    said, real = [], os.replace

    def refuse(path, to):
        if str(to).endswith(".gone"):
            raise OSError(5, "Input/output error", str(path), None, str(to))
        real(path, to)

    ours = saves(tmp_path, said=said)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        for step in (1, 2, 3, 4, 5):  # more than max_failures
            ours.save(step, tree(step), host(step), ABOUT, last=True)
    assert len(said) == 3 and said[0].startswith("CHECKPOINT: step 3 is saved, and an older one cannot be removed: ")
    assert "step_000001.gone" in said[0] and ours.lost == ""
    ours.save(6, tree(6), host(6), ABOUT)
    assert names(tmp_path) == ["step_000005", "step_000006"] and len(said) == 3
    same(saves(tmp_path).newest(), 6)


def test_a_failed_save_after_which_nothing_can_be_read_is_a_line_too(tmp_path):
    said = []
    ours = saves(tmp_path, said=said)
    ours.save(1, tree(1), host(1), ABOUT)
    (tmp_path / "checkpoints" / ".key").unlink()
    ours.save(2, tree(2), host(2), ABOUT)
    assert len(said) == 1 and said[0].startswith("CHECKPOINT FAILED: step 2 was not saved") and ".key" in said[0]


def test_a_folder_that_cannot_be_changed_is_one_sentence(tmp_path, monkeypatch):
    saved(tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "step_000002" / "about.json").unlink()

    def refuse(path, aside):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(
        ValueError, match="resume: the checkpoints cannot be taken up: .*Permission denied.*step_000002"
    ):
        saves(tmp_path).newest()


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        ValueError("RESOURCE_EXHAUSTED: Error writing"),
        NotImplementedError("UNIMPLEMENTED: Error writing: Invalid cross-device link"),
    ],
)
def test_a_disk_that_fills_during_a_save_leaves_nothing_of_it(tmp_path, monkeypatch, error):
    """Orbax raises a ValueError where the disk is full, and a NotImplementedError where the file system has no such rename."""
    said = []
    ours = saves(tmp_path, said=said)
    ours.save(1, tree(1), host(1), ABOUT)

    def full(*args, **kwargs):
        (tmp_path / "checkpoints" / "step_000002.part" / "arrays").mkdir()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(ocp.Checkpointer, "save", full)
        ours.save(2, tree(2), host(2), ABOUT)
    assert names(tmp_path) == ["step_000001"] and len(said) == 1
    ours.save(3, tree(3), host(3), ABOUT)
    same(saves(tmp_path).newest(), 3)


def test_the_reason_of_a_long_error_is_kept():
    """tensorstore says it after the places of files, and before a list of its options."""
    places = " ".join(f'Error writing "/a/long/path/of/a/run/{number}":' for number in range(20))
    said = store._one_line(
        ValueError(f"UNKNOWN: {places}\nInput/output error [os_error_code='5'] [tensorstore_spec='{{}}']")
    )
    assert said.startswith("UNKNOWN: Error writing") and said.endswith('/run/19": Input/output error')
    assert len(said) <= 300


def test_nothing_whole_is_not_nothing_saved(tmp_path):
    """Starting over would cut the logs of a long run to nothing."""
    saved(tmp_path, 4)
    (tmp_path / "checkpoints" / "step_000004" / "about.json").unlink()
    for _ in range(2):  # also when it is asked again
        with pytest.raises(ValueError, match="every checkpoint in .* is damaged .step_000004.damaged-1"):
            saves(tmp_path).newest()
    shutil.rmtree(tmp_path / "checkpoints" / "step_000004.damaged-1")
    assert saves(tmp_path).newest() is None


def test_the_last_two_whole_ones_stay_until_there_is_a_newer_one(tmp_path):
    ours = saved(tmp_path, 1, 2, keep_last=2)
    (tmp_path / "checkpoints" / "step_000002" / "about.json").unlink()  # so that 1 is the only whole one
    ours.save(3, tree(3), host(3), ABOUT)
    assert names(tmp_path) == ["step_000001", "step_000002", "step_000003"]
    ours.save(4, tree(4), host(4), ABOUT)
    assert names(tmp_path) == ["step_000002", "step_000003", "step_000004"]


def test_a_renamed_step_is_none_and_files_in_the_way_are_no_steps(tmp_path):
    saved(tmp_path, 1, 2)
    steps = tmp_path / "checkpoints"
    (steps / "step_000002").rename(steps / "step_0000002")  # the same number, with more zeros
    for name in ("step_000003.part", "step_000004.gone"):
        (steps / name).write_text("a file")
    (steps / "step_000005").write_text("a file")
    said = []
    same(saves(tmp_path, said=said).newest(), 1)
    assert len(said) == 1 and "step 5 is not used, because MANIFEST.json is missing" in said[0]
    assert names(tmp_path) == ["step_0000002", "step_000001", "step_000005.damaged-1"]


def test_another_key_moves_no_step_aside(tmp_path):
    saved(tmp_path, 1, 2)
    key = tmp_path / "checkpoints" / store.KEY
    right = key.read_text()
    key.write_text("0" * 64)
    with pytest.raises(ValueError, match="no checkpoint in .* is signed with .key, the key of the run"):
        saves(tmp_path).newest()
    key.write_text(right)
    same(saves(tmp_path).newest(), 2)


def test_killed_at_every_file_operation_of_a_save(tmp_path, monkeypatch):
    """After each kill the newest step is 2 or, once it has its name, 3; and the save can be done again."""
    operations = [
        (store.os, "replace"),
        (store.shutil, "rmtree"),
        (store, "write_state"),
        (store, "manifest"),
        (store, "_write_json"),
        (store, "_settle"),
        (ocp.Checkpointer, "save"),
    ]
    count = {"left": 0, "made": 0}

    def counted(real):
        def call(*args, **kwargs):
            count["left"] -= 1
            if count["left"] == 0:
                raise Killed
            return real(*args, **kwargs)

        return call

    found, kills = [], 0
    for at in range(1, 200):
        folder = tmp_path / str(at)
        saved(folder, 1, 2)
        with monkeypatch.context() as patch:
            for owner, name in operations:
                patch.setattr(owner, name, counted(getattr(owner, name)))
            count["left"] = at
            try:
                saves(folder).save(3, tree(3), host(3), ABOUT)
                break
            except Killed:
                kills += 1
        newest = saves(folder).newest()
        same(newest, newest.step)
        found.append(newest.step)
        assert names(folder) in (
            ["step_000001", "step_000002"],
            ["step_000001", "step_000002", "step_000003"],
            ["step_000002", "step_000003"],
        )
        if newest.step == 2:
            saves(folder).save(3, tree(3), host(3), ABOUT)
            same(saves(folder).newest(), 3)
    assert kills > 7 and found == sorted(found) and set(found) == {2, 3}


def test_what_was_saved_can_still_be_donated_in_place(tmp_path):
    """Sharded, replicated and on one device; a program that donates it writes into the very same buffers."""
    mesh = meshes.make_mesh(2, 1, 1)
    state = {
        "sharded": jax.device_put(jnp.ones((64, 300)), meshes.batch_sharding(mesh)),
        "replicated": jax.device_put(jnp.ones((300, 7)), meshes.replicated(mesh)),
        "alone": jnp.ones((300, 300)),
    }

    def buffers():
        return [shard.data.unsafe_buffer_pointer() for leaf in state.values() for shard in leaf.addressable_shards]

    moved = {
        name: jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=leaf.sharding) for name, leaf in state.items()
    }
    for step in (1, 2):
        state = {name: moved[name](leaf) for name, leaf in state.items()}
        before = buffers()
        saves(tmp_path).save(step, state, host(), ABOUT)
        state = {name: moved[name](leaf) for name, leaf in state.items()}
        assert buffers() == before
    found = saves(tmp_path).newest().arrays(state)
    assert all(float(leaf.max()) == float(leaf.min()) == 4.0 for leaf in found.values())
