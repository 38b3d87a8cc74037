"""The lock of a run's folder, and the signals that end a run at a safe point."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxrl_post.launch import stop_signal
from jaxrl_post.launch.stop_signal import Stopped, StopSignal
from jaxrl_post.runs import run_folder

ROOT = Path(__file__).resolve().parents[1]
HOLDER = """
import contextlib, sys, time
from jaxrl_post.runs import run_folder
from pathlib import Path
with contextlib.ExitStack() as stack:
    run_folder.hold(Path(sys.argv[1]), stack)
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.extended)])
def test_a_held_folder_is_refused_by_the_holders_name_and_free_after_its_death(tmp_path, end):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with contextlib.ExitStack() as stack, pytest.raises(ValueError, match=f"in use by process {other.pid} on host"):
            run_folder.hold(tmp_path, stack)
        other.send_signal(end)
    with contextlib.ExitStack() as stack:
        run_folder.hold(tmp_path, stack)
        assert json.loads((tmp_path / run_folder.LOCK).read_text())["pid"] == os.getpid()
    assert (tmp_path / run_folder.LOCK).read_text() == ""


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / run_folder.LOCK).mkdir()
    with contextlib.ExitStack() as stack, pytest.raises(ValueError, match="cannot be written: Is a directory"):
        run_folder.hold(tmp_path, stack)


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_a_lock_that_is_a_link_leaves_its_target_alone(tmp_path, link):
    precious, folder = tmp_path / "precious", tmp_path / "run"
    precious.write_text("all of it")
    folder.mkdir()
    link(folder / run_folder.LOCK, precious)
    with contextlib.ExitStack() as stack, pytest.raises(ValueError, match=r"cannot be written: .*\.lock\)"):
        run_folder.hold(folder, stack)
    assert precious.read_text() == "all of it"


