"""Conversations: two policies learn in environments, killed runs go on bit for bit, and failing environments mask rollouts.

- training: configs/demo/calculator.py and configs/demo/grid_world.py, on held-out problems.
- kill: a pipelined run is killed in the middle of conversations and resumed.
- faults: environments that hang, raise and die mask their rollouts, and are counted.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import trained
from killed import CONVERSING, Runs, steps

from jaxrl_post.runs import rollout_log
from jaxrl_post.runs.checkpoint import host_state

MINUTES = 12.0

LIMIT_S = 3000.0  # of one run, on a busy machine
KILLS = (30, 90)  # dispatches at which a run is killed, in the middle of conversations
STEPS, EVERY = 8, 2
KILLED = (
    "--config=configs/demo/calculator.py",
    f"--config.steps={STEPS}",
    f"--config.checkpoint.every={EVERY}",
    *CONVERSING,
)
BROKEN = '''
"""A calculator that fails for one problem in four, in its second turn."""
import os, time
from jaxrl_post.rewards.environments.calculator import Calculator

class Broken(Calculator):
    def reset(self, row):
        self._turns, self._fate = 0, sum(map(ord, row["id"])) % 12
        return super().reset(row)

    def step(self, messages):
        self._turns += 1
        if self._turns == 2:
            if self._fate == 0: time.sleep(60)
            if self._fate == 1: raise RuntimeError("broken")
            if self._fate == 2: os._exit(3)
        return super().step(messages)
'''


def show(record) -> None:
    _trained(record)
    _killed(record)
    _faults(record)


# ---- training


def _trained(record) -> None:
    bounds = {"calculator": {"at_least": 0.8}, "grid_world": {}}
    for config, after in bounds.items():
        name = f"demo_{config}"
        found = record.cached(name, lambda: _run(record, f"configs/demo/{config}.py"))
        first, last = found["eval"]["before"], found["eval"]["after"]
        highest = 0.4 if config == "calculator" else 0.9
        record.figure(f"{name}.prompts", first["n"], at_least=40)
        record.figure(f"{name}.mean_at_4.before", first["mean_at_4"], at_most=highest)
        record.figure(f"{name}.mean_at_4.after", last["mean_at_4"], **after)
        error = (first["mean_at_4_se"] ** 2 + last["mean_at_4_se"] ** 2) ** 0.5
        gain = last["mean_at_4"] - first["mean_at_4"]
        record.figure(f"{name}.gain_in_standard_errors", gain / error, at_least=3.0)
        record.figure(f"{name}.greedy.before", first["greedy"])
        record.figure(f"{name}.greedy.after", last["greedy"])
        record.figure(f"{name}.unscored", last["num_unscored"], equals=0)


def _run(record, config: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        trained.run(record, config, Path(folder) / "run", timeout_s=LIMIT_S)
        return trained.summary(Path(folder) / "run")


# ---- kill


def _killed(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(record, Path(folder), KILLED, STEPS)
        runs.finish("whole")
        seen = []
        for dispatch in KILLS:
            name = f"killed-{dispatch}"
            done = runs.met(name, LIMIT_S, JAXRL_FAULT=f"dispatch:{dispatch}:kill")
            record.figure(f"kill_at_dispatch_{dispatch}.exit", done.returncode, equals=-signal.SIGKILL)
            seen.append(max(steps(runs.here / name), default=0))
            runs.finish(name)
            differences = runs.differences(runs.here / "whole", runs.here / name)
            record.figure(f"kill_at_dispatch_{dispatch}.what_differs", differences, equals=[])
        record.figure("kills.newest_steps", seen)
        record.figure("kills.resumed_from_a_save", sum(map(bool, seen)), at_least=1)
        record.figure("kills.conversations_between_turns_in_a_save", _waiting(runs.here / "whole"))


def _waiting(run: Path) -> int:
    """Returns the conversations that waited for their environment in the run's saved steps."""
    found = [file.parent for file in (run / "checkpoints").glob("step_*/**/state.json")]
    return sum(len(host_state.read_state(folder)["conversations"][1]["waiting"]) for folder in found)


# ---- faults


def _faults(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, run = Path(folder) / "broken.py", Path(folder) / "run"
        file.write_text(BROKEN)
        env = {"PYTHONPATH": str(record.root) + os.pathsep + os.environ.get("PYTHONPATH", "")}
        own = f"steps=3 eval.prompts=0 checkpoint.every=0 environment.name={file}:Broken environment.timeout_s=3.0"
        trained.run(record, "configs/demo/calculator.py", run, own, timeout_s=LIMIT_S, env=env)
        rows = trained.rows(run)
        groups = [group for log in sorted((run / "rollouts").glob("*.npz")) for group in rollout_log.read(log)]
    fates = {0: "hang", 1: "raise", 2: "die"}
    masked = dict.fromkeys(fates.values(), 0)
    wrong = 0
    for group in groups:
        fate = fates.get(sum(map(ord, group.prompt.id)) % 12)
        for rollout, scored in zip(group.rollouts, group.scored, strict=True):
            second = bool((~rollout.sampled).any()) and bool(rollout.sampled[-1])
            failed = fate is not None and second and not scored
            masked[fate or "hang"] += failed
            wrong += (not scored) and fate is None
    for fate, count in masked.items():
        record.figure(f"faults.masked_rollouts.{fate}", count, at_least=1)
    record.figure("faults.masked_without_a_fault", wrong, equals=0)
    counted = sum(row.get("environment/failed", 0) for row in rows)
    record.figure("faults.counted_less_masked", counted - sum(masked.values()), equals=0)
    steps = [row for row in rows if "actor/grad_norm" in row]
    record.figure("faults.steps_with_a_finite_gradient", sum(row["actor/grad_norm"] < 1e6 for row in steps), equals=3)
