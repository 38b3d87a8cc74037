"""A run of 20 steps by the command, three times: synchronous rounds, the same with drafts, and pipelined.

Drafts change no bit: policy, tokens, log-probs and entropies are compared by hash. Both runs share a folder of compiled
programs, and with it what the compiler's tuner chose: another choice could round otherwise. The pipelined run is another
computation; no token of it may be older than the bound.

Seconds to the reward are those of whole steps, until the mean reward of WINDOW steps reaches REACHED of what the
synchronous run ends with. For the first step, which waits for compilers, stands the mean of the others. Steps of a
pipeline that follow each other at once have their seconds together, in the first row of metrics behind them.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gpu.part import Part

from jaxrl_post.runs import metric_rows, rollout_log

PRESET = "qwen2_5_0_5b"
HERE = Path(__file__).resolve().parent
CONFIG = HERE / "rl_config.py"
STALENESS, WINDOW, REACHED, GAIN = 4, 3, 0.9, 0.05
DRAFTS = (
    "speculation.drafter=ours",
    "speculation.prompt_entries=65536",
    "speculation.shared_entries=12288",
    "speculation.live_entries=1024",
)
PIPELINED = (
    "scheduler.name=pipeline",
    f"scheduler.max_staleness={STALENESS}",
    "scheduler.ahead=16",
    "algorithm.prox_logp_method=loglinear",
    "algorithm.rollout_is=token",
)
COMPARED = ("tokens", "logprobs", "entropies")
LIMIT_S = 300.0  # of one run; the section's own limit comes first


def same_bits(part: Part, preset: str = PRESET, more: Sequence[str] = ()) -> None:
    """Runs synchronous rounds with and without drafts, and compares what they leave."""
    with tempfile.TemporaryDirectory() as folder:
        plain, drafted = (
            arm(part, Path(folder), preset, name, (*more, *settings))
            for name, settings in (("sync", ()), ("drafted", DRAFTS))
        )
        part.figure("rl.that_differ_with_drafts", differences(Path(folder) / "sync", Path(folder) / "drafted"))
    for name, found in (("sync", plain), ("drafted", drafted)):
        part.figure(f"rl.{name}", found)
    part.figure("rl.reward_gain", plain["reward_after"] - plain["reward_before"], at_least=GAIN)
    part.figure("rl.num_drafted", drafted["num_drafted"], at_least=1)
    part.figure("rl.steps_that_train", sum(norm > 0 for norm in plain["grad_norms"]), at_least=plain["num_steps"] / 2)
    for what in ("first_rollouts", "rollouts", "policy"):  # if the first ones alone are equal, the learner differs
        part.figure(f"rl.{what}_equal_with_drafts", plain[what] == drafted[what], equals=True)
    target = REACHED * plain["reward_after"]
    for name, found in (("sync", plain), ("drafted", drafted)):
        part.figure(f"rl.{name}_seconds_to_reward", seconds_to(found, target))


def pipelined(part: Part, preset: str = PRESET, more: Sequence[str] = ()) -> None:
    """Runs the pipeline, against the target of the synchronous run."""
    with tempfile.TemporaryDirectory() as folder:
        found = arm(part, Path(folder), preset, "pipelined", (*more, *PIPELINED))
    part.figure("rl.pipelined", found)
    part.figure("rl.pipelined_staleness", found["staleness"], at_most=STALENESS)
    target = REACHED * part.told["rl.sync"]["reward_after"]
    part.figure("rl.pipelined_seconds_to_reward", seconds_to(found, target))


def arm(part: Part, folder: Path, preset: str, name: str, settings: Sequence[str]) -> dict[str, Any]:
    """Returns what one run left, from weights that are written once in `folder`."""
    policy = folder / "policy"
    if not policy.is_dir():
        part.run(HERE / "rl_policy.py", policy, preset, timeout_s=LIMIT_S, env=path(part) | {"JAX_PLATFORMS": "cpu"})
    place = folder / name
    given = (f"--config={CONFIG}", f"--run-dir={place}", f"--config.model.path={policy}")
    seconds = part.run(
        "-m", "jaxrl_post.main", *given, *(f"--config.{one}" for one in settings), timeout_s=LIMIT_S, env=path(part)
    )
    return {"process_s": seconds} | left_by(place)


def path(part: Part) -> dict[str, str]:
    """Returns the variable by which a process finds this checkout first."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(part.root), os.environ.get("PYTHONPATH"))))}


