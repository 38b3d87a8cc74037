"""scripts/gpu_check.py where there is no GPU: it refuses, resumes, and outlives sections that fail, crash or hang."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402
import sources  # noqa: E402
from gpu import device, expected  # noqa: E402
from gpu.sections import SECTIONS, Section  # noqa: E402

SEEN = {"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "count": 1, "capability": "9.0"}
# Stands for a section's process: what it does lies in its name. Each call leaves a line in calls.txt beside it.
CHILD = """
import json, os, pathlib, subprocess, sys, time
from gpu import held
held.follow(os.environ)
name, part, told, seconds = sys.argv[1:]
part, here = pathlib.Path(part), pathlib.Path(__file__).parent
earlier = json.loads(part.read_text())["figures"] if part.is_file() else {}
with open(here / "calls.txt", "a") as calls:
    calls.write(f"{name} {sorted(earlier)} {sorted(json.loads(pathlib.Path(told).read_text()))}\\n")

def leave(figures, bounds={}, not_reached=[]):
    other = part.with_name("other.json")
    other.write_text(json.dumps({"figures": figures, "bounds": bounds, "not_reached": not_reached}))
    other.replace(part)

mended = (here / "mended").exists()
if name.startswith("bad") and not mended:
    leave({f"{name}.some": 1})
    raise ValueError(f"{pathlib.Path(__file__).parent}: no such kernel")
if name.startswith("crash"):
    os.abort()
if name.startswith("hang") and not mended:
    leave({f"{name}.some": 1}, not_reached=[f"{name}.more"])
    print(subprocess.Popen(["sleep", "60"]).pid, file=open(here / "sleeper", "w"), flush=True)
    time.sleep(60)
if name.startswith("low"):
    leave({name: 1}, {name: {"at_least": 2, "ok": False}})
elif name.startswith("long") and not earlier:
    leave({f"{name}.1": 1}, not_reached=[f"{name}.2"])
else:
    leave(earlier | {name: 2})
