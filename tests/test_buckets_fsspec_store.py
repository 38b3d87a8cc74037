"""Stores of fsspec: the sequence that stands for an object that changes, versions of files, and what is refused.

The file system is one in memory, or one in memory with a planted fault. tests/test_buckets.py asks an emulator of S3.
"""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bucket_server

from jaxrl_post.config import address
from jaxrl_post.config.address import Address, is_bucket, parse
from jaxrl_post.runs.buckets import objects, record
from jaxrl_post.runs.buckets.objects import Objects
from jaxrl_post.runs.buckets.store import Changed, Unreachable

NAME = record.NAME


class Planted(MemoryFileSystem):
    """A file system in memory, of a scheme of its own."""

    protocol = "planted"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("planted:/"))


@pytest.fixture
def opened():
    """Opens the objects of a new folder of a file system."""
    MemoryFileSystem.store.clear()

    def of(files: type[MemoryFileSystem] = Planted, patience_s: float = 0.5) -> Objects:
        fsspec.register_implementation("planted", files, clobber=True)
        return Objects(Address(scheme="planted", bucket="bucket", name="runs/demo"), patience_s)

    return of


def paths() -> list[str]:
    return sorted(path.removeprefix("/bucket/runs/demo/") for path in MemoryFileSystem.store)


def test_a_change_needs_the_generation_that_it_names(opened):
    here = opened()
    assert here.current(NAME).generation == 0
    assert [here.replace(NAME, bytes([number]), number) for number in range(5)] == [1, 2, 3, 4, 5]
    for stale in (0, 3, 4, 7):
        with pytest.raises(Changed):
            here.replace(NAME, b"stale", stale)
    found = here.current(NAME)
    assert (found.data, found.generation) == (b"\4", 5)
    assert paths() == [f"{NAME}/000000000004", f"{NAME}/000000000005"]  # no probe, no old number, no stale one


def test_an_object_that_was_dropped_gives_no_generation_twice(opened):
    here, late = opened(), opened()
    here.replace(NAME, b"one", 0)
    known = late.current(NAME).generation
    here.drop(NAME, known)
    assert (here.current(NAME).data, here.current(NAME).generation) == (b"", 2)
    with pytest.raises(Changed):
        late.replace(NAME, b"late", known)
    late.drop(NAME, known)
    assert here.replace(NAME, b"new", 2) == 3 and here.current(NAME).data == b"new"


def test_of_two_that_take_a_run_one_has_it(opened):
    one, two = opened(), opened()
    held = record.take(one, print)
    held.commit(record.Commit(tree="trees/a", step=1))
    record._written(two, record.read(two), 2, record._myself(), record.read(two).commits)  # takes it over
    with pytest.raises(record.Taken):
        held.commit(record.Commit(tree="trees/b", step=2))
    assert [(now.step) for now in record.read(one).commits] == [1]


def test_a_run_that_never_began_leaves_no_holder(opened):
    here = opened()
    record.take(here, print).release()
    now = record.read(here)
    assert (now.holder, now.commits, now.term, here.current(NAME).data) == ({}, (), 0, b"")
    assert record.take(here, print).state.term == 1


class Locked(Planted):
    """Creates an object in one step, as a store does; the one in memory looks first."""

    lock = threading.Lock()

    def pipe_file(self, path, value, mode="overwrite", **options):
        with self.lock:
            super().pipe_file(path, value, mode)


def test_no_change_of_several_writers_is_lost(opened):
    """Each of four writers adds to one number, and is late now and then."""

    def add(seed: int) -> None:
        here, noise = opened(Locked, patience_s=10.0), random.Random(seed)
        for _ in range(15):
            while True:
                found = here.current(NAME)
                time.sleep(noise.choice((0.0, 0.0, 0.002, 0.02)))
                with contextlib.suppress(Changed):
                    here.replace(NAME, str(int(found.data or 0) + 1).encode(), found.generation)
                    break

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    assert int(opened(Locked).current(NAME).data) == 60
    assert len(paths()) == 2


class WritesOver(Planted):
    """Writes over what is there, whatever it is asked."""

    def pipe_file(self, path, value, mode="overwrite", **options):
        super().pipe_file(path, value)


class LooksFirst(Planted):
    """Looks first and writes then, as fsspec does where a file system has no way of its own."""

    pipe_file = AbstractFileSystem.pipe_file


class KnowsNoModes(Planted):
    """As file systems that are older than the mode."""

    def pipe_file(self, path, value):
        super().pipe_file(path, value)


@pytest.mark.parametrize("files", [WritesOver, LooksFirst, KnowsNoModes])
def test_a_store_that_cannot_lock_is_refused_for_runs_and_read(opened, files):
    here = opened(files)
    here.write("rows.jsonl", b"row")
    with pytest.raises(ValueError, match="planted://bucket/runs/demo: this store .*"):
        record.take(here, print)
    assert paths() == ["rows.jsonl"] and here.read("rows.jsonl") == b"row"


class InItsOwnWords(Planted):
    """Says in words of its own that an object is there, as some stores that speak S3."""

    def pipe_file(self, path, value, mode="overwrite", **options):
        try:
            super().pipe_file(path, value, mode)
        except FileExistsError:
            raise OSError(22, "At least one of the preconditions did not hold") from None


def test_a_refusal_because_an_object_is_there_is_understood(opened):
    here = opened(InItsOwnWords)
    here.replace(NAME, b"one", 0)
    with pytest.raises(Changed):
        here.replace(NAME, b"two", 0)


