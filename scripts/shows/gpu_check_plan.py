"""The half-hour plan of gpu_check runs whole on a CPU in small, resumes after kills, and its table renders from the H100's files.

No figure of the small runs is a measurement: sizes are tiny, and kernels are interpreted or plain jnp. The command runs twice,
with programs compiled without most optimizations.

1. undisturbed, in calls of at most ten minutes: every section ends with a figure, or with the reason why it has none. Only
   sections that try what may not be there may have a reason alone.
2. killed with its process group by SIGKILL. Two kills come behind the first figure of a section with several. Others come
   at moments drawn from seeds, and one within a whole run of RL. What a killed call had begun must end with it. Then
   calls go on until it is whole. The figures are the same by name, and no section that had finished runs again. Figures
   found before a kill stay as they were.
3. `--show` prints each file that the H100 left, with measured, expected and bound.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu.expected import EXPECTED
from gpu.sections import SECTIONS

MINUTES = 13.0
PLATFORM = "cpu"
SOURCES = ("scripts/gpu/*.py",)
COMMAND = "scripts/gpu_check.py"
FILES = {
    "scripts/results/gpu-check.json": 15,
    "scripts/results/gpu-check-first.json": 15,
}  # rows with an expectation, at least
WITHIN = ("timeline", "packed_rows_tiles")  # sections of several figures, with a compiler at work between two of them
SEEDS, MOST_S = range(5), 6.0  # of the other kills; seconds behind the end of a section
CALLS, LIMIT_S = 5, 1800.0


class Plan:
    """Calls of the command, all with one file of results in the folder `here`. `seen`: what it held at each kill."""

    def __init__(self, root: Path, here: Path, name: str):
        self.root, self.here, self.name, self.file = root, here, name, here / f"{name}.json"
        self.calls, self.seen = 0, []

    def told(self) -> dict[str, Any]:
        return json.loads(self.file.read_text()) if self.file.is_file() else {"sections": {}, "figures": {}}

    def states(self, state: str) -> set[str]:
        return {name for name, found in self.told()["sections"].items() if found["state"] == state}

    def begin(self) -> subprocess.Popen:
        self.calls += 1
        folders = {"JAX_COMPILATION_CACHE_DIR": str(self.here / "cache"), "TMPDIR": str(self.here)}
        env = {**os.environ, **folders, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        command = [sys.executable, COMMAND, "--small", f"--json={self.file}"]
        with open(self.here / f"{self.name}.{self.calls}.txt", "w") as out:
            return subprocess.Popen(command, cwd=self.root, env=env, stdout=out, stderr=out, start_new_session=True)

    def whole(self) -> dict[str, Any]:
        """Calls until nothing is left, and returns the result."""
        for _ in range(CALLS):
            process = self.begin()
            try:
                process.wait(timeout=LIMIT_S)
            finally:
                _end(process)
            if not self.told()["figures"]["not_reached"]:
                break
        return self.told()

    def kill(self, moment: Callable[[], bool], more_s: float = 0.0) -> bool:
        """Begins a call, and kills it `more_s` seconds behind a moment. Returns False where it had ended by then."""
        process = self.begin()
        try:
            while process.poll() is None and not moment():
                time.sleep(0.1)
            time.sleep(more_s)
            alive = process.poll() is None
        finally:
            _end(process)
        if alive:
            self.seen.append(self.told())
        return alive

    def running(self) -> list[bytes]:
        """Returns the command lines of all processes that name this folder."""
        lines = [_read(one) for one in Path("/proc").glob("[0-9]*/cmdline")]
        return [line for line in lines if str(self.here).encode() in line]

    def left(self) -> int:
        """Counts processes of sections that go on although their command is gone, a moment later."""
        for _ in range(50):
            if not self.running():
                return 0
            time.sleep(0.1)
        return len(self.running())


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _end(process: subprocess.Popen) -> None:
    """Kills the process with its group, where it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)