def left_by(place: Path) -> dict[str, Any]:
    """Returns rewards and rates of a run's folder, and hashes of its policy and its rollouts."""
    rows = [row for row in metric_rows.read(place / "metrics.jsonl") if "training/global_step" in row]
    seconds, rewards = [row.get("timing_s/step", 0.0) for row in rows], [row["critic/score/mean"] for row in rows]
    seconds[0] = statistics.mean(seconds[1:])
    files = sorted((place / "rollouts").glob("step_*.npz"))
    return {
        "step_s": seconds[0],
        "seconds": seconds,
        "rewards": rewards,
        "grad_norms": [row["actor/grad_norm"] for row in rows],
        "num_steps": len(rows),
        "reward_before": rewards[0],
        "reward_after": statistics.mean(rewards[-WINDOW:]),
        "trained_tokens_per_s": _median(rows[1:], "perf/throughput"),
        "generated_tokens_per_s": _median(rows[1:], "perf/generated_tokens_per_s"),
        "num_drafted": sum(row.get("spec/num_drafted", 0.0) for row in rows),
        "num_accepted": sum(row.get("spec/num_accepted", 0.0) for row in rows),
        "staleness": max(row["off_policy/max"] for row in rows),
        "mean_staleness": statistics.mean(row["off_policy/mean"] for row in rows),
        "policy": digest(file.read_bytes() for file in sorted((place / "policy").glob("*.safetensors"))),
        "first_rollouts": digest(_bits(files[:1])),
        "rollouts": digest(_bits(files)),
    }


def _median(rows: Sequence[dict], name: str) -> float | None:
    found = [row[name] for row in rows if name in row]
    return statistics.median(found) if found else None


def differences(one: Path, other: Path) -> dict[str, list[int]]:
    """Returns, for each step of two runs, how many rollouts differ in tokens, in log-probs and in entropies."""
    out: dict[str, list[int]] = {name: [] for name in COMPARED}
    for pair in zip(*(sorted((place / "rollouts").glob("step_*.npz")) for place in (one, other))):
        first, second = ({r.id: r for group in rollout_log.read(file) for r in group.rollouts} for file in pair)
        for name, counts in out.items():
            same = (getattr(r, name).tobytes() == getattr(second[id], name).tobytes() for id, r in first.items())
            counts.append(len(first) - sum(same))
    return out


def _bits(files: Sequence[Path]) -> Iterable[bytes]:
    """Everything about the rollouts of these files but when their tokens came."""
    for file in files:
        for group in rollout_log.read(file):
            for one in group.rollouts:
                yield str((tuple(one.id), one.finish.name)).encode()
                yield from (getattr(one, name).tobytes() for name in COMPARED)


def digest(pieces: Iterable[bytes]) -> str:
    """Returns a hash of all pieces; without any it is that of nothing."""
    out = hashlib.sha256()
    for piece in pieces:
        out.update(len(piece).to_bytes(8, "little") + piece)
    return out.hexdigest()[:16]


def seconds_to(found: dict[str, Any], target: float) -> float | None:
    """Returns seconds until the mean reward of WINDOW steps reaches the target, or None."""
    for step in range(WINDOW, len(found["rewards"]) + 1):
        if statistics.mean(found["rewards"][step - WINDOW : step]) >= target:
            return sum(found["seconds"][:step])
    return None
