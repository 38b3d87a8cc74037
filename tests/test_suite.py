"""The suite about itself: CPU seconds by file, workers that die, the time limit of a test, missing inputs, two tiers."""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"
COUNTED = f"""
import subprocess, sys, time

def test_by_itself():
    start = time.process_time()
    while time.process_time() < start + 0.5: pass

def test_by_a_child():
    subprocess.run([sys.executable, "-c", {BURN.format(seconds=1.0)!r}], check=True)
"""
HANGING = """
import time

def test_hangs(): time.sleep(60)

def test_is_sound(): pass
"""
HOLDING = """
import functools, gc, jax, shared_programs

gc.disable()

def compiled(i): return jax.jit(lambda x: (x.cumsum() * i).sum() + x.sort()[0]).lower(jax.numpy.ones(8)).compile()

cached = functools.cache(compiled)
kept = [jax.jit(lambda x, i=i: (x.cumsum() * i).sum() + x.sort()[0]) for i in range(20)]

class Circle:
    def __init__(self, i): self.own, self.program = self, compiled(i)

def maps(): return open('/proc/self/maps').read().count('\\n')

def test_compiles():
    compiled(80)
    print('before:', maps())
    for i, ours in enumerate(kept):
        ours(jax.numpy.ones(8)), cached(20 + i), Circle(40 + i)
        shared_programs.CACHE.entries[i] = [], compiled(60 + i)
"""
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins that this needs not take a second to import


def of(folder: Path) -> tuple:
    """Tests of another folder, with the settings of the project."""
    return "-c", ROOT / "pyproject.toml", "--rootdir", folder, "-p", "xdist.plugin"


def run(*arguments, **environment) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), **environment}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, arguments)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.extended), 2])
def test_cpu_seconds_are_told_by_file_with_those_of_children(tmp_path, workers):
    (tmp_path / "test_counted.py").write_text(COUNTED)
    (tmp_path / "test_idle.py").write_text("def test_it(): pass\n")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    kept = tmp_path / "kept.json"
    done = run(*of(tmp_path), "-p", "cpu_seconds", "-n", workers, tmp_path, **ALONE, CPU_SECONDS_FILE=str(kept))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout
    rows = {
        name.strip(): (int(tests or 0), float(seconds))
        for name, tests, seconds in re.findall(
            r"^(test_\w+\.py|\(start.*\)|sum)\s+(?:(\d+)\s+)?(\d+\.\d)\s+0\.0$", done.stdout, re.MULTILINE
        )
    }
    assert list(rows)[:2] == ["test_counted.py", "test_idle.py"], done.stdout
    assert rows["test_counted.py"][0] == 2 and 1.5 <= rows["test_counted.py"][1] < 4
    assert rows["test_idle.py"] == (1, pytest.approx(0, abs=0.3)) and rows["sum"][0] == 3
    assert rows["sum"][1] == pytest.approx(
        sum(seconds for name, (_, seconds) in rows.items() if name != "sum"), abs=0.3
    )
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime  # with the end of every process
    assert used - 2 <= rows["sum"][1] <= used + 0.1  # none is counted twice
    dearest = re.findall(r"^ +\d+\.\d  (test_\w+\.py::\w+)$", done.stdout, re.MULTILINE)
    assert dearest[0] == "test_counted.py::test_by_a_child" and len(dearest) == 3
    files = json.loads(kept.read_text())["files"]
    assert {name: (row["tests"], round(row["cpu_s"], 1)) for name, row in files.items()} == rows


def test_seconds_in_compilers_are_told_apart(tmp_path):
    (tmp_path / "test_compiles.py").write_text(
        "import jax\n\ndef test_it(): jax.jit(lambda x: (x.sort().cumsum() * 7).sum())(jax.numpy.ones(64))\n"
    )
    kept, begun = tmp_path / "kept.json", time.monotonic()
    done = run(*of(tmp_path), "-p", "cpu_seconds", "-n", 0, tmp_path, **ALONE, CPU_SECONDS_FILE=str(kept))
    row = json.loads(kept.read_text())["files"]["test_compiles.py"]
    assert done.returncode == 0 and 0.001 < row["compile_s"] < time.monotonic() - begun


def test_a_test_over_its_time_limit_is_ended_and_the_others_run(tmp_path):
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert 60 <= given["faulthandler_timeout"] <= 600 and given["faulthandler_exit_on_timeout"] is True
    (tmp_path / "test_hanging.py").write_text(HANGING)
    done = run(*of(tmp_path), "-o", "faulthandler_timeout=1", "-n", 1, tmp_path, **ALONE)
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout
    assert "crashed while running 'test_hanging.py::test_hangs'" in done.stdout and "Timeout (0:00:01)!" in done.stderr


