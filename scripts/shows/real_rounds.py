"""Tail batching against the best synchronous rounds on the demo's policy: engine steps, seconds and curves of the same
run.

Runs configs/demo/long_tail.py both ways, in turns, over five seeds or more. Each arm has its own settings: those that
took the least time a trained group in short runs here. Candidates differ in slots, row sizes, steps a dispatch, the
freed slots that end a dispatch, and for tail batching in `over`. Both arms stay among row sizes that give the same bits
on a CPU, 64 and up, as a run does by default.

Seconds are those of whole training steps (generation, reward, learner, swap, logs), without evaluation. On a CPU a row
costs about the same in any company, so synchronous rounds of one small size waste less. `sync_of_any_size` is the best
of those, measured too and without a bound.

Curves are held-out accuracy at the same optimizer steps, and its mean over the run. Their difference between the arms
has Welch's 95 % interval, a seed being a sample. Seeds are added until it is narrow enough. The difference is also
given seed by seed, where even the order of what is trained may show.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import intervals
import plot_rounds
import trained

MINUTES = 14.0
PLATFORM = "cpu"
SEEDS, MOST_SEEDS, WIDTH = 5, 10, 0.05
CONFIG, WARM = "configs/demo/long_tail.py", 2  # rounds that are left out of seconds and steps
TRIED = 40  # rounds of the runs by which settings are chosen
SYNC = ("scheduler.name=sync", "scheduler.over=1.0", "scheduler.lane=0.0")
SHAPES = [
    (
        f"engine.slots={slots}",
        f"engine.row_sizes={sizes}",
        f"engine.steps_per_dispatch={steps}",
        f"engine.refill_slots={steps // 2}",
    )
    for slots, sizes in ((64, "[64]"), (96, "[64,96]"))
    for steps in (16, 32)
]
CANDIDATES = {
    "sync": [(*SYNC, *shape) for shape in SHAPES],
    "tail_batching": [(f"scheduler.over={over}", *shape) for over in (1.125, 1.25) for shape in SHAPES],
    "sync_of_any_size": [
        (*SYNC, f"engine.slots={size}", f"engine.row_sizes=[{size}]", "engine.refill_slots=4") for size in (16, 32, 48)
    ],
}
QUIET = (f"steps={TRIED}", "eval=default", "eval.prompts=0", "trace_rounds=0")


def show(record) -> None:
    best = record.cached("settings", lambda: _settings(record))
    for arm, found in best.items():
        record.figure(f"{arm}.settings", found["settings"])
        record.figure(f"{arm}.of_seconds_per_group", found["of"])
    runs: dict[str, list[dict]] = {"sync": [], "tail_batching": []}
    for seed in range(MOST_SEEDS):
        for arm in ("sync", "tail_batching"):
            runs[arm].append(record.cached(f"{arm}-{seed}", lambda: _run(record, best[arm]["settings"], seed)))
        if seed + 1 >= SEEDS and _width(runs) < WIDTH:
            break
    _speed(record, runs)
    other = record.cached("any-size", lambda: _run(record, best["sync_of_any_size"]["settings"], 0))
    for name in ("engine_steps", "seconds", "generation_s"):
        record.figure(f"sync_of_any_size.{name}_over_ours", other[name] / runs["tail_batching"][0][name])
    _curves(record, runs)
    for arm, mine in runs.items():
        record.figure(f"{arm}.idle_slot_time", statistics.mean(run["bubble"] for run in mine))
        for name in (
            "shift",
            "num_tokens_wasted",
            "num_tokens_recomputed",
            "num_tokens_generated",
            "num_rollouts_deferred",
            "longest_park",
            "num_dropped",
            "num_untrained",
            "most_deferrals",
        ):
            record.figure(
                f"{arm}.bias.{name}",
                statistics.mean(run["bias"][name] for run in mine),
                **({"equals": 0} if name in ("num_dropped", "num_untrained") else {}),
            )
        record.figure(f"{arm}.step_length", mine[0]["step_length"])


def _speed(record, runs: dict) -> None:
    """Writes medians over seeds, per trained group."""
    for name, bound in (("engine_steps", 1.5), ("seconds", 1.5), ("generation_s", None)):
        for arm, mine in runs.items():
            record.figure(f"{arm}.{name}_per_group", statistics.median(run[name] for run in mine))
        ratios = [a[name] / b[name] for a, b in zip(runs["sync"], runs["tail_batching"])]
        record.figure(f"{name}_ratio_by_seed", ratios)
        record.figure(f"{name}_ratio", statistics.median(ratios), **({"at_least": bound} if bound else {}))


def _curves(record, runs: dict) -> None:
    for arm, mine in runs.items():
        record.figure(f"{arm}.curve", [statistics.mean(values) for values in zip(*(run["curve"] for run in mine))])
        record.figure(f"{arm}.accuracy_after", statistics.mean(run["curve"][-1] for run in mine), at_least=0.85)
        record.figure(f"{arm}.accuracy_before", statistics.mean(run["curve"][0] for run in mine), at_most=0.5)
    low, high = _interval(runs)
    record.figure("curve.seeds", len(runs["sync"]), at_least=SEEDS)
    record.figure("curve.difference_low", low, at_most=0.0)
    record.figure("curve.difference_high", high, at_least=0.0)
    record.figure("curve.difference_width", high - low, at_most=WIDTH)
    record.figure(
        "curve.difference_by_seed", [b - a for a, b in zip(_means(runs["sync"]), _means(runs["tail_batching"]))]
    )


def _means(runs: list[dict]) -> list[float]:
    return [statistics.mean(run["curve"]) for run in runs]


def _interval(runs: dict) -> tuple[float, float]:
    """Returns Welch's 95 % interval of ours minus synchronous. The seeds of an arm are its sample."""
    return intervals.difference_of_means(_means(runs["tail_batching"]), _means(runs["sync"]))


