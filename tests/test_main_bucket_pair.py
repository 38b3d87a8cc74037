"""A run of two processes in a bucket: killed, lost and refused, and resumed as the local run, bit for bit."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from resumed_runs import here, pair

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bucket_server
import killed

from jaxrl_post.commands import fetch
from jaxrl_post.config.address import parse
from jaxrl_post.runs import attempts
from jaxrl_post.runs.buckets import record
from jaxrl_post.runs.buckets.objects import Objects

__all__ = ["here"]  # a fixture
pytestmark = pytest.mark.usefixtures("quick_compilation")

URL = "gs://bucket/runs/pair"
STEPS = 3
DYING = """
import os, signal, sys, time
from jaxrl_post import main
from jaxrl_post.config import address
from jaxrl_post.runs.buckets import objects, record
from jaxrl_post.runs.checkpoint import store

save, there = store.Checkpoints.save, objects.Objects(address.parse(URL, "url"))
def dying(self, step, *rest):
    if step == 2 and os.environ["JAX_PROCESS_ID"] == sys.argv[1]:
        while not record.read(there).commits: time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, step, *rest)
store.Checkpoints.save = dying
sys.exit(main.main(sys.argv[2:]))
""".replace("URL", repr(URL))
LOST = """
import os, sys

if os.environ["JAX_PROCESS_ID"] == "1": os.environ["STORAGE_EMULATOR_HOST"] = "http://127.0.0.1:9"
from jaxrl_post import main
from jaxrl_post.runs.buckets import objects
objects.Objects.__init__.__defaults__ = (0.3,)  # its patience
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Returns what makes the next start one of another machine, whose network does a fault in 5 % of all calls."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # the programs of all runs are the same
    with bucket_server.emulator() as server, bucket_server.proxy(server, 0.05, seed=1) as port:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        numbers = iter(range(100))

        def another() -> Path:
            place = tmp_path / f"machine-{next(numbers)}"
            place.mkdir()
            monkeypatch.setenv("TMPDIR", str(place))  # of the processes that are started
            return place

        another()
        yield another


@pytest.mark.shown("buckets")  # ten starts of a process, two at a time
def test_two_processes_in_a_bucket_that_are_killed_and_resumed(here, machine, tmp_path):
    """kill -9 of one before the save of step 2, first of process 1 and then of process 0; then on from step 1."""
    cache, objects = tmp_path / "cache", Objects(parse(URL, "url"))
    status, said = pair(here, tmp_path / "whole", cache)
    assert status == [0, 0], said
    status, said = pair(here, URL, cache, code=("-c", DYING, "1"))
    assert status == [42, -signal.SIGKILL] and "process 1 of 2 is lost: its connection ended" in said[0], said
    assert [one.step for one in record.read(objects).commits] == [1]
    place = machine()
    status, said = pair(here, URL, cache, code=("-c", DYING, "0"), resumed=True)
    assert status == [-signal.SIGKILL, 42] and "process 0 of 2 is lost: its connection ended" in said[1], said
    assert "goes on after step 1\n" in said[0]
    assert len([*place.glob("jaxrl_post-*/pair-*/*-[01]/checkpoints")]) == 2  # a folder for each process
    machine()
    status, said = pair(here, URL, cache, resumed=True)
    assert status == [0, 0] and "goes on after step 1\n" in said[0], said
    assert fetch.main([URL, str(tmp_path / "back")]) == 0
    assert [one for one in killed.differences(tmp_path / "whole", tmp_path / "back", STEPS) if one != ".lock"] == []
    codes = [[one.code for one in attempt.processes] for attempt in attempts.status(tmp_path / "back").attempts]
    assert codes[-1] == [0, 0]
    assert record.read(objects).holder == {}


@pytest.mark.extended  # four starts of a process, two at a time
def test_what_one_process_refuses_ends_both_with_the_same_sentence(here, machine, tmp_path):
    objects = Objects(parse(URL, "url"))
    status, said = pair(here, URL, tmp_path / "cache", code=("-c", LOST))
    assert status == [42, 42], said
    sentences = [[line for line in one.splitlines() if line.startswith("error: ")] for one in said]
    assert sentences[0] == sentences[1] and "error: process 1: gs://bucket/runs/pair does not answer" in said[0], said
    assert objects.names("") == []
    objects.write("trees/x", b"{}")
    held = record.take(objects, print)
    held.commit(record.Commit(tree="trees/x", step=1))
    held.release()
    status, said = pair(here, URL, tmp_path / "cache")
    assert status == [1, 1], said
    for one in said:
        assert f"error: --run-dir={URL} holds a run already: a run is never written over" in one, one
    assert not [*tmp_path.glob("cache/*")]
