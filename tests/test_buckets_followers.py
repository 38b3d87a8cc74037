"""A run of several processes in a bucket: what each uploads, and that only what all have is committed."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bucket_server

from jaxrl_post.config.address import Address
from jaxrl_post.runs.buckets import followers, record, tree
from jaxrl_post.runs.buckets.followers import Behind, Follower, Followers, writer
from jaxrl_post.runs.buckets.mirror import Mirror
from jaxrl_post.runs.buckets.objects import Objects


class Board:
    """Texts that threads of this test share, with the methods of parallel/exchange.py."""

    def __init__(self, processes: int):
        self.texts: dict[str, str] = {}
        self._changed, self._processes, self._met = threading.Condition(), processes, {}

    def put(self, key: str, text: str) -> None:
        with self._changed:
            assert key not in self.texts
            self.texts[key] = text
            self._changed.notify_all()

    def get(self, key: str, limit_s: float) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.texts, limit_s):
                raise TimeoutError(key)
            return self.texts[key]

    def remove(self, key: str) -> None:
        with self._changed:
            self.texts = {name: text for name, text in self.texts.items() if name != key}

    def meet(self, key: str, limit_s: float) -> bool:
        with self._changed:
            self._met[key] = self._met.get(key, 0) + 1
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._met[key] >= self._processes, limit_s)


@pytest.fixture(scope="module")
def server():
    with bucket_server.emulator() as port:
        yield port


@pytest.fixture
def objects(server, monkeypatch, request):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server}")
    name = hashlib.blake2b(request.node.nodeid.encode(), digest_size=8).hexdigest()
    return Objects(Address(bucket=bucket_server.BUCKET, name=f"runs/{name}"))


class Job:
    """Two processes, each with a folder: a mirror and its follower."""

    def __init__(self, objects: Objects, here: Path, **limits: float):
        self.objects, self.board, self.said = objects, Board(2), []
        self.folders = [here / f"job-{time.monotonic_ns()}" / name for name in ("0", "1")]
        held = record.take(objects, print)
        self.mirror = Mirror(objects, held, self.said.append, others=Followers(self.board, 2), **limits)
        self.follower = Follower(objects, held.state.term, self.board, 1, 2, **limits)
        for folder in self.folders:
            folder.mkdir(parents=True)

    def begin(self) -> None:
        self.mirror.__enter__().begin(self.folders[0])
        self.follower.__enter__().begin(self.folders[1])

    def save(self, index: int, step: int) -> None:
        """Writes what a process writes of a step, and its logs."""
        folder = self.folders[index]
        part = folder / "checkpoints" / f"step_{step:06d}.part"
        (part / "arrays" / f"ocdbt.process_{index}").mkdir(parents=True)
        (part / "arrays" / f"ocdbt.process_{index}" / "d").write_text(f"{index} {step}" * 100)
        if index == 0:
            (part / "MANIFEST.json").write_text(f"{step}")
        part.rename(part.with_suffix(""))
        (folder / f"process_{index}").mkdir(exist_ok=True)
        (folder / f"process_{index}" / "metrics.jsonl").write_text("row\n" * step)

    def end(self) -> None:
        """Ends both processes at once."""
        other = threading.Thread(target=self.follower.__exit__)
        other.start()
        self.mirror.__exit__()
        other.join()

    def steps(self) -> list[int]:
        return [commit.step for commit in record.read(self.objects).commits]

    def fetched(self, place: Path) -> dict[str, str]:
        found = tree.read(self.objects, record.read(self.objects).commits[0].tree)
        tree.fetch(self.objects, found, place)
        return {path.relative_to(place).as_posix(): path.read_text() for path in place.rglob("*") if path.is_file()}


def until(true, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "name, of",
    [
        ("config.json", 0),
        ("process_1/rollouts/step_000001.npz", 1),
        ("process_2/metrics.jsonl", 0),  # of a process that the job has no more
        ("attempts/process_1.jsonl", 1),
        ("checkpoints/.key", 0),
        ("checkpoints/step_000002/MANIFEST.json", 0),
        ("checkpoints/step_000002/host/process_1/state.json", 1),
        ("checkpoints/step_000002/arrays/ocdbt.process_1/d/a", 1),
        ("checkpoints/step_000002/arrays/ocdbt.process_0/d/a", 0),
        ("checkpoints/step_000002/arrays/ocdbt.process_3/d/a", 0),
        ("policy/process_1", 0),
    ],
)
def test_every_file_has_one_writer(name, of):
    assert writer(name, 2) == of


def test_a_step_is_committed_once_both_processes_have_it(objects, tmp_path):
    job = Job(objects, tmp_path)
    job.begin()
    job.save(0, 2)
    time.sleep(1.0)
    assert job.steps() == []
    job.save(1, 2)
    until(lambda: job.steps() == [2])
    (job.folders[0] / "process_1").mkdir()
    (job.folders[0] / "process_1" / "metrics.jsonl").write_text("old")  # fetched from an earlier commit
    for index in (1, 0):
        job.save(index, 4)
    until(lambda: job.steps() == [4, 2])
    (job.folders[0] / "summary.json").write_text("all")
    job.end()
    job.mirror.check()
    job.follower.check()
    found = job.fetched(tmp_path / "back")
    assert found.pop("summary.json") == "all"
    assert found == {
        f"checkpoints/step_00000{step}/{name}": text
        for step in (2, 4)
        for name, text in {
            "MANIFEST.json": f"{step}",
            "arrays/ocdbt.process_0/d": f"0 {step}" * 100,
            "arrays/ocdbt.process_1/d": f"1 {step}" * 100,
        }.items()
    } | {f"process_{index}/metrics.jsonl": "row\n" * 4 for index in (0, 1)}
    kept = {one.tree: tree.read(objects, one.tree) for one in record.read(objects).commits}
    assert {*objects.names("")} == {record.NAME, *kept, *(name for one in kept.values() for name in tree.names(one))}
    assert not job.said


def test_pieces_that_were_deleted_are_uploaded_again(objects, tmp_path):
    """A log that is cut back to what it was has the pieces of a commit that is not kept any more."""
    job = Job(objects, tmp_path)
    job.begin()
    for step in (1, 2, 3, 4):
        job.save(1, step)
        (job.folders[1] / "process_1" / "metrics.jsonl").write_text("same" if step in (1, 4) else f"{step}")
        job.save(0, step)
        until(lambda step=step: job.steps()[:1] == [step])
    job.end()
    job.mirror.check()
    assert job.fetched(tmp_path / "back")["process_1/metrics.jsonl"] == "same"


def test_a_process_that_cannot_upload_holds_up_the_commit_and_is_named(objects, tmp_path, monkeypatch):
    job = Job(objects, tmp_path, end_s=2.0)
    monkeypatch.setattr(job.follower._uploads, "part", lambda *about: _refuse())
    job.begin()
    for index in (1, 0):
        job.save(index, 1)
    until(lambda: bool(job.said))
    assert job.said[0].startswith("BUCKET: process 1: no disk; the run goes on, and uploads wait")
    job.end()
    for one in (job.mirror, job.follower):
        with pytest.raises(Behind, match=r"has this run up to step 0 only \(process 1: no disk\)"):
            one.check()
    assert job.steps() == []


def _refuse():
    raise OSError("no disk")


def test_processes_that_do_not_end_together_commit_nothing_more(objects, tmp_path, monkeypatch):
    monkeypatch.setattr(followers, "MEET_S", 0.3)
    job = Job(objects, tmp_path)
    job.begin()
    for index in (1, 0):
        job.save(index, 1)
    until(lambda: job.steps() == [1])
    (job.folders[0] / "summary.json").write_text("half")
    job.mirror.__exit__()
    with pytest.raises(Behind, match="the processes of the job did not end together"):
        job.mirror.check()
    job.follower.__exit__()
    with pytest.raises(Behind, match="did not end together"):
        job.follower.check()
    assert job.steps() == [1] and "summary.json" not in job.fetched(tmp_path / "back")


def test_a_run_that_is_taken_away_ends_every_process(objects, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RENEWED_S", 0.1)
    job = Job(objects, tmp_path)
    job.begin()
    monkeypatch.setattr(record, "_ended", lambda holder: True)
    record.take(objects, print)
    with pytest.raises(record.Taken):
        until(lambda: job.mirror.check() is not None)
    with pytest.raises(record.Taken, match="this run stops, and writes there no more"):
        until(lambda: job.follower.check() is not None)
    job.end()


def test_a_lost_answer_costs_a_round_and_no_step(objects, server, tmp_path, monkeypatch):
    with bucket_server.proxy(server, 0.3, seed=2) as port:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        job = Job(Objects(objects.address, 60.0), tmp_path)
        job.begin()
        for step in (1, 2, 3):
            for index in (1, 0):
                job.save(index, step)
            until(lambda step=step: job.steps()[:1] == [step], 60.0)
        job.end()
        job.mirror.check()
        found = job.fetched(tmp_path / "back")
    assert json.loads(found["checkpoints/step_000003/MANIFEST.json"]) == 3
    assert found["process_1/metrics.jsonl"] == "row\n" * 3