def show(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(record.root, Path(folder), "undisturbed")
        whole = plan.whole()
        _undisturbed(record, plan, whole)
        _killed(record, whole, Plan(record.root, Path(folder), "killed"))
    for name, count in FILES.items():
        _rendered(record, name, count)
    record.figure("total_s", round(time.monotonic() - record.started), at_most=LIMIT_S)


def _undisturbed(record, plan: Plan, whole: dict[str, Any]) -> None:
    figures, options = whole["figures"], {section.name for section in SECTIONS if section.option}
    reasons = {name for name in whole["sections"] if f"{name}.absent" in figures}
    shown = {name for name, found in whole["sections"].items() if set(found["figures"]) - {f"{name}.absent"}}
    record.figure("calls", plan.calls, at_most=3)
    record.figure("plan_s", whole["seconds"])
    record.figure(
        "says_that_nothing_is_a_measurement", "no figure is a measurement" in whole.get("small", ""), equals=True
    )
    record.figure("arms", len(SECTIONS), at_least=30)
    record.figure("arms_with_a_figure_or_a_reason", len(shown | reasons), equals=len(SECTIONS))
    record.figure("arms_with_a_reason_alone", sorted(reasons - shown))
    record.figure("arms_with_a_reason_alone_and_no_option", sorted(reasons - shown - options), equals=[])
    record.figure("expectations_of_no_figure", _unknown(figures, reasons - shown), equals=[])
    for name in sorted(reasons):
        record.figure(f"reason.{name}", figures[f"{name}.absent"])
    _ended(record, "undisturbed", whole)


def _unknown(figures: dict[str, Any], without: set[str]) -> list[str]:
    """Returns the expectations whose section has shown figures, none of which has the expected part."""
    kinds: dict[str, set[str]] = {}
    for key, value in figures.items():
        kinds.setdefault(key.partition(".")[0], set()).update(value if isinstance(value, dict) else {""})
    names = {name: (name.partition(".")[0], name.partition("/")[2]) for name in EXPECTED}
    return [name for name, (kind, part) in names.items() if kind not in without and part not in kinds.get(kind, ())]


def _ended(record, name: str, whole: dict[str, Any]) -> None:
    ends = [one for one, found in whole["sections"].items() if found["state"] == "finished"]
    record.figure(f"{name}.finished", len(ends), equals=len(SECTIONS))
    missed = [key for key, bound in whole["bounds"].items() if not bound["ok"]]
    record.figure(f"{name}.bounds_missed", missed, equals=[])


def _killed(record, whole: dict[str, Any], plan: Plan) -> None:
    kills, left = 0, 0
    for name in WITHIN:
        kills += plan.kill(lambda name=name: name in plan.states("unfinished") and _timed(plan.told(), name))
        left += plan.left()
    for seed in SEEDS:
        noise, before = random.Random(seed), len(plan.states("finished"))
        count = before + noise.randint(1, 4)
        kills += plan.kill(lambda count=count: len(plan.states("finished")) >= count, MOST_S * noise.random())
        left += plan.left()
    kills += plan.kill(lambda: any(b"jaxrl_post.main" in line for line in plan.running()), MOST_S)
    left += plan.left()
    record.figure("kills", kills, at_least=len(WITHIN) + len(SEEDS))
    record.figure("processes_left_by_kills", left, equals=0)
    _compared(record, whole, plan.whole(), plan)


def _compared(record, whole: dict[str, Any], end: dict[str, Any], plan: Plan) -> None:
    """Writes what the ends of both runs have in common, and what of each kill's file is still so."""
    _ended(record, "killed", end)
    record.figure("figures", len(whole["figures"]), at_least=100)
    record.figure("figures_of_one_run_alone", sorted(whole["figures"].keys() ^ end["figures"].keys()), equals=[])
    within = sum("unfinished" in _states(told) for told in plan.seen)
    record.figure("kills_within_a_section", within, at_least=len(WITHIN) + 1)
    again = {name for told in plan.seen for name in _again(told, end)}
    record.figure("sections_run_again_after_finished", len(again), equals=0)
    kept = {key for told in plan.seen for name in WITHIN for key in _timed(told, name)}
    record.figure("timed_figures_found_before_kills", len(kept), at_least=len(WITHIN))
    changed = {key for told in plan.seen for key in _changed(told, end)}
    record.figure("figures_measured_again", sorted(changed), equals=[])
    record.figure("starts_of_sections", sum(found["begun"] for found in end["sections"].values()))


def _states(told: dict[str, Any]) -> list[str]:
    return [found["state"] for found in told["sections"].values()]


def _timed(told: dict[str, Any], name: str) -> list[str]:
    """Returns a section's figures that no second measurement would find alike."""
    keys = told["sections"].get(name, {"figures": []})["figures"]
    return [key for key in keys if isinstance(told["figures"][key], (float, dict))]


def _again(told: dict[str, Any], end: dict[str, Any]) -> list[str]:
    """Returns the sections that had finished and whose process began once more."""
    return [
        name
        for name, found in told["sections"].items()
        if found["state"] == "finished" and end["sections"][name]["begun"] != found["begun"]
    ]


def _changed(told: dict[str, Any], end: dict[str, Any]) -> list[str]:
    """Returns the figures of finished sections, and timed ones of those in WITHIN, that are others at the end."""
    keys = [key for found in told["sections"].values() if found["state"] == "finished" for key in found["figures"]]
    return [key for key in [*keys, *(key for name in WITHIN for key in _timed(told, name))] if _other(told, end, key)]


def _other(told: dict[str, Any], end: dict[str, Any], key: str) -> bool:
    return told["figures"][key] != end["figures"].get(key)


def _rendered(record, name: str, count: int) -> None:
    """Prints a file's table by the command, and counts its rows."""
    lines = record.said(COMMAND, "--show", name, timeout_s=120).splitlines()
    found, key = json.loads((record.root / name).read_text()), Path(name).stem
    titles = next(index for index, line in enumerate(lines) if line.split()[:1] == ["figure"])
    record.figure(f"{key}.columns", lines[titles].split(), equals=["figure", "measured", "expected", "bound"])
    ends = {str(one) for one in EXPECTED.values()}
    beside = [line for line in lines[titles + 1 :] if any(end in line for end in ends)]
    record.figure(f"{key}.rows", len(lines) - titles - 1, at_least=len(found["figures"]))
    record.figure(f"{key}.rows_with_expected_figures", len(beside), at_least=count)