class Hangs(Planted):
    """Gives no answer for a while."""

    def cat_file(self, path, **options):
        time.sleep(1.5)


def test_a_store_that_gives_no_answer_is_unreachable_in_time(opened, monkeypatch):
    monkeypatch.setattr("jaxrl_post.runs.buckets.fsspec_store._CALL_S", 0.1)
    begun = time.monotonic()
    with pytest.raises(Unreachable, match=r"planted://bucket/runs/demo does not answer: \w+"):
        opened(Hangs, patience_s=0.3).read("a")
    assert time.monotonic() - begun < 1.4


def test_a_server_that_accepts_and_says_nothing_is_unreachable_in_time(monkeypatch):
    monkeypatch.setattr("jaxrl_post.runs.buckets.fsspec_store._TIMES_S", (0.3, 0.3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name, value in bucket_server.environment("s3", silent.getsockname()[1]).items():
            monkeypatch.setenv(name, value)
        here, begun = Objects(Address(scheme="s3", bucket="bucket", name="runs/demo"), 0.2), time.monotonic()
        with pytest.raises(Unreachable, match="s3://bucket/runs/demo does not answer: Read timeout"):
            here.read("a")
    assert time.monotonic() - begun < 10.0  # with the first import of the client


def test_missing_credentials_are_refused_at_once(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ValueError, match="s3://bucket/runs/demo: the bucket refuses: Unable to locate credentials"):
        Objects(Address(scheme="s3", bucket="bucket", name="runs/demo")).read("a")


class Cuts(Planted):
    """Gives half of a file."""

    def get_file(self, path, to, **options):
        data = self.cat_file(path)
        with open(to, "wb") as file:
            file.write(data[: len(data) // 2])


def test_half_of_a_file_is_no_file(opened, tmp_path):
    here = opened(Cuts, patience_s=0.2)
    here.write("a", b"1234")
    with pytest.raises(Unreachable, match="a has 4 bytes there, and 2 came"):
        here.save("a", here.listed("a")["a"], tmp_path / "a")


def test_files_are_listed_with_versions_that_change(opened, tmp_path):
    here = opened()
    for name in ("model/config.json", "model/deep/w", "model2/x", "rows.jsonl"):
        here.write(name, name.encode())
    assert here.names("model") == ["model/config.json", "model/deep/w"] and here.names("rows.jsonl") == ["rows.jsonl"]
    assert (
        here.names("") == ["model/config.json", "model/deep/w", "model2/x", "rows.jsonl"] and here.names("none") == []
    )
    there = here.listed("model")
    here.save("model/deep/w", there["model/deep/w"], tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == b"model/deep/w"
    time.sleep(0.01)
    here.write("model/deep/w", b"model/deep/W")
    with pytest.raises(Changed, match="was changed while it was read"):
        here.save("model/deep/w", there["model/deep/w"], tmp_path / "w")
    here.delete("rows.jsonl")
    here.delete("rows.jsonl")
    with pytest.raises(Changed):
        here.save("rows.jsonl", "x", tmp_path / "rows")
    assert here.read("rows.jsonl") is None


# ---- what a user may name


@pytest.mark.parametrize(
    "text, bucket, name",
    [
        ("s3://my.bucket-1/runs/demo/", "my.bucket-1", "runs/demo"),
        ("az://container/x", "container", "x"),
        ("abfs://container@account.dfs.core.windows.net/a/b", "container@account.dfs.core.windows.net", "a/b"),
        ("oss://bucket/x", "bucket", "x"),  # a scheme of fsspec
    ],
)
def test_addresses_of_other_stores_are_read(text, bucket, name):
    found = parse(text, "--run-dir")
    assert (found.bucket, found.name) == (bucket, name) and str(found) == text.rstrip("/") and is_bucket(text)


@pytest.mark.parametrize("bad", ["s3://", "s3://bucket", "s3://Bucket/x", "s3://key:word@bucket/x", "az://a/b//c"])
def test_a_malformed_address_is_refused_in_its_own_scheme(bad):
    scheme = bad[:2]
    with pytest.raises(
        ValueError, match=rf"is no place in a bucket: write {scheme}://BUCKET/NAME, for example {scheme}:"
    ):
        parse(bad, "--run-dir")


def test_a_scheme_that_nothing_reads_is_refused_with_what_can_be_installed():
    with pytest.raises(ValueError, match=r"nothing here reads nowhere://; write gs:// .*\[s3\]'\), az:// .*\[azure\]'"):
        parse("nowhere://bucket/x", "--run-dir")


@pytest.mark.parametrize("local", ["file:///a/b", "memory://bucket/x", "https://host/x", "runs/x", "task:sums"])
def test_what_is_no_bucket(local):
    assert not is_bucket(local)


@pytest.mark.parametrize("scheme", [scheme for scheme in address.EXTRAS if scheme != "gs"])
def test_a_client_that_is_not_installed_is_named(monkeypatch, scheme):
    def none(protocol: str) -> type:
        raise ImportError(f"Install the client of {protocol}")

    monkeypatch.setattr("fsspec.core.get_filesystem_class", none)
    with pytest.raises(
        ValueError, match=rf"install what reads it: pip install 'jaxrl_post\[{address.EXTRAS[scheme]}\]'"
    ):
        Objects(Address(scheme=scheme, bucket="bucket", name="x"), objects.PATIENCE_S)
