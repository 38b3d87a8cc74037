"""One command joins four processes under every launcher, and goes on bit for bit after processes of the job were killed.

Runs a small configs/demo/sharded.py for 3 steps, in bfloat16 on a mesh of data x fsdp = 2 x 2. The job has four processes of
one CPU device each. Every launcher's variables are emulated on this machine, and the command is the same. Each run is compared with
the first: decisions, rollouts, metrics, weights and moments of all processes, byte for byte.

Then one more job loses a process to `kill -9` twice: first process 2, then process 0, which coordinates. Each time the others
end with exit code 42 and name the lost one, and the job begins again by itself. It ends as the undisturbed runs.
"""

from __future__ import annotations

import re
import tempfile
import threading
import time
from pathlib import Path

import joined_jobs
from killed import differences

from jaxrl_post.runs import attempts

MINUTES = 11.0
PROCESSES, STEPS = 4, 3
LEAVE_S = 10.0  # for all others to be gone after a kill, on two busy cores
OPTIONS = [f"--config.steps={STEPS}", "--config.mesh.data=2", "--config.mesh.fsdp=2", *joined_jobs.SMALL]
KILLS = ((2, 1), (0, 2))  # a process, and the checkpoint after which it is killed


def show(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        first, *others = joined_jobs.LAUNCHERS
        for launcher in (first, *others):
            seconds, code = _run(record, here / launcher, launcher)
            record.figure(f"{launcher}.seconds", round(seconds, 1))
            if record.figure(f"{launcher}.exit_code", code, equals=0) != 0:
                raise RuntimeError(joined_jobs.said(here / launcher))
            _joined(record, here / launcher, launcher)
            if launcher != first:
                record.figure(f"{launcher}.what_differs", differences(here / first, here / launcher, STEPS), equals=[])
        _killed(record, here)
        record.figure("killed.what_differs", differences(here / first, here / "killed", STEPS), equals=[])


def _run(record, run: Path, launcher: str, most_restarts: int = 0) -> tuple[float, int]:
    config = f"--config={record.root / 'configs' / 'demo' / 'sharded.py'}"
    begun = time.monotonic()
    job = joined_jobs.started(record.root, launcher, PROCESSES, run, [config, *OPTIONS], run.parent / "cache")
    code = joined_jobs.run(job, most_restarts)
    return time.monotonic() - begun, code


def _joined(record, run: Path, name: str) -> None:
    """Writes figures of one run: four processes that were one job and decided alike."""
    import processes

    (only,) = attempts.status(run).attempts
    record.figure(f"{name}.processes", [only.of, len(only.processes)], equals=[PROCESSES, PROCESSES])
    mine = [run / f"process_{index}" for index in range(PROCESSES)]
    decided = [(folder / "scheduler_log.jsonl").read_bytes() for folder in mine]
    record.figure(f"{name}.decisions", len(decided[0].splitlines()), at_least=STEPS)
    record.figure(f"{name}.processes_decide_alike", len(set(decided)), equals=1)
    same = all(processes.same_files(mine[0] / "rollouts", other / "rollouts") for other in mine[1:])
    record.figure(f"{name}.processes_have_equal_rollouts", same, equals=True)


def _killed(record, here: Path) -> None:
    """Runs the job once more, kills a process twice, and writes figures of what the others did."""
    left: list[float] = []
    killer = threading.Thread(target=joined_jobs.kill, args=(here / "killed", KILLS, left), daemon=True)
    killer.start()
    seconds, code = _run(record, here / "killed", "kubernetes", most_restarts=len(KILLS))
    killer.join(timeout=10)
    record.figure("killed.seconds", round(seconds, 1))
    if record.figure("killed.exit_code", code, equals=0) != 0:
        raise RuntimeError(joined_jobs.said(here / "killed"))
    found = attempts.status(here / "killed")
    print(found, flush=True)
    record.figure("killed.restarts", found.restarts, equals=len(KILLS))
    for number, ((lost, _), seconds) in enumerate(zip(KILLS, left, strict=True)):
        processes = found.attempts[number].processes
        others = [one for one in processes if one.index != lost]
        key = f"killed_process_{lost}"
        record.figure(f"{key}.exit_codes", [one.code for one in processes if one.index == lost], equals=[None])
        record.figure(f"{key}.exit_codes_of_others", [one.code for one in others], equals=[42] * (PROCESSES - 1))
        named = sum(f"process {lost} of {PROCESSES} is lost" in one.why for one in others)
        record.figure(f"{key}.others_that_name_it", named, equals=PROCESSES - 1)
        record.figure(f"{key}.seconds_until_the_others_were_gone", round(seconds, 2), at_most=LEAVE_S)
    went_on = re.findall(r"goes on after step (\d+)", (here / "killed.0.log").read_text())
    record.figure("killed.went_on_after_steps", [int(step) for step in went_on], equals=[step for _, step in KILLS])
