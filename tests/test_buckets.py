"""Runs in a bucket: objects, record, pieces and mirror against emulators in processes of their own, through faults."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bucket_server
import faulty_proxy

from jaxrl_post.config.address import Address, parse
from jaxrl_post.runs.buckets import files, record, tree
from jaxrl_post.runs.buckets.followers import Behind
from jaxrl_post.runs.buckets.mirror import Mirror
from jaxrl_post.runs.buckets.objects import Objects
from jaxrl_post.runs.buckets.store import Changed, Unreachable


@pytest.fixture(scope="module", params=["gs", "s3"])
def scheme(request):
    return request.param


@pytest.fixture(scope="module")
def server(scheme):
    with bucket_server.emulator(scheme) as port:
        yield port


@pytest.fixture
def open_at(monkeypatch, request, scheme):
    """Opens the objects of this test at a port."""

    def opened(port: int, patience_s: float = 20.0) -> Objects:
        for name, value in bucket_server.environment(scheme, port).items():
            monkeypatch.setenv(name, value)
        name = hashlib.blake2b(request.node.nodeid.encode(), digest_size=8).hexdigest()
        return Objects(Address(bucket=bucket_server.BUCKET, name=f"runs/{name}", scheme=scheme), patience_s)

    return opened


def _kept(objects: Objects) -> set[str]:
    """Returns the names of all objects but the record, which is several ones in some stores."""
    return {name for name in objects.names("") if not name.startswith(record.NAME)}


def _step(folder: Path, number: int, size: int = 1000) -> None:
    """Saves a step as runs/checkpoint/store.py does: under another name first."""
    part = folder / "checkpoints" / f"step_{number:06d}.part"
    part.mkdir(parents=True)
    (part / "arrays").write_bytes(number.to_bytes(2, "big") * (size // 2))
    part.rename(part.with_suffix(""))


def _files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _until(true, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ---- objects


@pytest.mark.parametrize("bad", ["gs://", "gs://bucket", "gs://bucket/", "gs://B/x", "gs://b/a//b", "gs://bucket/../x"])
def test_no_place_in_a_bucket_is_refused(bad):
    with pytest.raises(ValueError, match=r"--run-dir='gs://.*' is no place in a bucket: write gs://BUCKET/NAME"):
        parse(bad, "--run-dir")


def test_an_address_is_read():
    assert parse("gs://my-bucket/runs/demo/", "x") == Address(bucket="my-bucket", name="runs/demo")


def test_a_change_needs_the_generation_that_it_names(server, open_at):
    objects = open_at(server)
    first = objects.replace("a", b"one", objects.current("a").generation)
    with pytest.raises(Changed):
        objects.replace("a", b"two", 0)
    second = objects.replace("a", b"two", first)
    with pytest.raises(Changed):
        objects.replace("a", b"three", first)
    found = objects.current("a")
    assert (found.data, found.generation) == (b"two", second)
    objects.drop("a", second)
    assert objects.current("a").data == b""


def test_an_object_is_created_once(server, open_at):
    objects = open_at(server)
    objects.create("a", b"one")
    with pytest.raises(Changed):
        objects.create("a", b"two")
    assert objects.read("a") == b"one" and objects.read("b") is None and objects.names("") == ["a"]
    objects.write("a", b"three")
    assert objects.read("a") == b"three"
    objects.delete("a")
    objects.delete("a")
    assert objects.names("") == []


def test_a_bucket_that_is_not_there_is_said(server, open_at, scheme):
    open_at(server)
    other = Objects(Address(bucket="other", name="run", scheme=scheme))
    for write in (lambda: other.write("a", b""), lambda: other.replace("a", b"", 0)):
        with pytest.raises(ValueError, match="there is no bucket other; make it first"):
            write()


def test_a_server_that_is_not_there_is_unreachable(open_at):
    objects = open_at(bucket_server.free_port(), patience_s=0.5)
    with pytest.raises(Unreachable, match=r"\w\w://bucket/runs/.* does not answer"):
        objects.read("a")


@pytest.mark.parametrize("share", [0.3])
def test_reads_and_writes_survive_every_kind_of_fault(server, open_at, share):
    with bucket_server.proxy(server, share, seed=3) as port:
        objects = open_at(port, patience_s=60.0)
        for number in range(30):
            data = os.urandom(3000)
            objects.write(f"{number:03d}", data)
            assert objects.read(f"{number:03d}") == data
        done = bucket_server.faults(port)
    assert all(done[kind] for kind in faulty_proxy.KINDS) and done["calls"] > 60
    assert open_at(server).names("") == [f"{number:03d}" for number in range(30)]


# ---- the record


def test_a_held_run_is_refused_with_its_holder_and_a_dead_ones_is_taken(server, open_at, monkeypatch):
    objects = open_at(server)
    monkeypatch.setattr(record, "_POLL_S", 0.05)
    held = record.take(objects, print)
    over = threading.Event()

    def renew() -> None:
        while not over.wait(0.2):
            held.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    said: list[str] = []
    with pytest.raises(
        ValueError, match=rf"is in use by process {os.getpid()} on host .* since .*; end that one first"
    ):
        record.take(objects, said.append)
    over.set()
    thread.join()
    assert len(said) == 1 and "waits for the lease of process" in said[0]
    monkeypatch.setattr(record, "_ended", lambda holder: True)  # the process of the holder has ended on this machine
    assert record.take(objects, said.append).state.term == held.state.term + 1 and len(said) == 1


def test_a_lease_that_nobody_renews_is_taken_when_it_ends(server, open_at, monkeypatch):
    monkeypatch.setattr(record, "LEASE_S", 1.0)
    monkeypatch.setattr(record, "_POLL_S", 0.05)
    objects = open_at(server)
    first, begun = record.take(objects, print), time.monotonic()
    second = record.take(objects, print)
    assert time.monotonic() - begun > 0.9 and second.state.term == 2
    with pytest.raises(record.Taken, match="was taken over by process .*: this run stops, and writes there no more"):
        first.commit(record.Commit(tree="trees/x", step=1))
    assert record.read(objects).commits == ()
    second.commit(record.Commit(tree="trees/y", step=1))
    assert [one.tree for one in record.read(objects).commits] == ["trees/y"]


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_a_live_run_is_not_taken_by_a_host_whose_clock_differs(server, open_at, monkeypatch, ahead):
    """The holder's clock is an hour behind or ahead. While it renews, its run is refused. Then it is taken after a wait."""
    monkeypatch.setattr(record, "LEASE_S", 1.2)
    monkeypatch.setattr(record, "LAPSED_S", 0.8)
    monkeypatch.setattr(record, "_POLL_S", 0.05)
    objects, real, over = open_at(server), time.time, threading.Event()
    holder = {threading.get_ident()}
    monkeypatch.setattr(time, "time", lambda: real() + ahead * (threading.get_ident() in holder))
    held = record.take(objects, print)

    def renew() -> None:
        holder.add(threading.get_ident())
        while not over.wait(0.2):
            held.renew()

    holder.clear()  # this thread is the other host now
    thread = threading.Thread(target=renew)
    thread.start()
    with pytest.raises(ValueError, match="is in use by process"):
        record.take(objects, print)
    over.set()
    thread.join()
    assert abs(record.read(objects).until - real()) > 3000
    begun = time.monotonic()
    assert record.take(objects, print).state.term == 2
    assert (0.7 if ahead < 0 else 1.1) < time.monotonic() - begun < 10.0


