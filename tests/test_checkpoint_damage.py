"""Every damage to every file of a step, and the traps of Orbax: found, said, and moved aside."""

import json
import os
import re
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
from saved_steps import ABOUT, host, names, same, saved, saves, tree

from jaxrl_post.runs.checkpoint import signed_files, store
from jaxrl_post.runs.checkpoint.store import read_key


def damage(path, key_of=None, **given):
    return store.damage(path, read_key(key_of or path.parent), **given)


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


def test_a_file_that_cannot_be_read_is_damage(tmp_path, monkeypatch):
    path = saved(tmp_path, 1).newest().path

    def failing(file, settle=False):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(signed_files, "_digest", failing)
    assert "cannot be read (Input/output error)" in damage(path)


@pytest.mark.parametrize(
    "error, told", [(Exception("long"), "an array cannot be read: cut short"), (KeyError("w"), "w")]
)
def test_a_read_that_fails_behind_the_verification_is_an_error_that_callers_catch(tmp_path, monkeypatch, error, told):
    """Orbax raises the class Exception where bytes of an array are gone: orbax-checkpoint 0.12."""
    found = saved(tmp_path, 1).newest()

    def failing(*args, **how):
        raise error from ValueError("cut\nshort")

    monkeypatch.setattr(ocp.Checkpointer, "restore", failing)
    with pytest.raises((ValueError, KeyError), match=told):
        found.arrays(tree())
