"""Seconds until the reward is there: pipelined generation against the best synchronous and tail-batched runs.

There are two workloads with long tails and five seeds. One is the demo's (configs/demo_long_tail.py). The other is
stories260K (configs/stories.py), which tells the first paragraph of a story or ends once it has said the word that
pays. First a step-cost table is measured, which every arm is given. Then each arm takes the settings with the fewest
seconds a step in short runs. Candidates differ in slots, with as many rows of 16, 32 or 64, and in over-subscription.
They lie on one device, or have twice 16 slots on two. The pipeline may also have learner and engine on a device each.
`ours` is the fastest pipelined arm, at a staleness of at most 4.

Seconds are those of whole training steps (generation, rewards, learner, swaps, logs), without evaluation. They count
until the mean reward of ten steps first reaches 90 % of what the synchronous run of that seed has in its last ten. Arms
take turns, seed by seed. The ratio is of medians over seeds, with a bootstrap interval. Final rewards are means of the
last twenty steps, with Welch's interval of the difference. The number of rollouts trained on by then stands beside
them. Seconds have no bound: learner and engine share two cores, so little is left to overlap. The show time-to-reward
has bounds, for devices of their own.

- `at_64_rows`: seconds a step of synchronous rounds over the pipeline's, both on one device with 64 slots and rows.
  This is nearer to an accelerator, where few rows take as long as many.
- `host_cores_busy`: CPU seconds of the run's process per second. Graders do not count; threads that spin do.
- `most_by_overlap`: an estimate of what overlap of the same work could gain at most, where all devices are threads of
  one host. It is the host's cores over those that synchronous rounds keep busy.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import intervals
import reward_runs

MINUTES = 30.0
SEEDS, REACHED, WINDOW, LAST, WARM = 5, 0.9, 10, 20, 4
TRIED = 16  # steps of the runs by which settings are chosen
QUIET = ("eval=default", "eval.prompts=0", "checkpoint.every=0", "trace_rounds=0")
WORKLOADS = {
    "demo": ("configs/demo_long_tail.py", ("steps=70",)),
    "stories": ("configs/stories.py", ("steps=50", *reward_runs.STORIES)),
}
SYNC = ("scheduler.name=sync", "scheduler.over=1.0", "scheduler.lane=0.0")
PIPED = (
    "scheduler.name=pipeline",
    "scheduler.over=1.0",
    "scheduler.lane=0.0",
    "scheduler.max_staleness=4",
    "scheduler.ahead=16",
    "algorithm.prox_logp_method=loglinear",
    "algorithm.rollout_is=token",
)
SIZES = (16, 32, 64)


def shape(slots: int) -> tuple[str, ...]:
    """Returns overrides for as many rows as slots. A dispatch of 16 steps ends early where half of the slots are free."""
    return (
        f"engine.slots={slots}",
        f"engine.row_sizes=[{slots}]",
        "engine.steps_per_dispatch=16",
        f"engine.refill_slots={slots // 2}",
    )


TWO = (*shape(16), "mesh.data=2")
CANDIDATES = {
    "sync": [(*SYNC, *TWO), *((*SYNC, *shape(slots)) for slots in SIZES)],
    "tail_batching": [
        ("scheduler.name=tail_batching", f"scheduler.over={over}", *form)
        for over, form in ((1.125, TWO), (1.125, shape(16)), (1.125, shape(32)), (1.25, shape(32)))
    ],
    "pipeline": [(*PIPED, *TWO), *((*PIPED, *shape(slots)) for slots in SIZES)],
    "split": [(*PIPED, *shape(slots), "mesh.engine=1") for slots in SIZES[:2]],
}

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def show(record) -> None:
    sys.path[:0] = [str(record.root), str(record.root / "scripts")]
    record.data("tinystories-260k")
    for workload in WORKLOADS:
        table = record.cached(f"{workload}-table", lambda: _table(record, workload))
        best = record.cached(f"{workload}-settings", lambda: _settings(record, workload, table))
        for arm, found in best.items():
            record.figure(f"{workload}.{arm}.settings", found["settings"])
            record.figure(f"{workload}.{arm}.of_seconds_per_step", found["of"])
        ours = min(("pipeline", "split"), key=lambda arm: min(best[arm]["of"]))
        record.figure(f"{workload}.ours_is", ours)
        record.figure(f"{workload}.at_64_rows", best["sync"]["of"][-1] / best["pipeline"]["of"][-1])
        runs: dict[str, list[dict]] = {arm: [] for arm in ("sync", "tail_batching", ours)}
        for seed in range(SEEDS):
            for arm, mine in runs.items():
                mine.append(
                    record.cached(
                        f"{workload}-{arm}-{seed}", lambda: _run(record, workload, table, best[arm]["settings"], seed)
                    )
                )
        _compare(record, workload, runs, ours)


def _compare(record, workload: str, runs: dict, ours: str) -> None:
    targets = [REACHED * statistics.mean(run["rewards"][-WINDOW:]) for run in runs["sync"]]
    reached = {arm: [_reached(run, target) for run, target in zip(mine, targets)] for arm, mine in runs.items()}
    for arm, mine in runs.items():
        record.figure(f"{workload}.{arm}.seconds_to_reward", [found["seconds"] for found in reached[arm]])
        record.figure(f"{workload}.{arm}.answers_to_reward", [found["answers"] for found in reached[arm]])
        record.figure(
            f"{workload}.{arm}.seconds_per_step",
            statistics.median(statistics.mean(run["seconds"][WARM:]) for run in mine),
        )
        busy = statistics.median(run["cores_busy"] for run in mine)
        record.figure(f"{workload}.{arm}.host_cores_busy", busy)
        if arm == "sync":
            record.figure(f"{workload}.most_by_overlap", len(os.sched_getaffinity(0)) / busy)
        record.figure(f"{workload}.{arm}.final_reward", [_final(run) for run in mine])
        record.figure(f"{workload}.{arm}.first_reward", [statistics.mean(run["rewards"][:WINDOW]) for run in mine])
        record.figure(f"{workload}.{arm}.reward_by_answers", _curve(mine))
    for other in ("sync", "tail_batching"):
        found = intervals.ratio_of_medians(*([found["seconds"] for found in reached[arm]] for arm in (other, ours)))
        for end, value in zip(("", "_low", "_high"), found):
            record.figure(f"{workload}.seconds_{other}_over_ours{end}", value)
    low, high = intervals.difference_of_means(
        [_final(run) for run in runs[ours]], [_final(run) for run in runs["sync"]]
    )
    record.figure(f"{workload}.final_reward_difference_low", low, at_most=0.0)
    record.figure(f"{workload}.final_reward_difference_high", high, at_least=0.0)
    record.figure(f"{workload}.final_reward_difference_width", high - low, at_most=0.05)
    record.figure(f"{workload}.largest_staleness", max(run["oldest"] for run in runs[ours]), at_most=4)
    record.figure(f"{workload}.mean_staleness", statistics.mean(run["stale"] for run in runs[ours]))


def _reached(run: dict, target: float) -> dict[str, float]:
    """Returns the seconds and rollouts until the mean reward of WINDOW steps reaches the goal."""
    for step in range(WINDOW, len(run["rewards"]) + 1):
        if statistics.mean(run["rewards"][step - WINDOW : step]) >= target:
            return {"seconds": sum(run["seconds"][:step]), "answers": step * run["answers"]}
    return {"seconds": math.inf, "answers": math.inf}


def _final(run: dict) -> float:
    return statistics.mean(run["rewards"][-LAST:])


def _curve(runs: list[dict]) -> dict[str, float]:
    """Returns the mean reward over seeds of each WINDOW steps, by the rollouts that were trained on."""
    steps = range(WINDOW, len(runs[0]["rewards"]) + 1, WINDOW)
    return {
        str(step * runs[0]["answers"]): round(
            statistics.mean(statistics.mean(run["rewards"][step - WINDOW : step]) for run in runs), 4
        )
        for step in steps
    }


# ---- settings and runs


def _table(record, workload: str) -> dict:
    """Measures step costs for a run's settings, by scripts/bench.py cost."""
    file, changes = WORKLOADS[workload]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cost.json"
        record.run(
            "scripts/bench.py",
            "cost",
            "--json",
            str(out),
            f"--config={file}",
            "--config.engine.row_sizes=[16,32,64]",
            *(f"--config.{change}" for change in (*changes, "engine.slots=16")),
            timeout_s=900,
        )
        found = json.loads(out.read_text())["figures"]
        return {"figures": {name: found[name] for name in ("step_s", "train_token_s")}}