def test_the_machine_tells_a_live_process_from_a_dead_one():
    mine = record._myself()
    assert not record._ended(mine)
    assert record._ended(mine | {"began": "1"}) and record._ended(mine | {"pid": 1 << 22})
    assert not record._ended(mine | {"host": "another", "pid": 1 << 22})
    assert not record._ended(mine | {"machine": "another", "pid": 1 << 22})
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not collected yet
    assert record._began(child.pid) == ""
    child.wait()


@pytest.mark.parametrize("seed", range(2))
def test_no_change_is_lost_or_doubled_where_answers_are(server, open_at, seed):
    with bucket_server.proxy(server, 0.4, seed) as port:
        objects = open_at(port, patience_s=60.0)
        held = record.take(objects, print)
        for number in range(1, 9):
            held.renew()
            kept = held.commit(record.Commit(tree=f"trees/{number}", step=number))
            assert [one.step for one in kept] == [number, number - 1][: min(number, 2)]
        held.release()
    now = record.read(open_at(server))
    assert [one.step for one in now.commits] == [8, 7] and now.holder == {} and now.term == 1


def test_a_run_that_never_began_leaves_no_holder(server, open_at, scheme):
    objects = open_at(server)
    record.take(objects, print).release()
    now = record.read(objects)
    assert (now.holder, now.commits, now.term) == ({}, (), 0) and _kept(objects) == set()
    assert scheme != "gs" or objects.names("") == []


