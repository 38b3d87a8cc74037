"""Starts and ends of a run's processes: what is noted, what a kill leaves, and what a folder alone says of the run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_post import __main__ as commands
from jaxrl_post.runs import attempts

ROOT = str(Path(__file__).parents[1])


@pytest.fixture(autouse=True)
def closed():
    """No attempt of another test is open."""
    attempts._open.clear()
    yield
    attempts._open.clear()


def noted(place: Path, *codes: int | None, of: int | None = None) -> None:
    """Notes an attempt of processes of this host that are gone; None: it was killed."""
    number = str(1 + max((one.number for one in attempts._read(place)), default=0))
    for index, code in enumerate(codes):
        attempts.begin(place, index, of or len(codes), lambda text: number)
        if code is not None:
            attempts.end(code, f"why {code}" if code else "")
    for file in (place / attempts.NAME).glob("*.jsonl"):
        file.write_text(file.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {_gone()}'))


def _gone() -> int:
    """The number of a process that has ended."""
    done = subprocess.Popen(["true"])
    done.wait()
    return done.pid


def lines(place: Path) -> list[str]:
    return str(attempts.status(place)).splitlines()


def test_attempts_are_counted_and_told(tmp_path):
    noted(tmp_path, 42, 42, None, 42)
    noted(tmp_path, None, None, None, None)
    noted(tmp_path, 0, 0, 0, 0)
    found = attempts.status(tmp_path)
    assert [one.number for one in found.attempts] == [1, 2, 3] and found.restarts == 2
    assert [[process.code for process in one.processes] for one in found.attempts] == [
        [42, 42, None, 42],
        [None] * 4,
        [0] * 4,
    ]
    assert found.state == "finished"
    told = lines(tmp_path)
    assert told[0].startswith(f"{tmp_path}: finished; step 0, no checkpoint, last sign of life ")
    assert told[1] == "attempts 3, restarts 2"
    assert told[2].endswith("s, processes 4; exit code 42: 0, 1, 3; killed: 2") and told[2].startswith("  1  20")
    assert told[3] == "     why 42" and told[4].endswith("processes 4; killed: all")
    assert told[5].endswith("processes 4; exit code 0: all") and len(told) == 6


@pytest.mark.parametrize(
    "codes, state",
    [
        ([0], "finished"),
        ([None], "killed"),
        ([0, None], "killed"),
        ([42, None], "ended with exit code 42"),
        ([42, 1], "ended with exit code 1"),
    ],
)
def test_the_state_of_a_run(tmp_path, codes, state):
    noted(tmp_path, *codes)
    assert attempts.status(tmp_path).state == state


def test_a_process_that_lives_is_running(tmp_path):
    attempts.begin(tmp_path, 0, 1, str)
    assert attempts.status(tmp_path).state == "running" and lines(tmp_path)[2].endswith("running: its process")
    attempts.end(42, "a sentence")
    attempts.end(1)  # the first end counts
    assert attempts.status(tmp_path).state == "ended with exit code 42"
    (process,) = attempts.status(tmp_path).attempts[0].processes
    assert (process.code, process.why, process.pid, process.host) == (
        42,
        "a sentence",
        os.getpid(),
        socket.gethostname(),
    )


def test_a_process_of_another_host_may_run_or_be_killed(tmp_path):
    attempts.begin(tmp_path, 0, 1, str)
    file = tmp_path / "attempts" / "process_0.jsonl"
    file.write_text(file.read_text().replace(socket.gethostname(), "elsewhere"))
    assert attempts.status(tmp_path).state == "running, or killed on another host"


def test_kill_9_leaves_a_start_without_an_end(tmp_path):
    program = (
        "import os, sys; from pathlib import Path; from jaxrl_post.runs import attempts\n"
        "attempts.begin(Path(sys.argv[1]), 0, 1, str)\n"
        "assert 'jax' not in sys.modules\nos.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": ROOT}, timeout=60)
        assert done.returncode == -signal.SIGKILL
    found = attempts.status(tmp_path)
    assert found.state == "killed" and found.restarts == 1
    assert [line.rpartition("; ")[2] for line in lines(tmp_path)[2:]] == ["killed: its process"] * 2


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path):
    noted(tmp_path, None)
    file = tmp_path / "attempts" / "process_0.jsonl"
    file.write_text(file.read_text() + '{"event": "end", "attem')
    noted(tmp_path, 0)
    assert [one.number for one in attempts.status(tmp_path).attempts] == [1, 2]
    assert [one.processes[0].code for one in attempts.status(tmp_path).attempts] == [None, 0]


def test_another_number_of_processes_and_one_that_never_began(tmp_path):
    noted(tmp_path, 42)
    noted(tmp_path, *[0] * 9, of=10)
    assert [one.of for one in attempts.status(tmp_path).attempts] == [1, 10]
    assert lines(tmp_path)[-1].endswith("processes 10, 9 of them began; exit code 0: 9 processes")


def test_step_checkpoint_and_age_are_read_of_the_logs(tmp_path):
    noted(tmp_path, None, None)
    for step in ("step_000002", "step_000004", "step_000006.part", "step_000004.damaged-1"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
    (tmp_path / "config.json").write_text(json.dumps({"steps": 20}))
    (tmp_path / "process_0").mkdir()
    (tmp_path / "process_0" / "metrics.jsonl").write_text('{"step": 4}\n{"step": 5}\n{"step"')
    for path in tmp_path.rglob("*"):
        os.utime(path, (1000.0, 1000.0))
    os.utime(tmp_path / "process_0" / "metrics.jsonl", (1600.0, 1600.0))
    found = attempts.status(tmp_path, now=1900.0)
    assert (found.step, found.steps, found.saved, found.age_s) == (5, 20, 4, 300.0)
    told = str(found).splitlines()[0]
    assert told.endswith("killed; step 5 of 20, newest checkpoint 4, last sign of life 5.0 min ago")


def test_clocks_that_were_set_back_make_no_negative_time(tmp_path, monkeypatch):
    """The clock goes back by an hour within an attempt, which takes the seconds of the monotonic clock."""
    now, begun = time.time(), time.monotonic()
    monkeypatch.setattr(attempts.time, "time", lambda: now)
    attempts.begin(tmp_path, 0, 1, lambda text: text)
    monkeypatch.setattr(attempts.time, "time", lambda: now - 3600.0)
    attempts.end(0)
    measured = time.monotonic() - begun
    told = lines(tmp_path)
    assert ", 0 s, processes 1" in told[2]
    assert "last sign of life at a time 60.0 min ahead of this clock" in told[0]
    note = json.loads((tmp_path / attempts.NAME / "process_0.jsonl").read_text().splitlines()[1])
    assert 0 <= note["seconds"] <= measured


def test_an_attempt_of_an_older_release_lasts_from_note_to_note(tmp_path):
    noted(tmp_path, 42)
    file = tmp_path / attempts.NAME / "process_0.jsonl"
    start, end = map(json.loads, file.read_text().splitlines())
    del end["seconds"]
    for ended, text in ((30.0, ", 30 s, "), (-30.0, ", 0 s, ")):
        file.write_text("".join(json.dumps(one) + "\n" for one in (start, end | {"time": start["time"] + ended})))
        assert text in lines(tmp_path)[2]


def test_a_run_from_before_attempts_were_noted(tmp_path):
    (tmp_path / "config.json").write_text('{"steps": 3}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    assert lines(tmp_path)[0].startswith(f"{tmp_path}: no attempt is noted; step 3 of 3, no checkpoint")


@pytest.mark.parametrize(
    "name, sentence",
    [("demo-0-01", r"there is no folder .*; nearest is .*demo-0-001$"), ("demo-0-001", "is no folder of a run")],
)
def test_what_is_no_run_is_one_sentence(tmp_path, name, sentence):
    (tmp_path / "demo-0-001").mkdir()
    with pytest.raises(ValueError, match=sentence):
        attempts.status(tmp_path / name)


def test_an_end_that_cannot_be_noted_is_said_and_changes_nothing(tmp_path, capsys, monkeypatch):
    attempts.begin(tmp_path, 0, 1, str)

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(attempts, "_append", refuse)
    attempts.end(42)
    assert capsys.readouterr().err.endswith("process_0.jsonl: No space left on device\n")


def test_the_end_of_a_run_whose_folder_was_removed_is_not_noted(tmp_path, capsys):
    attempts.begin(tmp_path / "run", 0, 1, str)
    os.remove(tmp_path / "run" / "attempts" / "process_0.jsonl")
    os.rmdir(tmp_path / "run" / "attempts")
    attempts.end(1)
    assert not (tmp_path / "run" / "attempts").exists() and capsys.readouterr().err == ""


def test_the_command_tells_the_status_of_a_folder_alone(tmp_path, capsys):
    attempts.begin(tmp_path, 0, 1, lambda text: text)
    attempts.end(42, "a signal")
    assert commands.main(["launch", f"--status={tmp_path}"]) == 0
    told = capsys.readouterr().out
    assert "ended with exit code 42" in told and "attempts 1, restarts 0" in told and "a signal" in told
    assert commands.main(["launch", "--status=https://host/run"]) == 1
    assert "--status" in capsys.readouterr().err
