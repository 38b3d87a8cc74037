"""Steps are whole or not there: kills at every file operation, every damage to every file, the traps of Orbax."""

import json
import os
import re
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxrl_post.checkpoint import identity, log_marks, signed_files, store
from jaxrl_post.checkpoint.background import Background
from jaxrl_post.checkpoint.host_state import read_state, write_state
from jaxrl_post.checkpoint.log_marks import rewind
from jaxrl_post.checkpoint.store import Checkpoints, SaveFailed, read_key
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.types import Prompt

ABOUT = {"config": {"a": 1}, "data": {}, "processes": 1}


def damage(path, key_of=None, **given):
    return store.damage(path, read_key(key_of or path.parent), **given)


class Killed(BaseException):
    pass


def tree(seed=0):
    noise = np.random.default_rng(seed)
    weights = {"w": jnp.asarray(noise.normal(size=(40, 30)), jnp.float32), "b": jnp.asarray([seed], jnp.bfloat16)}
    moments = (jnp.asarray(noise.normal(size=5), jnp.float32), None, {})
    return {"params": weights, "moments": moments, "step": jnp.int32(seed)}


def host(seed=0):
    return {"clock": seed, "values": np.arange(seed + 3, dtype=np.uint32)}


def saves(folder, keep_last=2, said=None):
    return Checkpoints(folder / "checkpoints", keep_last=keep_last, say=(said if said is not None else []).append)


def saved(folder, *steps, keep_last=3):
    out = saves(folder, keep_last)
    for step in steps:
        out.save(step, tree(step), host(step), ABOUT)
    return out


def same(found, step):
    assert found.step == step and found.host["clock"] == step
    assert found.host["values"].dtype == np.uint32 and found.host["values"].size == step + 3
    for a, b in zip(jax.tree.leaves(found.arrays(tree())), jax.tree.leaves(tree(step)), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name != store.KEY)


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


