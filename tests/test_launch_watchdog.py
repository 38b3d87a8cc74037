"""The watchdog's limits by hand with a clock of its own, and the points of faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxrl_post.launch import assemble
from jaxrl_post.launch.watchdog import POINTS, FaultPoints, Planted, Watchdog, WatchedRing, leaving
from jaxrl_post.ring.timing import Stopwatch
from jaxrl_post.runs import attempts, run_folder

ROOT = Path(__file__).resolve().parents[1]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def dog(**limits):
    clock = Clock()
    return Watchdog({"gen": 10.0, "host": 5.0, "testing": 0.0} | limits, 100.0, lambda *_: None, now=clock), clock


def test_the_end_of_a_hang_is_noted(tmp_path, monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    attempts.begin(tmp_path, 0, 1, str)
    with leaving(42, "the start hung for 9 s"):
        assert attempts.status(tmp_path).state == "running"
    (process,) = attempts.status(tmp_path).attempts[0].processes
    assert (process.code, process.why, codes) == (42, "the start hung for 9 s", [42])


def test_each_phase_has_its_limit_and_a_longer_one_while_programs_are_compiled():
    made, clock = dog()
    with made.phase("gen"):
        clock.now = 99.0
        assert made.late() is None
        made.warm()
        assert made.late() == ("gen", 99.0)
    made, clock = dog()
    made.warm()
    with made.phase("gen"):
        clock.now = 10.0
        assert made.late() is None
        clock.now = 10.5
        assert made.late() == ("gen", 10.5)


def test_work_between_two_calls_and_phases_without_a_limit_of_their_own_count_as_host():
    made, clock = dog()
    made.warm()
    with made.phase("update_actor"):
        clock.now = 5.5
        assert made.late() == ("update_actor", 5.5)
    assert made.late() is None
    clock.now = 11.0
    assert made.late() == ("host", 5.5)
    with made.phase("testing"):
        clock.now = 1e9
        assert made.late() is None  # 0 is no limit


def test_a_nested_call_has_a_limit_of_its_own_within_that_of_the_outer():
    made, clock = dog(reward=3.0)
    made.warm()
    with made.phase("gen"):
        clock.now = 9.0
        with made.phase("reward"):
            clock.now = 10.5
            assert made.late() == ("gen", 10.5)
            clock.now = 12.5
            assert made.late() == ("gen", 12.5)
    with made.phase("gen"), made.phase("reward"):
        clock.now = 16.0
        assert made.late() == ("reward", 3.5)


def test_the_thread_reports_once():
    told = []
    with Watchdog({"host": 0.01}, 0.01, lambda *what: told.append(what)) as made:
        made.warm()
        deadline = time.monotonic() + 5
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.6)
    assert len(told) == 1 and told[0][0] == "host"


def test_a_report_that_fails_or_hangs_ends_the_process_too(monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with pytest.raises(OSError), leaving(42, "why"):
        raise OSError("no space")
    assert codes == [42]
    with leaving(43, "why", 0.05):
        time.sleep(0.3)
    assert codes == [42, 43, 43]


def test_a_start_that_hangs_ends_too(monkeypatch, tmp_path, capsys):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    (tmp_path / ".lock").touch()
    with assemble.starting(SimpleNamespace(watchdog=SimpleNamespace(compile_s=0.2)), tmp_path, ""):
        time.sleep(1.0)
    assert codes == [42] and "HANG: the start took" in capsys.readouterr().out
    assert "test_a_start_that_hangs_ends_too" in (tmp_path / "hang.txt").read_text()
    assert run_folder.take_up(str(tmp_path), must_exist=True) == (tmp_path, False)


def test_a_fault_comes_at_its_point_and_count():
    points = FaultPoints({"JAXRL_FAULT": "commit:2:raise"})
    for point in (*POINTS, "publish"):
        points.reach(point)
    with pytest.raises(Planted, match=r"commit is reached for the 2\. time"):
        points.reach("commit")
    points.reach("commit")
    FaultPoints({}).reach("commit")


def test_calls_of_the_ring_reach_their_points():
    class Engine:
        def step(self):
            return "stepped"

        def swap(self):
            pass

    seen = []
    made, _ = dog()
    ring = WatchedRing(Stopwatch(), made, seen.append)
    assert ring.call("gen", Engine().step) == "stepped"
    ring.call("update_weights", Engine().swap)
    ring.call("gen", Engine().swap)
    assert seen == ["dispatch", "swap"] and made.late() is None


@pytest.mark.parametrize(
    "text, words",
    [
        ("dispach:1", "unknown 'dispach'; nearest is 'dispatch'"),
        ("commit:1:kil", "unknown 'kil'; nearest is 'kill'"),
        ("commit", "the count '' must be a number from 1 on"),
        ("commit:0", "the count '0' must be"),
        ("commit:-1:hang", "the count '-1' must be"),
    ],
)
def test_a_malformed_fault_is_one_sentence(text, words):
    with pytest.raises(ValueError, match=f"JAXRL_FAULT={text}: ") as error:
        FaultPoints({"JAXRL_FAULT": text})
    assert words in str(error.value)


def test_a_signal_is_a_fault_too(monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    FaultPoints({"JAXRL_FAULT": "swap:1:term"}).reach("swap")
    assert sent == [(os.getpid(), signal.SIGTERM)]


@pytest.mark.extended
@pytest.mark.slow
def test_a_hung_dispatch_ends_with_42_and_the_run_resumes(tmp_path):
    def ran(run, fault=""):
        words = [
            sys.executable,
            "-m",
            "jaxrl_post.main",
            "--config=configs/demo.py",
            "--config.steps=6",
            f"--run-dir={run}",
            "--resume",
        ]
        words += [
            f"--config.{one}" for one in ("scheduler.prompts=8", "eval.prompts=4", "eval.every=0", "checkpoint.every=2")
        ]
        words += ["--config.watchdog.dispatch_s=5"]
        return subprocess.run(
            words, cwd=ROOT, env={**os.environ, "JAXRL_FAULT": fault}, capture_output=True, text=True, timeout=280
        )

    whole, hung = tmp_path / "whole", tmp_path / "hung"
    assert ran(whole).returncode == 0
    done = ran(hung, "dispatch:16:hang")
    assert done.returncode == 42 and "HANG: phase gen took" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert "in reach" in (hung / "hang.txt").read_text() and "scheduler" in (hung / "hang.json").read_text()
    assert ran(hung).returncode == 0
    for name in ("rollouts/step_000006.npz", "policy/model.safetensors", "scheduler_log.jsonl"):
        assert (hung / name).read_bytes() == (whole / name).read_bytes(), name