def _settings(record, workload: str, table: dict) -> dict:
    """Returns for each arm the candidate with the fewest seconds a step, and the seconds of all candidates."""
    out = {}
    for arm, candidates in CANDIDATES.items():
        taken = []
        for candidate in candidates:
            run = _run(record, workload, table, (*candidate, f"steps={TRIED}"), 0)
            taken.append(statistics.mean(run["seconds"][WARM:]))
        out[arm] = {"settings": list(candidates[taken.index(min(taken))]), "of": taken}
    return out


def _run(record, workload: str, table: dict, settings: Sequence[str], seed: int) -> dict:
    """Runs one arm by the command. Returns reward, seconds and staleness of each step."""
    from jaxrl_post.telemetry import metrics

    file, changes = WORKLOADS[workload]
    devices = 2 if any(setting.startswith("mesh.") for setting in settings) else 1
    with tempfile.TemporaryDirectory() as folder:
        costs, run = Path(folder) / "cost.json", Path(folder) / "run"
        costs.write_text(json.dumps(table))
        record.run(
            "-m",
            "jaxrl_post.main",
            f"--config={file}",
            f"--run-dir={run}",
            f"--config.seed={seed}",
            f"--config.engine.cost_table={costs}",
            *(f"--config.{one}" for one in (*changes, *QUIET, *settings)),
            timeout_s=1800,
            env={"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"},
        )
        rows = [row for row in metrics.read(run / "metrics.jsonl") if "training/global_step" in row]
        size = json.loads((run / "config.json").read_text())["scheduler"]
    return {
        "rewards": [row["critic/score/mean"] for row in rows],
        "seconds": [
            row.get("timing_s/step", 0.0)
            - sum(row.get(f"timing_s/{name}", 0.0) for name in ("testing", "save_checkpoint"))
            for row in rows
        ],
        "cores_busy": statistics.mean(row["perf/host_cores_busy"] for row in rows[WARM:] if "timing_s/step" in row),
        "answers": size["prompts"] * size["group_size"],
        "oldest": max(row["off_policy/max"] for row in rows),
        "stale": statistics.mean(row["off_policy/mean"] for row in rows),
    }