# ---- pieces and trees


def test_a_folder_comes_back_as_it_was_and_only_new_pieces_are_uploaded(server, open_at, tmp_path, monkeypatch):
    monkeypatch.setattr(tree, "PIECE", 100)
    objects, folder = open_at(server), tmp_path / "run"
    _step(folder, 3, size=350)
    (folder / "empty").write_bytes(b"")
    (folder / "log.jsonl").write_bytes(os.urandom(250))
    (folder / ".lock").write_bytes(b"mine")
    (folder / "config.json.part").write_bytes(b"half")
    (folder / "checkpoints" / "step_000004.part").mkdir()
    (folder / "checkpoints" / "step_000004.part" / "arrays").write_bytes(b"half")
    uploads = tree.Uploads(objects, 1)
    found = uploads.part(folder, tmp_path / "linked").files
    assert sorted(found) == ["checkpoints/step_000003/arrays", "empty", "log.jsonl"] and tree.newest(found) == 3
    before = objects.names(tree.PIECES)
    assert len(before) == 2 + 3  # of equal pieces there is one: 100 equal bytes, their end, and the log's
    with open(folder / "log.jsonl", "ab") as log:
        log.write(b"x" * 10)
    names, write = [], objects.write
    monkeypatch.setattr(objects, "write", lambda name, data: names.append(name) or write(name, data))
    later = uploads.part(folder, tmp_path / "linked").files
    assert {*objects.names(tree.PIECES)} - {*before} == {*names} and len(names) == 1  # the log's last piece
    name = tree.write(objects, 1, later)
    assert tree.read(objects, name) == later
    tree.fetch(objects, later, tmp_path / "back")
    there = {name: data for name, data in _files(folder).items() if name in later}
    assert _files(tmp_path / "back") == there and len(there) == 3


def test_a_damaged_piece_is_never_used(server, open_at, tmp_path):
    objects, folder = open_at(server), tmp_path / "run"
    _step(folder, 1)
    found = tree.Uploads(objects, 1).part(folder, tmp_path / "linked").files
    (piece,) = tree.names(found)
    objects.write(piece, b"half")
    with pytest.raises(tree.Damaged, match="are not those that were written"):
        tree.fetch(objects, found, tmp_path / "back")
    objects.delete(piece)
    with pytest.raises(tree.Damaged, match="is missing"):
        tree.fetch(objects, found, tmp_path / "back")


def test_a_tree_writes_nothing_outside_of_its_folder(server, open_at, tmp_path):
    with pytest.raises(tree.Damaged, match="outside of the run"):
        tree.fetch(open_at(server), {"../x": []}, tmp_path / "back")
    assert not (tmp_path / "x").exists()


