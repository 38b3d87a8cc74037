"""An external harness trains the calculator over HTTP: tokens, rewards and weights are those of the built-in environment.

- training: configs/demo/calculator.py, and the same played by scripts/agents/harness.py with the openai client. Every file of
  rollouts, every metric that is not timed and the policy must be equal.
- run: a pipelined run is killed in the middle of sessions and resumed, while its harness lives on.
- harness: a harness that thinks for a while before every turn is killed again and again. Another process goes on.
- masked: a harness that takes sessions and goes on with none. Their rollouts are masked and counted.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import http_clients
import trained
from killed import CONVERSING, Runs, end, steps

from jaxrl_post.runs import metric_rows, rollout_log

MINUTES = 8.0
SOURCES = ("scripts/agents/*.py", "configs/turns_policy/*")

LIMIT_S = 1800.0  # of one run, on a busy machine
KILLS = (30, 90)  # dispatches at which a run is killed
HARNESS_KILLS = 3
HUNG = 4  # sessions that are masked
LATE_S = 0.05
HANG_S = 10.0  # until a session of a run with masks is late
TOKEN = "JAXRL_POST_TOKEN"
STEPS, EVERY = 8, 2
COMMAND = (
    "--config=configs/demo/agents.py",
    f"--config.steps={STEPS}",
    f"--config.checkpoint.every={EVERY}",
    *CONVERSING,
)


def show(record) -> None:
    os.environ[TOKEN] = secrets.token_urlsafe(16)
    _trained(record)
    with tempfile.TemporaryDirectory() as folder:
        _killed(record, Path(folder))
        _masked(record, Path(folder))


# ---- harnesses


class _Harnesses:
    """Processes of one harness, one after the other. `counts`: what they said, of which killed ones lack the last line."""

    def __init__(self, record, port: int, *more: str):
        self._root, self._more, self.port = record.root, (f"--url=http://127.0.0.1:{port}", *more), port
        self.counts: Counter[str] = Counter()
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> _Harnesses:
        self.begin()
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            if kind is None:
                self.process.wait(120)
        finally:
            self.kill()

    def begin(self) -> None:
        command = [sys.executable, "scripts/agents/harness.py", "--patience=300", *self._more]
        self.process = subprocess.Popen(command, cwd=self._root, stdout=subprocess.PIPE, text=True)

    def kill(self) -> None:
        self.process.kill()
        for line in self.process.communicate()[0].splitlines():
            self.counts.update(json.loads(line))


# ---- training


def _trained(record) -> None:
    found = record.cached("trained", lambda: _both(record))
    ours, theirs = found["built_in"], found["harness"]
    for name in ("before", "after"):
        record.figure(f"built_in.mean_at_4.{name}", ours[name])
    record.figure("harness.mean_at_4.before", theirs["before"], at_most=0.4)
    record.figure("harness.mean_at_4.after", theirs["after"], at_least=0.8)
    record.figure("harness.unscored", theirs["unscored"], equals=0)
    record.figure("harness.rewards_by_step", theirs["curve"])
    record.figure("rewards_by_step_that_differ", _unequal(ours["curve"], theirs["curve"]), equals=0)
    record.figure("rollouts", found["rollouts"], at_least=5000)
    record.figure("rollouts.turns", found["turns"], at_least=5000)
    record.figure("rollouts.files", found["files"], at_least=40)
    record.figure("files_that_differ", found["differ"], equals=[])
    record.figure("rows_of_metrics_that_differ", found["rows"], equals=0)
    for name in ("sessions", "turns", "rewards", "cut"):
        record.figure(f"harness.{name}", found["played"].get(name, 0))
    record.figure("harness.lost", found["played"].get("lost", 0), equals=0)
    for name in ("built_in", "harness"):
        record.figure(f"{name}.seconds", found[name]["seconds"])


def _both(record) -> dict:
    """Trains in both ways. Returns their figures and what differs."""
    with tempfile.TemporaryDirectory() as folder:
        one, two = Path(folder) / "built_in", Path(folder) / "harness"
        trained.run(record, "configs/demo/calculator.py", one, timeout_s=LIMIT_S)
        with _Harnesses(record, http_clients.free_port()) as harness:
            port = f"environment.arguments.port={harness.port}"
            trained.run(record, "configs/demo/agents.py", two, port, timeout_s=LIMIT_S)
        parts = [sorted(file.name for file in (run / "rollouts").iterdir()) for run in (one, two)]
        names = [f"rollouts/{name}" for name in parts[0]] + ["policy/model.safetensors", "scheduler_log.jsonl"]
        names += [f"evaluations/{file.name}" for file in (one / "evaluations").iterdir()]
        differ = [name for name in names if (one / name).read_bytes() != (two / name).read_bytes()]
        rollouts, turns = _counted(two)
        return {
            "built_in": _figures(one),
            "harness": _figures(two),
            "differ": differ + ["rollouts"] * (parts[0] != parts[1]),
            "files": len(names),
            "rows": _unequal(*map(_rows, (one, two))),
            "rollouts": rollouts,
            "turns": turns,
            "played": dict(harness.counts),
        }


def _figures(run: Path) -> dict:
    told, rows = trained.summary(run), _rows(run)
    before, after = told["eval"]["before"], told["eval"]["after"]
    return {
        "before": before["mean_at_4"],
        "after": after["mean_at_4"],
        "unscored": before["num_unscored"] + after["num_unscored"],
        "curve": [row["critic/score/mean"] for row in rows if "critic/score/mean" in row],
        "seconds": told["seconds"],
    }


def _rows(run: Path) -> list[dict]:
    return [metric_rows.deterministic(row) for row in trained.rows(run)]


def _unequal(one: list, two: list) -> int:
    return abs(len(one) - len(two)) + sum(a != b for a, b in zip(one, two))


def _counted(run: Path) -> tuple[int, int]:
    groups = [group for file in (run / "rollouts").glob("*.npz") for group in rollout_log.read(file)]
    turns = sum(float(group.components["turns"].sum()) for group in groups)
    return sum(len(group.rollouts) for group in groups), int(turns)


# ---- kills


def _killed(record, here: Path) -> None:
    port = http_clients.free_port()
    runs = Runs(record, here, [*COMMAND, f"--config.environment.arguments.port={port}"], STEPS)
    with _Harnesses(record, port):
        runs.finish("whole")
    seen, lost = [], 0
    for dispatch in KILLS:
        name = f"killed-{dispatch}"
        with _Harnesses(record, port) as harness:
            done = runs.met(name, LIMIT_S, JAXRL_FAULT=f"dispatch:{dispatch}:kill")
            seen.append(max(steps(here / name), default=0))
            runs.finish(name)
        lost += harness.counts["lost"]
        record.figure(f"run.kill_at_dispatch_{dispatch}.exit", done.returncode, equals=-signal.SIGKILL)
        record.figure(
            f"run.kill_at_dispatch_{dispatch}.what_differs", runs.differences(here / "whole", here / name), equals=[]
        )
    record.figure("run.newest_steps", seen)
    record.figure("run.resumed_from_a_save", sum(map(bool, seen)), at_least=1)
    record.figure("run.sessions_in_play_when_it_was_killed", lost, at_least=1)
    _harness_killed(record, runs, port)


def _harness_killed(record, runs, port: int) -> None:
    """Kills the harness after steps of the run, while it plays sessions, and begins another process at once."""
    run, kills, endpoint = runs.here / "harness", 0, http_clients.Caller(port, os.environ[TOKEN])
    with _Harnesses(record, port, f"--late={LATE_S}") as harness:
        process = runs.begin(run.name)
        while process.poll() is None and kills < HARNESS_KILLS:
            time.sleep(0.05)
            if sum("actor/grad_norm" in row for row in _timed(run)) > 2 * kills and _played(endpoint):
                harness.kill()
                harness.begin()
                kills += 1
        end(process)
    endpoint.close()
    late = sum(row.get("perf/late_environments", 0) for row in _timed(run))
    record.figure("harness.kills", kills, equals=HARNESS_KILLS)
    record.figure("harness.kill.sessions_taken_again", harness.counts["released"], at_least=1)
    record.figure("harness.kill.turns_that_the_ring_waited_for", late, at_least=1)
    record.figure("harness.kill.what_differs", runs.differences(runs.here / "whole", run), equals=[])


def _played(endpoint) -> int:
    """Returns the sessions that a harness plays now."""
    try:
        return json.loads(endpoint.ask("GET", "/v1/sessions")[1])["played"]
    except OSError:
        endpoint.close()
        return 0


def _timed(run: Path) -> list[dict]:
    return trained.rows(run) if (run / "metrics.jsonl").exists() else []


# ---- masks


def _masked(record, here: Path) -> None:
    """A second harness takes the four oldest sessions twice, and goes on with none of them."""
    port, run = http_clients.free_port(), here / "masked"
    more = ("--config.steps=1", "--config.eval.prompts=0", "--config.checkpoint.every=0")
    own = (f"--config.environment.arguments.port={port}", f"--config.environment.timeout_s={HANG_S}")
    command = [sys.executable, "-m", "jaxrl_post.main", "--config=configs/demo/agents.py", *more, *own]
    process = subprocess.Popen([*command, f"--run-dir={run}"], cwd=record.root, stdout=subprocess.DEVNULL)
    idle, first = http_clients.Caller(port, os.environ[TOKEN]), set()
    while process.poll() is None and len(first) < HUNG:
        first |= _taken(idle, HUNG - len(first))
    time.sleep(HANG_S + 1)
    again = _taken(idle, HUNG)
    idle.close()
    with _Harnesses(record, port):
        process.wait(LIMIT_S)
    rows = _timed(run)
    record.figure("masked.exit", process.returncode, equals=0)
    record.figure("masked.sessions_offered_twice", len(first & again), equals=HUNG)
    record.figure("masked.failed", sum(row.get("environment/failed", 0) for row in rows), equals=HUNG)
    record.figure("masked.retries", sum(row.get("environment/retries", 0) for row in rows), equals=HUNG)
    record.figure("masked.unscored", sum(row.get("reward/unscored", 0) for row in rows), equals=HUNG)


def _taken(idle, most: int) -> set[str]:
    """Takes sessions, as soon as the run is there, and returns their names."""
    try:
        status, data = idle.ask("POST", "/v1/sessions", {"harness": "idle", "most": most, "wait": 5})
    except OSError:
        idle.close()
        time.sleep(0.1)
        return set()
    if status != 200:
        raise RuntimeError(f"sessions cannot be taken: {status}: {data[:200]!r}")
    return {one["id"] for one in json.loads(data)["sessions"]}