def _width(runs: dict) -> float:
    low, high = _interval(runs)
    return high - low


# ---- the settings of each arm


def _settings(record) -> dict:
    """Returns for each arm the candidate with the fewest seconds a group, and the seconds of all candidates."""
    out = {}
    for arm, candidates in CANDIDATES.items():
        with tempfile.TemporaryDirectory() as folder:
            taken = [
                _speed_of(*_rows(record, Path(folder) / str(number), (*candidate, *QUIET), 0))["seconds"]
                for number, candidate in enumerate(candidates)
            ]
        out[arm] = {"settings": list(candidates[taken.index(min(taken))]), "of": taken}
    return out


# ---- one run


def _run(record, settings: list[str], seed: int) -> dict:
    """Runs one arm by the command. Returns its speed per trained group, curve, time shares and idle slots."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        rows, prompts = _rows(record, run, settings, seed)
        trace = plot_rounds.panel(plot_rounds.read(next(run.glob("trace_*.json"))), "", slice(WARM, None), True)
        lengths = {
            kind: [row[f"bias/step_length/{kind}"] for row in rows if f"bias/step_length/{kind}" in row]
            for kind in ("short", "long")
        }
        return {
            **_speed_of(rows, prompts),
            "curve": [row[name] for row in rows for name in row if name.endswith("acc/mean@4")],
            "step_length": {kind: statistics.mean(found) for kind, found in lengths.items() if found},
            "bubble": trace.bubble(),
            "bias": json.loads((run / "bias.json").read_text()),
        }


def _rows(record, run: Path, settings: Sequence[str], seed: int) -> tuple[list[dict], int]:
    trained.run(record, CONFIG, run, f"seed={seed} checkpoint.every=0", *settings, timeout_s=1800)
    return trained.rows(run), json.loads((run / "config.json").read_text())["scheduler"]["prompts"]


def _speed_of(rows: list[dict], prompts: int) -> dict[str, float]:
    """Returns engine steps, seconds of training steps and seconds of generation, per trained group."""
    steps = [row for row in rows if "training/global_step" in row][WARM:]
    groups, apart = len(steps) * prompts, ("timing_s/testing", "timing_s/save_checkpoint")
    return {
        "engine_steps": sum(row["rows/steps"] for row in steps) / groups,
        "seconds": sum(row.get("timing_s/step", 0.0) - sum(row.get(name, 0.0) for name in apart) for row in steps)
        / groups,
        "generation_s": sum(row.get("timing_s/gen", 0.0) for row in steps) / groups,
    }