# ---- the mirror


def test_every_step_is_committed_and_old_pieces_go(server, open_at, tmp_path):
    objects, folder = open_at(server), tmp_path / "run"
    _step(folder, 1)
    held = record.take(objects, print)
    with Mirror(objects, held, print) as mirror:
        mirror.begin(folder)
        for number in (2, 3, 4):
            _step(folder, number)
            _until(
                lambda number=number: (
                    record.read(objects).commits[:1] and record.read(objects).commits[0].step == number
                )
            )
            (folder / "metrics.jsonl").write_text("row\n" * number)
    mirror.check()
    now = record.read(objects)
    kept = {one.tree: tree.read(objects, one.tree) for one in now.commits}
    assert now.holder == {} and len(kept) == 2
    assert _kept(objects) == {*kept, *(name for one in kept.values() for name in tree.names(one))}
    tree.fetch(objects, kept[now.commits[0].tree], tmp_path / "back")
    assert _files(tmp_path / "back") == _files(folder)


def test_a_lost_bucket_holds_up_the_uploads_and_loses_nothing(server, open_at, tmp_path):
    port, said = bucket_server.free_port(), []
    folder = tmp_path / "run"
    with bucket_server.proxy(server, 0.0, port=port):
        objects = open_at(port, patience_s=0.5)
        mirror = Mirror(objects, record.take(objects, print), said.append)
        _step(folder, 1)
        mirror.__enter__().begin(folder)
        _step(folder, 2)
        _until(lambda: record.read(objects).commits and record.read(objects).commits[0].step == 2)
    _step(folder, 3)
    _until(lambda: any("uploads wait" in line for line in said))
    _step(folder, 4)
    with bucket_server.proxy(server, 0.0, port=port):
        mirror.__exit__()
        mirror.check()
        found = tree.read(objects, record.read(objects).commits[0].tree)
        tree.fetch(objects, found, tmp_path / "back")
    assert _files(tmp_path / "back") == _files(folder)
    assert len(said) == 1


def test_a_bucket_that_stays_lost_is_said_at_the_end(server, open_at, tmp_path):
    said: list[str] = []
    with bucket_server.proxy(server, 0.0) as port:
        objects = open_at(port, patience_s=0.2)
        mirror = Mirror(objects, record.take(objects, print), said.append, end_s=0.5)
        _step(tmp_path / "run", 1)
    mirror.__enter__().begin(tmp_path / "run")
    mirror.__exit__()
    with pytest.raises(
        Behind, match=r"has this run up to step 1 only .*does not answer.*: all of it is in .*run on this"
    ):
        mirror.check()


