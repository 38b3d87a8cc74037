"""A run in a bucket through the whole program: it ends as the local one, on whichever machine it goes on."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import resumed_runs
import test_main_stop
from resumed_runs import FLAGS, STEPS, resume, same_run
from test_main import go

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bucket_server

from jaxrl_post import __main__ as commands
from jaxrl_post import main
from jaxrl_post.commands import fetch
from jaxrl_post.config.address import parse
from jaxrl_post.launch.watchdog import Planted
from jaxrl_post.runs import attempts, program_cache
from jaxrl_post.runs.buckets import objects, record
from jaxrl_post.runs.buckets.objects import Objects
from jaxrl_post.trainer.learner import Learner

here, whole = resumed_runs.here, resumed_runs.whole  # fixtures
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module", params=["gs", "s3"])
def bucket(request):
    return f"{request.param}://bucket"


@pytest.fixture(scope="module")
def server(bucket):
    with bucket_server.emulator(bucket[:2]) as port:
        yield port


@pytest.fixture
def reach(bucket, monkeypatch):
    """Makes clients of the bucket reach it at a port."""

    def at(port: int) -> None:
        for name, value in bucket_server.environment(bucket[:2], port).items():
            monkeypatch.setenv(name, value)

    return at


@pytest.fixture
def machine(server, reach, monkeypatch, tmp_path):
    """Returns what makes the next start one of another machine, whose network does a fault in 5 % of all calls."""
    with bucket_server.proxy(server, 0.05, seed=1) as port:
        reach(port)
        numbers = iter(range(100))

        def another() -> None:
            place = tmp_path / f"machine-{next(numbers)}"
            place.mkdir()
            monkeypatch.setattr("tempfile.tempdir", str(place))

        another()
        yield another


def _inputs(here, bucket: str) -> list[str]:
    """Uploads data and tokenizer. Returns overrides that name them there."""
    there = _objects(f"{bucket}/inputs/all")
    paths = {"data.train": "train.jsonl", "eval.data": "eval.jsonl", "model.tokenizer": "tokenizer"}
    for path in (file for name in paths.values() for file in (here / name, *(here / name).rglob("*"))):
        if path.is_file():
            there.write(path.relative_to(here).as_posix(), path.read_bytes())
    return [f"--config.{option}={there.address}/{name}" for option, name in paths.items()]


def _objects(url: str) -> Objects:
    return Objects(parse(url, "url"))


def test_a_run_that_fails_goes_on_elsewhere_and_ends_as_the_local_one(
    here, whole, machine, bucket, monkeypatch, tmp_path, capsys
):
    url = f"{bucket}/runs/moved"
    flags = (*FLAGS, *_inputs(here, bucket))
    monkeypatch.setenv("JAXRL_FAULT", "commit:4:raise")
    with pytest.raises(Planted):
        go(here, f"--run-dir={url}", *flags)
    monkeypatch.delenv("JAXRL_FAULT")
    now = record.read(_objects(url))
    assert [one.step for one in now.commits][:1] == [2] and now.holder == {}
    told = attempts.bucket_status(url)
    assert (told.state, told.saved, told.steps, told.restarts) == ("ended with exit code 1", 2, STEPS, 0)
    machine()
    capsys.readouterr()
    assert go(here, f"--run-dir={url}", "--resume", *flags) == 0
    assert "goes on after step 2\n" in capsys.readouterr().out
    now = record.read(_objects(url))
    assert now.commits[0].step == STEPS and now.holder == {} and now.term == 2
    assert commands.main(["launch", f"--status={url}"]) == 0
    said = capsys.readouterr().out
    assert f"{url}: finished; step {STEPS} of {STEPS}, newest checkpoint {STEPS}, last sign of life " in said
    assert (
        "attempts 2, restarts 1\n" in said and "exit code 1: its process" in said and "exit code 0: its process" in said
    )
    assert fetch.main([url, str(tmp_path / "back")]) == 0
    assert f"saved up to step {STEPS}\n" in capsys.readouterr().out
    (tmp_path / "back" / ".lock").write_text("")  # of one machine
    same_run(whole, tmp_path / "back")
    machine()
    assert main.main([f"--resume={url}", "--dry-run=all"]) == 0  # by the config of the bucket
    assert f'"steps": {STEPS}' in capsys.readouterr().out
    assert fetch.main([url, str(tmp_path / "back")]) == 1
    assert "exists already and is not an empty folder" in capsys.readouterr().err
    assert go(here, f"--run-dir={url}", *FLAGS) == 1
    assert "holds a run already: a run is never written over" in capsys.readouterr().err
    assert record.read(_objects(url)).term == 2  # a refused run takes nothing


@pytest.mark.extended
def test_a_run_that_is_stopped_saves_uploads_and_goes_on_elsewhere(here, whole, machine, bucket, tmp_path, capsys):
    """At a step that the config would not save."""
    url = f"{bucket}/runs/stopped"
    assert test_main_stop.signalled(here, url, signal.SIGTERM, Learner, "commit", 1) == 42
    assert "stopped after step 1, which is saved" in capsys.readouterr().out
    now, told = record.read(_objects(url)), attempts.bucket_status(url)
    assert [one.step for one in now.commits][:1] == [1] and now.holder == {}
    assert (told.state, told.saved, told.attempts[0].processes[0].code) == ("ended with exit code 42", 1, 42)
    assert told.attempts[0].processes[0].why.startswith("SIGTERM: stopped after step 1, which is saved")
    machine()
    assert resume(here, url) == 0
    assert "goes on after step 1\n" in capsys.readouterr().out
    assert fetch.main([url, str(tmp_path / "back")]) == 0
    (tmp_path / "back" / ".lock").write_text("")  # of one machine
    same_run(whole, tmp_path / "back")


def test_a_run_that_cannot_start_leaves_nothing(here, machine, bucket, tmp_path, capsys):
    url = f"{bucket}/runs/none"
    assert go(here, f"--run-dir={url}", *FLAGS, "--config.eval.data=nothing.jsonl") == 1
    assert "nothing.jsonl" in capsys.readouterr().err
    for start in (lambda: main.main([f"--resume={url}"]), lambda: go(here, f"--resume={url}", *FLAGS)):
        assert start() == 1
        assert f"--resume={url}: there is no run; to begin one there write" in capsys.readouterr().err
    assert all(name.startswith(record.NAME) for name in _objects(url).names(""))
    assert record.read(_objects(url)).holder == {}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_scheme_that_nothing_reads_is_refused(here, capsys):
    assert go(here, "--run-dir=nowhere://bucket/run", *FLAGS) == 1
    assert "--run-dir='nowhere://bucket/run': nothing here reads nowhere://; write gs://" in capsys.readouterr().err


def test_a_bucket_that_does_not_answer_at_the_start_asks_for_a_restart(
    here, machine, bucket, reach, monkeypatch, capsys
):
    monkeypatch.setattr(objects.Objects.__init__, "__defaults__", (0.3,))  # its patience
    reach(bucket_server.free_port())
    assert go(here, f"--run-dir={bucket}/runs/lost", *FLAGS) == 42
    assert f"{bucket}/runs/lost does not answer" in capsys.readouterr().err


def test_programs_of_a_bucket_are_compiled_once(machine, bucket):
    url, said = f"{bucket}/programs", []
    first = program_cache.ProgramCache(url, "JAX_COMPILATION_CACHE_DIR", said.append)
    assert not [path for path in first.folder.iterdir() if path.name != ".lock"]
    program = first.folder / "jit_x-1-cache"
    program.write_bytes(b"prog")
    os.utime(program, (time.time() + 3600,) * 2)  # the clock was set back since
    first._upload(0.1)
    time.sleep(0.15)
    program.write_bytes(b"program")  # it was not whole
    first._upload(0.1)
    assert _objects(url).names("") == []
    time.sleep(0.15)
    first._upload(0.1)
    assert _objects(url).names("") == ["jit_x-1-cache"]
    first.close()
    machine()
    second = program_cache.ProgramCache(url, "JAX_COMPILATION_CACHE_DIR", said.append)
    assert (second.folder / "jit_x-1-cache").read_bytes() == b"program"
    second.close()
    assert _objects(url).names("") == ["jit_x-1-cache"] and not said
    assert not first.folder.exists() and not second.folder.exists()


def test_results_of_autotuning_travel_with_the_programs(machine, bucket):
    url, said = f"{bucket}/programs", []
    first = program_cache.ProgramCache(url, "JAX_COMPILATION_CACHE_DIR", said.append)
    (first.folder / program_cache.AUTOTUNING / "tmp").mkdir(parents=True)
    (first.folder / program_cache.AUTOTUNING / "fusion.textproto").write_text("block_m: 64")
    (first.folder / "jit_x-1-cache").write_bytes(b"program")
    first.close()
    assert _objects(url).names("") == ["jit_x-1-cache", f"{program_cache.AUTOTUNING}/fusion.textproto"]
    machine()
    second = program_cache.ProgramCache(url, "JAX_COMPILATION_CACHE_DIR", said.append)
    assert (second.folder / program_cache.AUTOTUNING / "fusion.textproto").read_text() == "block_m: 64"
    second.close()
    assert not said


def test_a_lost_bucket_costs_compilations_only(machine, bucket, reach, monkeypatch):
    said = []
    monkeypatch.setattr(objects.Objects.__init__, "__defaults__", (0.3,))  # its patience
    reach(bucket_server.free_port())
    programs = program_cache.ProgramCache(f"{bucket}/programs", "JAX_COMPILATION_CACHE_DIR", said.append)
    (programs.folder / "jit_x-1-cache").write_bytes(b"program")
    programs.close()
    assert len(said) == 2 and "programs are compiled here" in said[0] and "programs were not kept" in said[1]