def test_orbax_restores_a_flipped_byte_and_the_manifest_finds_it(tmp_path):
    path = saved(tmp_path, 1).newest().path
    data = max((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    changed = bytearray(data.read_bytes())
    changed[len(changed) // 2] ^= 1
    data.write_bytes(changed)
    assert "the bytes of arrays/" in damage(path)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:  # the trap that the manifest is there for
        found = reader.restore(path / "arrays")
    assert found["params.w"].shape == (40, 30) and not np.array_equal(found["params.w"], tree(1)["params"]["w"])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


DAMAGES = {
    "flip": flip,
    "cut": lambda path: os.truncate(path, max(path.stat().st_size - 1, 0)),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "delete": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_to_any_file_is_found(tmp_path, how):
    path = saved(tmp_path, 1).newest().path
    files = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
    assert len(files) > 8
    for name in files:
        copy = tmp_path / path.name
        shutil.copytree(path, copy)
        DAMAGES[how](copy / name)
        assert damage(copy, path.parent), name
        assert how == "flip" or damage(copy, path.parent, contents=False), name
        shutil.rmtree(copy)
    assert damage(path) == ""


def test_a_manifest_that_forgot_a_file_is_found(tmp_path):
    """The files it still lists are all as they were written."""
    path = saved(tmp_path, 1).newest().path
    manifest = json.loads((path / "MANIFEST.json").read_text())
    lost = next(name for name in manifest["files"] if name.endswith("state.json"))
    del manifest["files"][lost]
    (path / "MANIFEST.json").write_text(json.dumps(manifest))
    assert (
        damage(path)
        == damage(path, contents=False)
        == "MANIFEST.json is not signed with this run's key: it was changed"
    )


def test_arrays_that_were_exchanged_between_steps_are_found(tmp_path):
    """The manifest is computed anew over the exchanged files, and signed with another key."""
    saved(tmp_path, 1, 2)
    one, two = (tmp_path / "checkpoints" / f"step_00000{n}" for n in (1, 2))
    shutil.rmtree(two / "arrays")
    shutil.copytree(one / "arrays", two / "arrays")
    (two / "MANIFEST.json").write_text(json.dumps(store.manifest(two, 2, bytes(32))))
    assert damage(two) == "MANIFEST.json is not signed with this run's key: it was changed"
    same(saves(tmp_path).newest(), 1)


def test_a_step_under_another_number_is_found(tmp_path):
    saved(tmp_path, 1, 2)
    folder = tmp_path / "checkpoints"
    (folder / "step_000002").rename(folder / "step_000009")
    said = []
    same(saves(tmp_path, said=said).newest(), 1)
    assert "step 9 is not used, because MANIFEST.json is of step 2" in said[0]


@pytest.mark.parametrize(
    "manifest, reason",
    [
        ({"files": {}}, "does not list about.json"),
        ({"files": {"about.json": {}}}, "is of step None"),
        ([], "does not list about.json"),
        ({"files": ["about.json"]}, "does not list about.json"),
        ({"files": {"about.json": 3}, "step": 1}, "is not signed"),
        ({"files": {"about.json": 3}, "step": 1, "signature": 7}, "is not signed"),
    ],
)
def test_a_manifest_made_by_hand_is_one_sentence(tmp_path, manifest, reason):
    path = saved(tmp_path, 1).newest().path
    (path / "MANIFEST.json").write_text(json.dumps(manifest))
    assert reason in damage(path)


def test_a_file_that_nobody_wrote_and_a_leftover_file_are_found(tmp_path):
    path = saved(tmp_path, 1).newest().path
    (tmp_path / "checkpoints" / "step_000002.part").write_text("a file, not a folder")
    same(saves(tmp_path).newest(), 1)
    assert names(tmp_path) == ["step_000001"]
    (path / "arrays" / "extra").write_text("x")
    assert damage(path) == "arrays/extra is not listed in MANIFEST.json"


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
    "error", [OSError(28, "No space left on device"), ValueError("RESOURCE_EXHAUSTED: Error writing")]
)
def test_a_disk_that_fills_during_a_save_leaves_nothing_of_it(tmp_path, monkeypatch, error):
    """Orbax raises a ValueError where the disk is full."""
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


def test_a_damaged_step_is_moved_aside_and_the_one_before_is_used(tmp_path):
    saved(tmp_path, 1, 2, 3)
    arrays = (tmp_path / "checkpoints" / "step_000003" / "arrays").rglob("*")
    flip(max(arrays, key=lambda file: file.is_file() * file.stat().st_size))
    (tmp_path / "checkpoints" / "step_000002" / "MANIFEST.json").unlink()
    said = []
    same(saves(tmp_path, said=said).newest(), 1)
    assert names(tmp_path) == ["step_000001", "step_000002.damaged-1", "step_000003.damaged-1"]
    assert len(said) == 2 and "CHECKPOINT DAMAGED: step 3 is not used, because the bytes of arrays/" in said[0]
    assert "step 2 is not used, because MANIFEST.json is missing" in said[1]
    saves(tmp_path).save(3, tree(3), host(3), ABOUT)  # the run comes by there again
    same(saves(tmp_path).newest(), 3)


def test_an_emptied_step_is_no_step(tmp_path):
    """What a kill in Orbax's own deletion leaves: its manager lists it."""
    saved(tmp_path, 1)
    (tmp_path / "checkpoints" / "step_000002" / "arrays").mkdir(parents=True)
    same(saves(tmp_path).newest(), 1)


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


def edited(**fields):
    """A change of a manifest that sets these fields."""
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    "change, reason",
    [
        (edited(signature="\u00e9" * 64), "is not signed"),
        (edited(signature=7), "is not signed"),
        (edited(step={"a": [[]]}), "is of step None"),
        (edited(step=2), "is of step 2"),
        (edited(files={}), "does not list about.json"),
        (lambda path: path.write_text("[" * 100_000), "unreadable .RecursionError"),
        (lambda path: (path.unlink(), path.mkdir()), "unreadable .IsADirectoryError"),
    ],
)
def test_a_manifest_made_by_hand_is_a_sentence(tmp_path, change, reason):
    saved(tmp_path, 1, 2, 3)
    change(tmp_path / "checkpoints" / "step_000003" / "MANIFEST.json")
    said = []
    same(saves(tmp_path, said=said).newest(), 2)
    assert len(said) == 1 and re.search(f"step 3 is not used, because .*{reason}", said[0])


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


def test_a_file_that_cannot_be_read_is_damage(tmp_path, monkeypatch):
    path = saved(tmp_path, 1).newest().path

    def failing(file, settle=False):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(signed_files, "_digest", failing)
    assert "cannot be read (Input/output error)" in damage(path)


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


def test_state_of_the_host(tmp_path):
    state = {
        "a": [1, 2.5, None, True, "x"],
        "b": {"c": np.arange(4, dtype=np.int64)[::2], "d": np.float32(0.1)},
        "e": np.zeros((0, 3), bool),
        "f": [np.uint32([7])],
        "pair": (1, 2),
    }
    write_state(tmp_path / "s", state)
    found = read_state(tmp_path / "s")
    assert found["a"] == state["a"] and found["pair"] == [1, 2] and found["b"]["d"] == float(np.float32(0.1))
    assert found["b"]["c"].dtype == np.int64 and found["b"]["c"].tolist() == [0, 2]
    assert found["e"].shape == (0, 3) and found["e"].dtype == bool and found["f"][0].tolist() == [7]


@pytest.mark.parametrize(
    "state, sentence",
    [
        ({"a": {1: 2}}, "the keys of state.a must be names"),
        ({"a": {"__array__": 2}}, "the keys of state.a must be names"),
        ({"a": [0, object()]}, r"state.a\[1\] is a object"),
        ({"a": np.array([None])}, "state.a is a ndarray"),
        ({"a": {2}}, "state.a is a set"),
    ],
)
def test_what_is_no_state(tmp_path, state, sentence):
    with pytest.raises(TypeError, match=sentence):
        write_state(tmp_path / "s", state)
    assert not (tmp_path / "s").exists()


def test_every_column_of_the_data_is_in_its_fingerprint():
    given = dict(
        id="1",
        tokens=[1, 2],
        answer="3",
        source="s",
        messages=({"role": "user", "content": "q"},),
        extra={"n": np.int64(4)},
    )
    one = identity.fingerprint("f.jsonl", 0, [Prompt(**given)])
    assert one == identity.fingerprint("f.jsonl", 0, [Prompt(**given)]) and one["length"] == 1
    changes = [("id", "2"), ("tokens", [1, 3]), ("answer", "4"), ("source", "t"), ("messages", ()), ("extra", {"n": 5})]
    digests = {identity.fingerprint("f.jsonl", 0, [Prompt(**given | {k: v})])["digest"] for k, v in changes}
    assert len(digests) == len(changes) and one["digest"] not in digests


def test_a_change_is_refused_field_by_field():
    then = {
        "config": {"steps": 12, "seed": 0, "run_dir": "a", "optimizer": {"lr": 0.1, "b1": 0.9}},
        "data": {"train": {"length": 5}},
        "processes": 1,
        "versions": {"jax": "1"},
    }
    now = json.loads(json.dumps(then))
    now["config"] |= {"steps": 24, "run_dir": "b"}
    now["versions"]["jax"] = "2"
    identity.check_same(then, now, 6)
    now["config"]["optimizer"] = {"lr": 0.2, "b2": 0.9}
    now["data"]["train"]["length"], now["config"]["steps"] = 6, 8
    with pytest.raises(ValueError) as refused:
        identity.check_same(then, now, 6)
    said = str(refused.value)
    for part in (
        'optimizer.b1 0.9 -> "absent"',
        'optimizer.b2 "absent" -> 0.9',
        "optimizer.lr 0.1 -> 0.2",
        "steps 12 -> 8",
        "data.train.length 5 -> 6",
        "step 6 was saved under the first",
    ):
        assert part in said
    assert "seed" not in said and 'run_dir "' not in said and "\n" not in said


def logs(folder, rows):
    """A run's logs after `rows` rows of each."""
    for sub in ("rollouts", "evaluations", "completions"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
        for n in range(rows):
            (folder / sub / f"step_{n:06d}.npz").write_bytes(b"x")
    for name in log_marks.LOGS:
        (folder / name).write_text("".join(json.dumps({"file": f"step_{n:06d}.npz"}) + "\n" for n in range(rows)))


def listed(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_logs_go_back_to_where_they_were(tmp_path):
    logs(tmp_path, 3)
    before, to = listed(tmp_path), log_marks.marks(tmp_path)
    logs(tmp_path, 5)
    (tmp_path / "rollouts" / "step_000005.npz").write_bytes(b"written, and not yet in the index")
    (tmp_path / "rollouts" / "step_000006.npz.part").write_bytes(b"half")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "half a li')
    rewind(tmp_path, to)
    assert listed(tmp_path) == before
    rewind(tmp_path, {})
    assert listed(tmp_path) == {}
    rewind(tmp_path, {})


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


def test_a_log_that_lost_lines_is_refused_and_nothing_is_cut(tmp_path):
    logs(tmp_path, 3)
    to = log_marks.marks(tmp_path)
    logs(tmp_path, 5)
    os.truncate(tmp_path / "rewards.jsonl", 10)
    before = listed(tmp_path)
    with pytest.raises(ValueError, match="rewards.jsonl has 10 bytes, the checkpoint knows of 84"):
        rewind(tmp_path, to)
    assert listed(tmp_path) == before


def test_the_code_of_reward_functions_is_part_of_a_run(tmp_path):
    (tmp_path / "mine.py").write_text("def score(): return 1\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "graders.py").write_text("def fn(): return 1\n")
    functions = (f"{tmp_path}/mine.py:score", "pack.graders:fn", "jaxrl_post.rewards.math:exact", "made.up:fn")
    before = identity.reward_code(functions, ["", str(tmp_path)])
    assert list(before) == list(functions[:2])
    identity.check_same({"reward_code": before}, {"reward_code": dict(before)}, 3)
    (tmp_path / "pack" / "graders.py").write_text("def fn(): return 2\n")
    after = identity.reward_code(functions, ["", str(tmp_path)])
    with pytest.raises(ValueError, match=r"resume refused: reward_code.pack.graders:fn \"[0-9a-f]{32}\" -> "):
        identity.check_same({"reward_code": before}, {"reward_code": after}, 3)


def test_a_save_in_the_background_is_of_the_moment_at_which_it_began(tmp_path, monkeypatch):
    """While the thread waits, the arrays are donated and the host's state goes on."""
    begun, on = threading.Event(), threading.Event()
    real = store.write_state

    def waiting(*args):
        begun.set()
        assert on.wait(60)
        real(*args)

    monkeypatch.setattr(store, "write_state", waiting)
    ours, state, there, ended = saves(tmp_path), tree(3), host(3), []
    with Background(ours, lambda: ended.append(threading.current_thread().name)) as saver:
        saver.save(3, state, there, ABOUT)
        assert begun.wait(60) and ours.steps() == []
        state = jax.tree.map(jax.jit(lambda x: x + 1, donate_argnums=0), state)
        there["values"][:] = 9
        there["clock"] = 9
        on.set()
        saver.join()
        assert ours.steps() == [3] and ended == ["checkpoint_0"]
        saver.save(4, state, host(4), ABOUT)
    assert saves(tmp_path).newest().step == 4  # the end of the context waited for it
    shutil.rmtree(tmp_path / "checkpoints" / "step_000004")
    same(saves(tmp_path).newest(), 3)


def test_a_save_that_failed_in_the_background_ends_the_run_at_the_next_one(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_state", full)
    said = []
    ours = Checkpoints(tmp_path / "checkpoints", keep_last=2, say=said.append, max_failures=2)
    with Background(ours) as saver:
        saver.save(1, tree(1), host(1), ABOUT)
        saver.save(2, tree(2), host(2), ABOUT)
        with pytest.raises(store.SaveFailed, match="2 saves in a row failed"):
            saver.save(3, tree(3), host(3), ABOUT)
        saver.join()
    assert len(said) == 1 and "step 1 was not saved" in said[0] and names(tmp_path) == []