def test_a_holder_that_lost_the_run_writes_no_more(server, open_at, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RENEWED_S", 0.1)
    objects, folder = open_at(server), tmp_path / "run"
    folder.mkdir()
    with Mirror(objects, record.take(objects, print), print) as mirror:
        mirror.begin(folder)
        monkeypatch.setattr(record, "_ended", lambda holder: True)
        taken = record.take(objects, print)
        with pytest.raises(record.Taken, match="was taken over by process"):
            _until(lambda: mirror.check() is not None)
        _step(folder, 2)
    assert record.read(objects).holder["id"] == taken.state.holder["id"]
    assert record.read(objects).commits == ()


# ---- files


@pytest.fixture
def scratch(monkeypatch, tmp_path):
    """A folder for temporary files."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def test_a_file_and_a_folder_are_copied_once_and_again_when_they_change(server, open_at, scratch):
    objects = open_at(server)
    for name, data in (("model/config.json", b"{}"), ("model/deep/w", b"123"), ("model2/x", b""), ("rows.jsonl", b"r")):
        objects.write(name, data)
    folder = Path(files.local(f"{objects.address}/model", "model.path"))
    assert _files(folder) == {"config.json": b"{}", "deep/w": b"123"}
    rows = Path(files.local(f"{objects.address}/rows.jsonl", "data.train"))
    assert rows.read_bytes() == b"r" and rows.suffix == ".jsonl"
    rows.write_bytes(b"mark")
    assert files.local(f"{objects.address}/rows.jsonl", "data.train") == str(rows)  # no second copy
    objects.write("rows.jsonl", b"new")
    assert Path(files.local(f"{objects.address}/rows.jsonl", "data.train")).read_bytes() == b"new"
    assert files.local("task:sums", "data.train") == "task:sums"


def test_a_copy_that_cannot_be_renamed_is_said_and_leaves_nothing(server, open_at, scratch, monkeypatch):
    def fails(part, to):
        raise OSError(5, "Input/output error", str(part), None, str(to))

    objects = open_at(server)
    objects.write("rows.jsonl", b"r")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fails)
        with pytest.raises(OSError, match="Input/output error"):
            files.local(f"{objects.address}/rows.jsonl", "data.train")
    assert not [path for path in scratch.rglob("*") if path.is_file()]
    assert Path(files.local(f"{objects.address}/rows.jsonl", "data.train")).read_bytes() == b"r"


def test_a_file_that_is_not_there_or_has_no_name_of_a_file_is_refused(server, open_at, scratch):
    objects = open_at(server)
    with pytest.raises(
        ValueError, match=r"data\.train=\w\w://.*/none: there is no object of this name, and none below it"
    ):
        files.local(f"{objects.address}/none", "data.train")
    objects.write("bad/../../x", b"")
    with pytest.raises(ValueError, match="has a name that no file can have"):
        files.local(f"{objects.address}/bad", "data.train")
    assert not [path for path in scratch.rglob("*") if path.is_file()]


def test_files_survive_every_kind_of_fault(server, open_at, scratch):
    data = {f"many/{number}": os.urandom(20000) for number in range(30)}
    for name, text in data.items():
        open_at(server).write(name, text)
    with bucket_server.proxy(server, 0.3, seed=5) as port:
        folder = Path(files.local(f"{open_at(port).address}/many", "model.path"))
    assert _files(folder) == {name.removeprefix("many/"): text for name, text in data.items()}


def test_a_file_that_changes_while_it_is_read_is_refused(server, open_at, scratch, tmp_path):
    objects = open_at(server)
    objects.write("a", b"one")
    old = objects.listed("a")["a"]
    objects.write("a", b"two")
    with pytest.raises(Changed, match="was changed while it was read"):
        objects.save("a", old, tmp_path / "a")


def test_a_mirror_that_ended_by_an_error_of_its_own_ends_the_run(server, open_at, tmp_path, monkeypatch):
    objects, folder = open_at(server), tmp_path / "run"
    _step(folder, 1)
    monkeypatch.setattr(threading, "excepthook", lambda about: None)  # which prints it
    monkeypatch.setattr(tree, "steps", lambda folder: [1] if threading.current_thread().name != "mirror" else 1 / 0)
    with Mirror(objects, record.take(objects, print), print) as mirror:
        mirror.begin(folder)
        with pytest.raises(Behind, match="the thread that uploads ended by an error of its own"):
            _until(lambda: mirror.check() is not None)
    with pytest.raises(Behind):
        mirror.check()


def test_a_folder_that_cannot_be_read_is_said_in_the_end(server, open_at, tmp_path, monkeypatch):
    objects, said = open_at(server), []
    _step(tmp_path / "run", 1)
    monkeypatch.setattr(os, "link", lambda *paths: (_ for _ in ()).throw(PermissionError(1, "no links here")))
    with Mirror(objects, record.take(objects, print), said.append, end_s=2.0) as mirror:
        mirror.begin(tmp_path / "run")
    with pytest.raises(Behind, match="no links here"):
        mirror.check()
    assert len(said) == 1 and "no links here" in said[0]
    assert record.read(objects).commits == ()