"""


def section(name: str, needs_s: float = 0.0, limit_s: float = 30.0, **more) -> Section:
    return Section(name=name, needs_s=needs_s, limit_s=limit_s, **more)


@pytest.fixture
def call(tmp_path, monkeypatch):
    """A call of the command with other sections; returns its exit code and the file."""
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")

    monkeypatch.setattr(sources, "closure", lambda root, start: ["scripts/gpu_check.py"])  # all of them take seconds

    def run(*table, seconds=60.0, seen=SEEN, only=""):
        monkeypatch.setattr(device, "ask", lambda root: seen)
        file = tmp_path / "x.json"
        code = gpu_check.main(
            [f"--json={file}", f"--seconds={seconds}", f"--only={only}"], table, tmp_path / "child.py"
        )
        return code, json.loads(file.read_text())

    return run


def calls(folder) -> list[str]:
    file = folder / "calls.txt"
    return [line.split()[0] for line in file.read_text().splitlines()] if file.is_file() else []


def test_it_refuses_in_one_sentence_where_there_is_no_gpu(tmp_path):
    done = subprocess.run(
        [sys.executable, "scripts/gpu_check.py", f"--json={tmp_path / 'x.json'}"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "needs an NVIDIA GPU" in done.stderr
    assert not (tmp_path / "x.json").exists()


def test_an_older_gpu_is_refused_and_a_newer_one_is_not():
    assert "1 x NVIDIA H100" in device.why_not(SEEN | {"capability": "8.0"})
    assert not device.why_not(SEEN) and not device.why_not(SEEN | {"capability": "10.0"})


def test_a_section_that_fails_is_recorded_and_the_others_run(call, tmp_path, capsys):
    table = section("good"), section("bad"), section("crash"), section("last", after="good"), section("no", after="bad")
    code, told = call(*table)
    assert code == 1 and not told["ok"]
    assert told["figures"]["failed"] == ["bad", "crash"] and told["figures"]["not_reached"] == ["no"]
    assert told["figures"]["good"] == 2 and told["figures"]["bad.some"] == 1 and told["figures"]["last"] == 2
    error = told["sections"]["bad"]["error"]
    assert "exit code 1" in error and error.endswith("no such kernel")
    assert "exit code -6" in told["sections"]["crash"]["error"]
    assert "no such kernel" in capsys.readouterr().out
    assert calls(tmp_path) == ["good", "bad", "crash", "last"]


def test_a_later_call_goes_on_with_the_rest_and_failed_sections_come_last(call, tmp_path):
    table = section("bad"), section("long"), section("never", needs_s=1e6), section("good")
    assert call(*table)[0] == 1
    (tmp_path / "mended").touch()
    code, told = call(*table[:2], section("never"), table[3])
    assert code == 0 and told["ok"] and told["figures"]["failed"] == [] == told["figures"]["not_reached"]
    assert calls(tmp_path) == ["bad", "long", "good", "long", "never", "bad"]
    again, others = (tmp_path / "calls.txt").read_text().splitlines()[3].split("] [")
    assert again == "long ['long.1'" and "'good'" in others  # its own figures, and those of the others
    assert told["figures"]["long.1"] == 1 and told["figures"]["long"] == 2 and "bad.some" not in told["figures"]
    assert {name: found["begun"] for name, found in told["sections"].items()} == dict(bad=2, long=2, good=1, never=1)
    assert call(*table)[0] == 0 and len(calls(tmp_path)) == 6


def test_what_was_not_reached_is_no_failure(call):
    code, told = call(section("good"), section("long"), section("never", needs_s=1e6))
    assert code == 0 and told["figures"]["not_reached"] == ["long.2", "never"]


def test_a_missed_bound_is_a_failure_also_in_the_next_call(call, tmp_path):
    assert call(section("low"))[0] == 1
    code, told = call(section("low"))
    assert code == 1 and told["bounds"]["low"] == {"at_least": 2, "ok": False} and calls(tmp_path) == ["low"]


def gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().split(") ")[1][0] == "Z"


def test_a_hang_is_ended_with_all_that_it_started(call, tmp_path):
    code, told = call(section("hang", limit_s=5.0), section("good"))
    assert code == 1 and told["figures"]["failed"] == ["hang"] and told["figures"]["good"] == 2
    assert told["sections"]["hang"]["error"].startswith("took more than 5 s") and told["figures"]["hang.some"] == 1
    assert gone(int((tmp_path / "sleeper").read_text()))


def test_a_section_that_the_end_of_the_call_cuts_is_no_failure(call, tmp_path):
    code, told = call(section("hang"), section("good", needs_s=2.0), seconds=6.0)
    assert code == 0 and told["figures"]["not_reached"] == ["hang.more", "good"] and told["figures"]["hang.some"] == 1


def test_some_sections_alone(call, tmp_path, capsys):
    table = section("good"), section("low"), section("hang")
    code, told = call(*table, only="good")
    assert code == 0 and told["figures"]["not_reached"] == ["low", "hang"] and calls(tmp_path) == ["good"]
    code, told = call(*table, only="low,good")
    assert code == 1 and told["figures"]["not_reached"] == ["hang"] and calls(tmp_path) == ["good", "low"]
    with pytest.raises(SystemExit) as ended:
        call(*table, only="good,lwo")
    assert ended.value.code == 2 and "there is no section lwo; all are good, low, hang" in capsys.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_call_goes_on(call, tmp_path, signum):
    code = f"""
