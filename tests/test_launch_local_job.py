"""Jobs of toy commands on this machine: exit codes, restarts, signals, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_post.launch.jobs import local
from jaxrl_post.launch.jobs.local import job_code, may_restart, run_job

ROOT = str(Path(__file__).parents[1])
# Counts its own starts in a file, and ends the n-th with the n-th of the codes that it is given. -9 is a kill.
COUNTING = """
import os, signal, sys
file = os.environ["COUNT"]
open(file, "a").write(".")
code = int(os.environ["CODES"].split()[os.path.getsize(file) - 1])
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def counting(folder: Path, *codes: str) -> list[dict[str, str]]:
    return [{"COUNT": str(folder / f"count_{index}"), "CODES": told} for index, told in enumerate(codes)]


def starts(folder: Path) -> list[int]:
    return [len(file.read_text()) for file in sorted(folder.glob("count_*"))]


@pytest.mark.parametrize(
    "codes, most, code, count",
    [
        (["0", "0"], 3, 0, 1),
        (["42 0", "42 0"], 3, 0, 2),
        (["42 42 0", "-9 42 0"], 3, 0, 3),
        (["-9 0"], 1, 0, 2),
        (["42 42 42", "42 42 42"], 2, 42, 3),
        (["42", "42"], 0, 42, 1),
        (["42", "1"], 3, 1, 1),
        (["0", "7"], 3, 7, 1),
        (["-9 -9", "42 42"], 1, 42, 2),
        (["-9 -9"], 1, 137, 2),
    ],
)
def test_a_job_begins_again_where_it_asks_for_that(tmp_path, codes, most, code, count):
    said = []
    assert run_job([sys.executable, "-c", COUNTING], counting(tmp_path, *codes), most, said.append) == code
    assert starts(tmp_path) == [count] * len(codes) and len(said) == count - 1


def test_what_a_restart_says(tmp_path):
    said = []
    run_job([sys.executable, "-c", COUNTING], counting(tmp_path, "42 0", "-9 0", "42 0"), 5, said.append)
    assert said == ["the job ended with exit code 42 of processes 0 2, SIGKILL of process 1; restart 1 of at most 5"]


def test_codes_of_a_job():
    ends = ([0, 0], [42, 0], [42, 1], [-9, 42], [-15], [0, -9], [2, 1])
    assert list(map(job_code, ends)) == [0, 42, 1, 42, 143, 137, 2]
    assert [codes for codes in ends[:5] if may_restart(codes)] == [[42, 0], [-9, 42], [-15]]


@pytest.mark.parametrize(
    "environments, most, sentence",
    [([], 1, "environments is empty"), ([{}], -1, "most_restarts=-1 must be at least 0")],
)
def test_a_job_that_cannot_be_is_one_sentence(environments, most, sentence):
    with pytest.raises(ValueError, match=sentence):
        run_job(["true"], environments, most)


def test_a_command_that_is_not_there_leaves_no_process():
    with pytest.raises(FileNotFoundError):
        run_job(["/nowhere/command"], [{}, {}], 1)


# Begins a child of its own that would live on, and writes both numbers.
PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
open(os.environ["PIDS"], "w").write(f"{os.getpid()} {child.pid} ")
"""


def lives(pid: int) -> bool:
    """Whether a process is there and is no zombie, which only waits to be counted."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def pids(files: list[Path]) -> list[int]:
    """The numbers that processes write, once all have."""
    until = time.monotonic() + 20
    while not all(file.exists() and file.read_text().endswith(" ") for file in files):
        assert time.monotonic() < until
        time.sleep(0.02)
    return [int(word) for file in files for word in file.read_text().split()]


def gone(numbers: list[int]) -> bool:
    until = time.monotonic() + 10
    while any(map(lives, numbers)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(lives, numbers))


def test_what_a_process_began_ends_with_it(tmp_path):
    files = [tmp_path / "0", tmp_path / "1"]
    assert run_job([sys.executable, "-c", PARENT], [{"PIDS": str(file)} for file in files], 0) == 0
    assert len(pids(files)) == 4 and gone(pids(files))


def test_processes_that_do_not_leave_a_failed_job_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "LEAVE_S", 0.3)
    monkeypatch.setattr(local, "STOP_S", 0.3)
    stubborn = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(os.environ['PIDS'], 'w').write(f'{os.getpid()} ')\n"
        "time.sleep(600 if os.environ['STAYS'] else 0)\nsys.exit(42)"
    )
    files = [tmp_path / "0", tmp_path / "1"]
    environments = [{"PIDS": str(file), "STAYS": stays} for file, stays in zip(files, ("", "1"), strict=True)]
    assert run_job([sys.executable, "-c", stubborn], environments, 0) == 42
    assert gone(pids(files))


LASTING = (
    PARENT
    + """
import signal
def leave(*_):
    open(os.environ["PIDS"] + ".told", "w").write("told")
    sys.exit(42)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
open(os.environ["PIDS"] + ".ready", "w").write(" ")
time.sleep(600)
"""
)
JOB = "import sys; from jaxrl_post.launch.jobs.local import run_job; sys.exit(run_job({command}, {environments}, 5))"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_job_and_all_of_its_processes(tmp_path, number):
    """SIGTERM and SIGINT are passed on and end the last attempt. After SIGKILL the kernel ends the processes."""
    files = [tmp_path / "0", tmp_path / "1"]
    environments = [{"PIDS": str(file)} for file in files]
    program = JOB.format(command=[sys.executable, "-c", LASTING], environments=environments)
    job = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"PYTHONPATH": ROOT})
    numbers = pids(files) + pids([Path(f"{file}.ready") for file in files])
    job.send_signal(number)
    assert job.wait(timeout=30) == (-9 if number == signal.SIGKILL else 42)
    told = [Path(f"{file}.told").exists() for file in files]
    assert told == [number != signal.SIGKILL] * 2
    assert gone(numbers if number != signal.SIGKILL else numbers[::2])
