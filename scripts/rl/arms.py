"""One run of a shape in one mode, as the command runs it: what its folder says, and what was predicted of it.

All modes train on as many rollouts of the same prompts. The first step waits for compilers and is left out of seconds. Means are over
the other steps, because steps of a pipeline that follow each other at once have their seconds together.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu import rl_runs
from gpu.part import Part

from jaxrl_post.runs import metric_rows
from jaxrl_post.runs.run_logs import RunLogs

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONFIG = HERE / "config.py"
MODEL = "RL_CHECK_MODEL"  # names the folder of real weights, if any
LIMIT_S = 1500.0  # of one run
MODES = {
    "sync": (),
    "tail_batching": ("scheduler.name=tail_batching", "scheduler.over=1.25", "scheduler.prefix_mode=recompute"),
    "pipeline": rl_runs.PIPELINED,
    "speculation": rl_runs.DRAFTS,
}
SECONDS = ("gen", "update_actor", "update_weights", "reward", "old_log_prob", "log")  # phases of every run
COMPARED = ("step_s", "gen_s", "update_actor_s", "update_weights_s")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's shape: name, preset, what it changes of the config, and counts of its prompts (scripts/rl/inputs.py)."""

    name: str
    preset: str
    options: tuple[str, ...] = ()
    made: tuple[int, ...] = ()


def run(part: Part, shape: Shape, mode: str) -> None:
    """Runs the shape in a mode, and writes figures and predictions. A run that the plan refuses is a figure."""
    key = f"{shape.name}.{mode}"
    if not part.wants(key, 30.0):
        return
    options = [*shape.options, *_inputs(part, shape), *MODES[mode]]
    plan = _predicted(part, options, "-")
    if plan["plan"] == "does not fit":
        part.figure(key, {"without_room_mib": plan["plan_mib"]})
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        given = (f"--config={CONFIG}", f"--run-dir={place}", *(f"--config.{one}" for one in options))
        seconds = part.run("-m", "jaxrl_post.main", *given, timeout_s=LIMIT_S, env=rl_runs.path(part))
        found = {"process_s": seconds} | left_by(RunLogs(place))
        predicted = _predicted(part, options, str(place))
    sync = part.told.get(f"{shape.name}.sync", found)
    wanted = found.pop("wanted_rollouts")
    if "step_s" in sync:
        found["times_as_fast_as_sync"] = sync["step_s"] / found["step_s"]
    before = part.told.get(f"{shape.name}.sync.predicted", predicted)
    predicted["times_as_fast_as_sync"] = before["step_s"] / predicted["step_s"]
    predicted |= {"not_simulated": "drafts"} if mode == "speculation" else {}
    part.figure(f"{key}.trained_rollouts", found["trained_rollouts"], equals=wanted)
    part.figure(f"{key}.predicted", predicted)
    ratios = {name: found[name] / predicted[name] for name in COMPARED if predicted[name] > 0}
    part.figure(f"{key}.measured_over_predicted", ratios)
    part.figure(key, found)  # last, as a call that goes on asks for it


def _inputs(part: Part, shape: Shape) -> list[str]:
    """Returns the options of weights, prompts and rewards: real ones, or random ones that are made once."""
    if real := os.environ.get(MODEL):
        rows = Path(os.environ.get("JAXRL_DATA", ROOT.parent / "shared" / "data")) / "gsm8k" / "train.jsonl"
        if not rows.is_file():
            raise ValueError(f"{MODEL}={real}: real weights train on GSM8K, and {rows} is not there: set JAXRL_DATA")
        rewards = "('jaxrl_post.rewards.math:strict','jaxrl_post.rewards.math:flexible')"
        chat = [
            "data.chat=true",
            'data.template={prompt} Let\'s think step by step and output the final answer after "####".',
        ]
        return [
            f"model.path={real}",
            f"data.train={rows}",
            "data.size=32",
            *chat,
            "data.source=openai/gsm8k",
            f"reward.functions={rewards}",
            "reward.weights=(1.0,0.1)",
        ]
    folder = ROOT / ".cache" / "rl_check" / shape.preset
    if not (folder / "prompts.jsonl").is_file():
        shutil.rmtree(folder, ignore_errors=True)  # what a killed call began
        env = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "JAX_PLATFORMS": "cpu"}
        part.run(HERE / "inputs.py", folder, shape.preset, *shape.made, timeout_s=LIMIT_S, env=env)
    return [f"model.path={folder / 'policy'}", f"data.train={folder / 'prompts.jsonl'}"]


def _predicted(part: Part, options: Sequence[str], lengths: str) -> dict[str, Any]:
    said = part.said(HERE / "prediction.py", CONFIG, lengths, *options, timeout_s=300, env=rl_runs.path(part))
    return json.loads(said.splitlines()[-1])


def left_by(logs: RunLogs) -> dict[str, Any]:
    """Returns seconds by phase, rates, counts and shares of device time from a run's folder."""
    rows = [row for row in logs.rows if metric_rows.is_of_step(row)]
    warm, scheduler = rows[1:] or rows, logs.kept["scheduler"]
    whole, size = _sum(warm, "timing_s/step"), scheduler["group_size"]
    found = {f"{name}_s": _sum(warm, f"timing_s/{name}") / len(warm) for name in SECONDS}
    return {
        "steps": len(rows),
        "step_s": whole / len(warm),
        **found,
        "first_step_s": rows[0].get("timing_s/step"),
        "trained_rollouts": round(size * _sum(rows, "sched/num_groups_trained")),
        "wanted_rollouts": size * scheduler["prompts"] * logs.kept["steps"],
        "trained_tokens_per_s": _sum(warm, "rollout/num_tokens") / whole,
        "generated_tokens_per_s": _generated(warm) / whole,
        "mean_length": _sum(rows, "response_length/mean") / len(rows),
        "device_time": logs.summary.get("device_time", {}),
        "staleness": max(row.get("off_policy/max", 0.0) for row in rows),
        "num_drafted": _sum(rows, "spec/num_drafted"),
        "num_accepted": _sum(rows, "spec/num_accepted"),
        "by_step": [_step(row) for row in warm if row.get("timing_s/gen") and row.get("rows/steps")],
    }


def _generated(rows: Sequence[dict[str, float]]) -> float:
    return _sum(rows, "rows/decode") + _sum(rows, "rows/draft_accepted")


def _step(row: dict[str, float]) -> dict[str, Any]:
    """Returns what a cost table is fitted to: engine steps by rows, and seconds of generation and of training."""
    sizes = {name.rpartition("_")[2]: count for name, count in row.items() if name.startswith("rows/size_") and count}
    trained = {"train_s": row.get("timing_s/update_actor", 0.0), "tokens": row.get("rollout/num_tokens", 0.0)}
    return {
        "sizes": sizes,
        "gen_s": row["timing_s/gen"],
        **trained,
        "publish_s": row.get("timing_s/update_weights", 0.0),
    }


def _sum(rows: Sequence[dict[str, float]], name: str) -> float:
    return math.fsum(row.get(name, 0.0) for row in rows)