def test_a_foreign_folder_where_the_run_ends_is_refused_before_it_begins(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in ("policy", "reward_model", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
        with pytest.raises(ValueError, match=f"{name} is no model of this run: it has no .*config.json"):
            run_folder.take_up(str(tmp_path), True)
        (tmp_path / name / ("adapter_config.json" if name == "adapter" else "config.json")).write_text("{}")
    assert run_folder.take_up(str(tmp_path), True) == (tmp_path, False)


def test_a_holder_without_a_name_is_refused_too(tmp_path):
    (tmp_path / run_folder.LOCK).write_text("{")
    with contextlib.ExitStack() as one, contextlib.ExitStack() as two:
        run_folder.hold(tmp_path, one)
        (tmp_path / run_folder.LOCK).write_text("{")
        with pytest.raises(ValueError, match="in use by another process"):
            run_folder.hold(tmp_path, two)


@pytest.fixture(autouse=True)
def no_run(monkeypatch):
    """No run of another test in this process is named."""
    monkeypatch.setattr(stop_signal, "_resumed_from", [])


def stop(may_save=True, last=10):
    saved: list[int] = []
    return StopSignal(lambda version: saved.append(version) is None, lambda: may_save, last), saved


def test_a_signal_saves_at_the_next_publish_where_that_changes_no_bit():
    made, saved = stop()
    with made:
        made.stepped((), 5)
        made.published(1)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        made.stepped((), 6)
        with pytest.raises(Stopped, match="SIGTERM: stopped after step 2, which is saved"):
            made.published(2)
    assert saved == [2]
    made, saved = stop(may_save=False)
    with made:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        with pytest.raises(
            Stopped, match="SIGINT: stopped after step 3; --resume continues from the newest checkpoint"
        ):
            made.published(3)
    assert saved == []


def test_a_signal_ends_a_long_round_after_a_dispatch(monkeypatch):
    monkeypatch.setattr(stop_signal, "PATIENCE_S", 0.05)
    made, saved = stop()
    with made:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        made.stepped((), 1)
        time.sleep(0.06)
        with pytest.raises(Stopped, match="stopped after a dispatch"):
            made.stepped((), 2)
    assert saved == []


def test_the_limit_follows_the_grace_period_that_a_launcher_grants():
    assert stop_signal.limit({}) == stop_signal.LIMIT_S == 18.0
    assert stop_signal.limit({"JAXRL_GRACE_S": "150"}) == 146.0
    for wrong in ("x", "21", "-5", "1e9"):
        with pytest.raises(ValueError, match="JAXRL_GRACE_S=.* must be a whole number of seconds, at least 22"):
            stop_signal.limit({"JAXRL_GRACE_S": wrong})


def test_the_last_publish_ends_the_run_itself_and_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    made, saved = stop(last=4)
    with made:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        made.published(4)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # a second signal ends the process at once
    assert saved == [] and signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def interrupts():
    """Python's own handler of SIGINT, also where the tests run in the background and the signal is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_interrupt_of_a_program_is_pythons_own(interrupts):
    made, _ = stop()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt), made:
        for _ in range(2):
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


STUCK = """
import ctypes, sys
from jaxrl_post.launch import stop_signal

with stop_signal.heard(float(sys.argv[1])):
    with stop_signal.StopSignal(print, lambda: False, 9):
        print("ready", flush=True)
        for _ in range(2):  # as a call that waits for a device: no signal handler of Python's runs meanwhile
            ctypes.CDLL(None).usleep(60_000_000)
"""


def test_a_run_that_hangs_in_a_call_ends_in_time():
    command = [sys.executable, "-c", STUCK, "0.5"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=30)[1]
    assert process.returncode == 42 and "\nstopped where it was, 0.5 s after a signal" in said, said


def test_outside_of_the_ring_a_signal_is_obeyed_at_once_and_handlers_come_back():
    before = [signal.getsignal(one) for one in stop_signal.SIGNALS]
    with pytest.raises(Stopped, match="SIGINT: stopped outside of a step"), stop_signal.heard():
        made, _ = stop()
        with made:
            pass
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        time.sleep(5)
    assert [signal.getsignal(one) for one in stop_signal.SIGNALS] == before


def test_a_dead_lock_alone_leaves_a_folder_empty(tmp_path):
    (tmp_path / run_folder.LOCK).write_text("{}")
    assert run_folder.make(str(tmp_path), "runs", "demo", 0) == (tmp_path, True)


COMMAND = (
    "--config=configs/demo.py",
    "--config.steps=8",
    "--config.scheduler.prompts=16",
    "--config.eval.prompts=4",
    "--config.eval.every=0",
    "--config.checkpoint.every=100",
)
PIPELINE = ("--config=configs/demo/pipeline.py", *COMMAND[1:])


@pytest.mark.shown("variants")
@pytest.mark.slow
@pytest.mark.parametrize("command", [COMMAND, PIPELINE], ids=["sync", "pipeline"])
def test_a_run_that_is_stopped_and_resumed_ends_as_the_undisturbed_one(tmp_path, command):
    def begin(run, *more):
        words = [sys.executable, "-m", "jaxrl_post.main", *command, f"--run-dir={run}", *more]
        return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    with begin(whole) as process:
        said = process.communicate(timeout=280)[0]
    assert process.returncode == 0, said
    with begin(stopped) as process:
        rows = stopped / "metrics.jsonl"
        while not (rows.exists() and rows.read_text().count("actor/grad_norm") >= 2) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGSTOP)  # so that it is still there when the second one looks
        with begin(stopped, "--resume") as second:
            refused = second.communicate(timeout=280)[0]
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        said = process.communicate(timeout=60)[0]
    assert second.returncode == 1 and f"in use by process {process.pid}" in refused
    assert process.returncode == 42 and "SIGTERM: stopped after" in said and time.monotonic() - begun < 20
    with begin(stopped, "--resume") as process:
        said = process.communicate(timeout=280)[0]
    assert process.returncode == 0, said
    for name in ("rollouts/step_000008.npz", "policy/model.safetensors", "rewards.jsonl", "scheduler_log.jsonl"):
        assert (stopped / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_signal_is_answered_at_once_with_the_folder_for_resume(tmp_path):
    """While the main thread waits in a call, and long before the run ends."""
    code = STUCK.replace("with stop_signal.heard", "stop_signal.resumed_from('runs/mine')\nwith stop_signal.heard")
    with subprocess.Popen(
        [sys.executable, "-c", code, "8"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        said = process.stderr.readline()
        assert time.monotonic() - sent < 4
        process.kill()
    assert said.startswith("SIGINT: the run ends at its next publish or dispatch, within 8 s")
    assert said.endswith("--resume=runs/mine continues it\n")