@pytest.mark.parametrize("end, told", [("os.kill(os.getpid(), 9)", "SIGKILL"), ("os._exit(3)", "exit status 3")])
def test_a_worker_that_dies_is_told_with_its_end_and_its_memory(tmp_path, end, told):
    (tmp_path / "test_dies.py").write_text(
        f"import os\n\ndef test_holds(): assert len(bytearray(300 * 2**20)) > 0\n\ndef test_dies(): {end}\n"
    )
    done = run(*of(tmp_path), "-p", "workers", "-n", 1, "--max-worker-restart", 0, tmp_path, **ALONE)
    peak, by = re.search(
        r"^gw0: (\d+\.\d) GiB, .* mappings, ended (?:by|with) (.*)$", done.stdout, re.MULTILINE
    ).groups()
    assert by == told and 0.3 <= float(peak) < 0.6


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells a process its mappings")
def test_programs_of_a_file_are_forgotten_where_they_hold_many_mappings(tmp_path):
    """A process may have 65,530. Jax, a cached function of a test and the shared programs hold some each, and so does garbage."""
    (tmp_path / "test_compiles.py").write_text(HOLDING)
    (tmp_path / "test_later.py").write_text(
        "def test_it(): print('later:', open('/proc/self/maps').read().count('\\n'))\n"
    )
    before, later, at_most = {}, {}, {}
    for most in (1, 10**6):
        told = run(*of(tmp_path), "-p", "workers", "-n", 0, "-s", tmp_path, MOST_MAPS=str(most), **ALONE).stdout
        before[most], later[most] = (
            int(re.search(rf"{at}: (\d+)$", told, re.MULTILINE)[1]) for at in ("before", "later")
        )
        at_most[most] = int(
            re.search(r"^this process: .* GiB, ([\d,]+) mappings$", told, re.MULTILINE)[1].replace(",", "")
        )
    assert later[10**6] - before[10**6] > 3 * 80, "the programs were kept"
    assert later[1] - before[1] < 3 * 20, "a holder kept its programs"
    assert at_most[1] == pytest.approx(at_most[10**6], abs=80) and at_most[1] > later[1] + 3 * 80


def test_make_test_ends_when_a_worker_has_died(tmp_path):
    """pytest-xdist gives a file's other tests to a new worker, and then waits for a result that never comes."""
    flags = re.search(r"^PYTEST := \S+ -m pytest -n logical (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    (tmp_path / "test_hanging.py").write_text(HANGING)
    for name in ("first", "second", "third", "fourth"):
        (tmp_path / f"test_{name}.py").write_text("def test_it(): pass\n")
    limit = ("-o", "faulthandler_timeout=1")
    done = run(*of(tmp_path), *limit, "-n", 2, *flags.split(), tmp_path, **ALONE)
    assert done.returncode and "crashed while running 'test_hanging.py::test_hangs'" in done.stdout


@pytest.mark.parametrize("required, code", [pytest.param("", 0, marks=pytest.mark.extended), ("1", 1)])
def test_missing_inputs_are_told_loudly_and_fail_where_they_are_required(required, code):
    done = run(
        "-n", 0, "tests/test_data_chat.py::test_verls_real_template", JAXRL_DATA="/nowhere", JAXRL_REQUIRE_DATA=required
    )
    assert done.returncode == code and "/nowhere is no folder (set JAXRL_DATA)" in done.stdout
    assert ("!! REAL INPUTS ARE MISSING !!" in done.stdout) is ("1 tests of real inputs" in done.stdout) is not required


def test_continuous_integration_runs_both_tiers():
    said = subprocess.run(["make", "-n", "test-all"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    runs = [line for line in said.splitlines() if " -m pytest " in line]
    assert len(runs) == 1 and re.findall(r" -[mk] (\S+ \S+)", runs[0].partition(" -m pytest ")[2]) == ['"not shown"']
    words = (ROOT / ".ci" / "run").read_text().splitlines()
    assert words[-1] == 'CPU_SECONDS_FILE="$PWD/.cache/cpu_seconds.json" JAXRL_REQUIRE_DATA=1 make test-all'


def test_what_is_left_to_a_show_is_left_to_one_that_there_is():
    tests = {file.name: file.read_text() for file in (ROOT / "tests").glob("test_*.py")}
    left = {name for said in tests.values() for name in re.findall(r"mark\.shown\((.*?)\)", said)}
    shows = {file.stem.rstrip("_").replace("_", "-") for file in (ROOT / "scripts" / "shows").glob("*.py")}
    listed = (ROOT / "scripts" / "show.py").read_text()  # names that shows had are there, with what to write now
    assert len(left) >= 4 and all(name.strip("'\"") in shows or f"{name}: " in listed for name in left)
    source = ast.parse((ROOT / "scripts" / "shows" / "suite.py").read_text())
    (promises,) = [node.value for node in source.body if ast.unparse(getattr(node, "targets", [node])[0]) == "PROMISES"]
    files = [name for names, _ in ast.literal_eval(promises).values() for name in names.split()]
    assert {f"test_{name}.py" for name in files} <= tests.keys()