import pathlib, signal, sys, gpu_check, sources
from gpu import device, sections
device.ask = lambda root: {SEEN!r}
sources.closure = lambda root, start: ["scripts/gpu_check.py"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
table = [sections.Section(name=name, needs_s=0, limit_s=60) for name in ("good", "hang")]
gpu_check.main(["--json={tmp_path / "x.json"}"], table, pathlib.Path({str(tmp_path / "child.py")!r}))
"""
    run = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")})
    deadline = time.monotonic() + 60
    while not (tmp_path / "x.json").is_file() or '"hang.some": 1' not in (tmp_path / "x.json").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.send_signal(signum)
    run.wait(30)
    sleeper = int((tmp_path / "sleeper").read_text())
    while not gone(sleeper):  # also where a kill left nobody who could end it
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (tmp_path / "mended").touch()
    code, told = call(section("good"), section("hang"))
    assert code == 0 and told["figures"]["hang.some"] == 1 and told["figures"]["hang"] == 2
    assert calls(tmp_path) == ["good", "hang", "hang"]


@pytest.mark.parametrize("name, value", [("commit", "0" * 40), ("device", {}), ("versions", {}), ("sources", {})])
def test_with_another_commit_device_or_version_it_begins_anew(call, tmp_path, capsys, name, value):
    _, told = call(section("good"))
    (tmp_path / "x.json").write_text(json.dumps(told | {name: value}))
    call(section("good"))
    assert calls(tmp_path) == ["good", "good"] and f"belongs to another {name}:" in capsys.readouterr().out


def test_a_damaged_file_begins_anew(call, tmp_path, capsys):
    (tmp_path / "x.json").write_text('{"figures": ')
    code, told = call(section("good"))
    assert code == 0 and told["figures"]["good"] == 2 and "x.json is no JSON" in capsys.readouterr().out


def test_an_option_that_is_not_there_is_a_figure(call):
    code, told = call(section("bad", option=True), section("hang", limit_s=1.0, option=True))
    assert code == 0 and told["figures"]["failed"] == [] == told["figures"]["not_reached"]
    assert told["figures"]["bad.absent"].startswith("exit code 1: ValueError")
    assert told["figures"]["hang.absent"].startswith("took more than 1 s")


def test_the_file_names_what_it_belongs_to(call):
    _, told = call(section("good"))
    assert told["device"] == SEEN and told["command"][:2] == ["python", "scripts/gpu_check.py"]


def test_a_result_vouches_for_every_section():
    found = set(sources.closure(ROOT, ROOT / "scripts" / "gpu_check.py"))
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "scripts" / "gpu").glob("*.py")} <= found
    assert {"kernels/flash_gpu.py", "jaxrl_post/main.py", "tests/engine_lab.py", "scripts/record.py"} <= found
    assert not {path for path in found if path.startswith("scripts/results/")}, (
        "a call would not know its own file again"
    )


def test_the_table_of_sections():
    from gpu import child, small

    assert {one.name for one in SECTIONS} == set(child.RUN) == set(small.SECTIONS)
    names = [one.name for one in SECTIONS]
    assert len(set(names)) == len(names)
    for place, one in enumerate(SECTIONS):
        assert one.needs_s + gpu_check.MARGIN_S < one.limit_s and (not one.after or one.after in names[:place])
    assert gpu_check.DEADLINE_S < 600 - 30


def test_the_half_hour_comes_first():
    flags = ("flags_while", "flags_concurrent", "flags_cublaslt", "flags_triton", "flags_one_tile", "row_bits_one_tile")
    plan = (
        *("device", "decode_1_5b", "timeline", "packed_rows", "packed_rows_times", "packed_rows_tiles", *flags),
        *(
            "train",
            "train_head_chunk",
            "train_no_scan",
            "tokamax",
            "generate_eager",
            "generate_compiled",
            "torch_train",
        ),
        "swap",
    )
    assert tuple(one.name for one in SECTIONS)[: len(plan)] == plan
    flagged = {one.name: one.flags for one in SECTIONS if one.flags}
    assert set(flagged) == {"timeline", *flags} and len(set(flagged.values())) == len(flagged) - 1
    assert flagged["flags_one_tile"] == flagged["row_bits_one_tile"]


def test_flags_of_a_section_stand_behind_those_of_the_command(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--one")
    assert gpu_check.environment("--two")["XLA_FLAGS"] == "--one --two"
    monkeypatch.delenv("XLA_FLAGS")
    assert gpu_check.environment("--two")["XLA_FLAGS"] == "--two" and "XLA_FLAGS" not in gpu_check.environment()


@pytest.mark.parametrize("name, fewest", [("gpu-check", 15), ("gpu-check-first", 15)])
def test_a_result_is_shown_beside_what_is_expected(name, fewest, monkeypatch, capsys):
    monkeypatch.setattr(device, "ask", lambda root: pytest.fail("it asks for a device"))
    file = ROOT / "scripts" / "results" / f"{name}.json"
    assert gpu_check.main(["--show", str(file)]) == 0
    head, titles, *rows = capsys.readouterr().out.splitlines()
    assert "H100" in head and titles.split() == ["figure", "measured", "expected", "bound"]
    assert sum("(H100)" in row or "(estimate)" in row for row in rows) >= fewest
    assert len(rows) >= len(json.loads(file.read_text())["figures"])


def test_rows_of_a_table_by_hand():
    step = "decode.qwen2_5_1_5b.batch_16_context_1024"
    figures = {step: {"step_ms": 3.0, "floor_ms": 1.0}, "x": 2, "device.copy_gb_per_s": 1.5, step + "0": {"step_ms": 1}}
    assert expected.rows(figures, {"x": {"at_least": 1, "at_most": 1, "ok": False}}) == [
        (f"{step}/step_ms", "3", "2.835 (H100)", "", ""),
        ("x", "2", "", ">= 1 and <= 1", "FAIL"),
        ("device.copy_gb_per_s", "1.5", "2952 (H100)", "", ""),
        (f"{step}0", "{'step_ms': 1}", "", "", ""),
    ]


def figure(told: dict, key: str):
    """The value of an expectation's figure, or of a part of it."""
    name, _, part = key.partition("/")
    return told[name][part] if part else told[name]


def test_expectations_by_the_h100_are_what_its_files_say():
    files = [json.loads((ROOT / "scripts" / "results" / f"gpu-check{end}.json").read_text()) for end in ("-first", "")]
    told = files[0]["figures"] | files[1]["figures"]
    for key, one in expected.MEASURED.items():
        assert figure(told, key) == pytest.approx(one.low, rel=0.005) and one.low == one.high, key


def test_every_expectation_is_of_a_figure():
    """A section without time names what it would measure. The others have run on the H100, if by other settings."""
    from gpu import child, options
    from gpu.part import Part

    part = Part(told={"device.copy_gb_per_s": 1.0}, seconds=0.0)
    for one in SECTIONS:
        if one.name.startswith(("flags_", "generate_")) or one.name in (
            "decode_1_5b",
            "decode_7b",
            "timeline",
            "torch_train",
            "row_products",
            "decode_library",
            "decode_fixed",
        ):
            child.RUN[one.name](part)
    options.beside(part, "tokamax", None, counts=(1, 4))
    files = [json.loads((ROOT / "scripts" / "results" / f"gpu-check{end}.json").read_text()) for end in ("-first", "")]
    known = {*part.not_reached, *part.figures, *files[0]["figures"], *files[1]["figures"]}
    for key in expected.EXPECTED:
        name = key.partition("/")[0]
        assert name in known or re.sub(r"^(train|row_bits)_\w+", r"\1", name) in known, key


def test_small_runs_leave_the_result_of_a_gpu_alone(capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--small"])
    assert ended.value.code == 2 and "name another file by --json" in capsys.readouterr().err


def test_a_small_result_says_so_and_no_call_of_another_kind_goes_on_from_it(call, tmp_path, monkeypatch, capsys):
    (tmp_path / "child.py").write_text(
        CHILD.replace("name, part, told, seconds =", "name, part, told, seconds, *small =")
    )
    monkeypatch.setattr(device, "ask", lambda root: {"platform": "cpu", "kind": "cpu", "count": 1, "capability": "0"})
    file = tmp_path / "x.json"
    code = gpu_check.main(["--small", f"--json={file}"], [section("good")], tmp_path / "child.py")
    assert code == 0 and json.loads(file.read_text())["small"] == gpu_check.SMALL
    assert gpu_check.main(["--show", str(file)]) == 0 and gpu_check.SMALL in capsys.readouterr().out
    _, told = call(section("good"))
    assert "small" not in told and calls(tmp_path) == ["good", "good"]
