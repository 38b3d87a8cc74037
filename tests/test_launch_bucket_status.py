"""What a bucket alone says of a run, and that it is only read."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bucket_server

from jaxrl_post.config.address import parse
from jaxrl_post.runs import attempts
from jaxrl_post.runs.buckets import record, tree
from jaxrl_post.runs.buckets.objects import Objects

URL = "gs://bucket/runs/one"


@pytest.fixture
def objects(monkeypatch):
    with bucket_server.emulator() as port:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        yield Objects(parse(URL, "url"))


@pytest.fixture
def folder(tmp_path):
    """A run of two processes, the second of which has ended."""
    folder = tmp_path / "run"
    for index in (0, 1):
        attempts._open.clear()
        attempts.begin(folder, index, 2, lambda text: "1")
    attempts.end(42, "process 0 of 2 is lost: its connection ended")
    (folder / "config.json").write_text(json.dumps({"steps": 9}))
    (folder / "process_0").mkdir()
    (folder / "process_0" / "metrics.jsonl").write_text('{"step": 4}\n{"step": 5}\n')
    for step in (2, 4):
        (folder / "checkpoints" / f"step_{step:06d}" / "arrays").mkdir(parents=True)
        (folder / "checkpoints" / f"step_{step:06d}" / "arrays" / "d").write_bytes(bytes(1000))
    yield folder
    attempts._open.clear()


def _commit(objects: Objects, held: record.HeldRecord, folder: Path, at: float) -> str:
    found = tree.Uploads(objects, held.state.term).part(folder, folder.with_name("linked"))
    name = tree.write(objects, held.state.term, found.files)
    held.commit(record.Commit(tree=name, step=4, at=at))
    return name


def test_a_run_is_told_from_its_lease_its_commits_and_its_attempts(objects, folder, monkeypatch):
    with pytest.raises(ValueError, match=f"--status={URL}: there is no run"):
        attempts.bucket_status(URL)
    held = record.take(objects, print)
    told = attempts.bucket_status(URL)
    assert told.state.startswith("running, written by process ") and (told.attempts, told.saved) == ((), None)
    _commit(objects, held, folder, time.time() - 300)
    before = objects.current(record.NAME).generation
    told = attempts.bucket_status(URL)
    assert (told.step, told.steps, told.saved, told.restarts) == (5, 9, 4, 0)
    assert told.state.startswith("running") and "committed 5.0 min ago\n" in str(told) and told.age_s < 60
    assert "exit code 42: 1" in str(told) and "process 0 of 2 is lost: its connection ended" in str(told)
    ended = attempts.bucket_status(URL, time.time() + record.LEASE_S + 1)
    assert ended.state == "ended with exit code 42" and "killed: 0" in str(ended)
    assert objects.current(record.NAME).generation == before
    held.release()
    record.take(objects, print)  # by an attempt that is killed before its first commit
    told = attempts.bucket_status(URL)
    assert (len(told.attempts), told.restarts) == (1, 1) and "left no note" in str(told)


def test_a_damaged_commit_is_passed_over(objects, folder):
    held = record.take(objects, print)
    _commit(objects, held, folder, 1.0)
    (folder / "process_0" / "metrics.jsonl").write_text('{"step": 6}\n')
    newest = _commit(objects, held, folder, 2.0)
    assert attempts.bucket_status(URL).step == 6
    objects.write(newest, b"{}")
    assert attempts.bucket_status(URL).step == 5
    for commit in record.read(objects).commits:
        objects.delete(commit.tree)
    with pytest.raises(ValueError, match="every commit of the run is damaged"):
        attempts.bucket_status(URL)
