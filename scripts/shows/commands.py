"""50 rollouts of a pipelined run are replayed bit for bit, and paired intervals cover a planted effect.

replay: a pipelined run swaps weights under running rollouts. 50 random rollouts of it are sampled again, 30 of them
from those with tokens of several versions. Three go through the command line. The run's folder must stay as it was.
compare: pairs of runs are made by the host, with common noise and a planted effect, and compared from their folders.
The paired interval must cover the effect as often as it says. A real pair of runs is compared by the command line.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import statistics
import tempfile
from pathlib import Path

import numpy as np

from jaxrl_post.commands import compare
from jaxrl_post.commands.repeated import repeated
from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId
from jaxrl_post.runs import run_logs
from jaxrl_post.runs.rollout_log import RolloutLog

MINUTES = 8.0

RUN = [
    "--config=configs/demo/pipeline.py",
    "--config.steps=16",
    "--config.checkpoint.every=2",
    "--config.checkpoint.keep_last=100",
    "--config.scheduler.prompts=16",
    "--config.scheduler.group_size=4",
    "--config.scheduler.max_unscored=32",
    "--config.engine.steps_per_dispatch=4",
    "--config.eval.prompts=32",
    "--config.eval.every=6",
]
SEVERAL, OTHERS, BY_COMMAND = 30, 20, 3  # rollouts to replay: with tokens of several versions, others; by the command
RESAMPLINGS, PROMPTS, SAMPLES, DRAWS = 1000, 64, 2, 1000
EFFECT, SPREAD, COMMON = 0.06, 0.08, 0.8  # of the planted effect over prompts, and the share of common noise


def show(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder) / name for name in "ab"]
        record.run("-m", "jaxrl_post.main", *RUN, f"--run-dir={runs[0]}", timeout_s=900)
        record.run("-m", "jaxrl_post.main", *RUN, "--config.optimizer.lr=5e-3", f"--run-dir={runs[1]}", timeout_s=900)
        _replays(record, runs[0])
        _real_pair(record, *runs)
        _coverage(record, Path(folder))
    record.planted("tests/test_commands_replay.py", 4)


def _asked(record, *arguments: str) -> list[dict]:
    return [json.loads(line) for line in record.said("-m", "jaxrl_post", *arguments, timeout_s=600).splitlines()]


# ---- replay


def _replays(record, run: Path) -> None:
    rows, dice = _asked(record, "rollouts", str(run), "--json"), random.Random(0)
    several = [row["rollout"] for row in rows if row["num_versions"] > 1]
    others = [row["rollout"] for row in rows if row["num_versions"] == 1]
    record.figure("replay.rollouts_of_the_run", len(rows))
    record.figure("replay.of_several_versions", len(several))
    names = dice.sample(several, SEVERAL) + dice.sample(others, OTHERS)
    before = _hashes(run)
    found = repeated(run_logs.opened(run), [run_logs.parsed_name(name) for name in names])
    equal = [one for one in found if one.equal]
    versions = [len(set(one.found.versions.tolist())) for one in equal]
    record.figure("replay.replayed", len(found), at_least=50)
    record.figure("replay.equal_bit_for_bit", len(equal), equals=len(found))
    record.figure("replay.with_two_or_more_versions", sum(count > 1 for count in versions), at_least=25)
    record.figure("replay.most_versions", max(versions))
    record.figure("replay.tokens", sum(len(one.found) for one in equal))
    record.figure("replay.checkpoints_begun_from", len({one.begun for one in found}), at_least=4)
    by_command = [_asked(record, "replay", str(run), f"--rollout={name}", "--json")[0] for name in names[:BY_COMMAND]]
    same = sum(told["equal"] and told["tokens"] == one.logged.tokens.tolist() for told, one in zip(by_command, found))
    record.figure("replay.by_command_line", same, equals=BY_COMMAND)
    record.figure("replay.files_of_the_run_changed", sorted(before.items() ^ _hashes(run).items()), equals=[])


def _hashes(run: Path) -> dict[str, str]:
    files = (path for path in run.rglob("*") if path.is_file())
    return {path.relative_to(run).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# ---- compare


def _real_pair(record, one: Path, two: Path) -> None:
    (told,) = _asked(record, "compare", str(one), str(two), "--json")
    record.figure("compare.real.options_that_differ", sorted(told["config"]), equals=["optimizer.lr"])
    training = told["paired"][0]
    for name in ("num_pairs", "difference", "interval", "unpaired"):
        record.figure(f"compare.real.training.{name}", training[name])
    record.figure("compare.real.training.width_over_unpaired", training["width_over_unpaired"], at_most=0.99)


def _coverage(record, folder: Path) -> None:
    """Compares pairs of runs made by the host, and counts how often intervals cover the planted effect."""
    noise, covered, unpaired, widths, errors = np.random.default_rng(21), 0, 0, [], []
    truth = _truth()
    for _ in range(RESAMPLINGS):
        runs = _made(folder, noise)
        (found,) = compare.between(*map(run_logs.opened, runs), lambda a, b: True, draws=DRAWS)
        covered += found.interval[0] <= truth <= found.interval[1]
        unpaired += found.unpaired[0] <= truth <= found.unpaired[1]
        widths.append(found.width)
        errors.append(found.difference - truth)
    record.figure("compare.planted_effect", truth)
    record.figure("compare.mean_error", statistics.mean(errors), at_least=-0.003, at_most=0.003)
    record.figure("compare.resamplings", RESAMPLINGS, at_least=1000)
    record.figure("compare.paired_covers", covered / RESAMPLINGS, at_least=0.90, at_most=0.98)
    record.figure("compare.unpaired_covers", unpaired / RESAMPLINGS)
    record.figure("compare.width_over_unpaired", statistics.mean(widths), at_most=0.99)
    record.figure("compare.largest_width_over_unpaired", max(widths), at_most=0.99)


def _chances(easy: np.ndarray, effect: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the chances of a right rollout in both runs, of prompts with these draws."""
    return easy, np.clip(easy + EFFECT + SPREAD * effect, 0.0, 1.0)


def _truth() -> float:
    """Returns the mean effect over all prompts, summed over a fine grid of both draws (uniform and normal)."""
    easy = (np.arange(2000) + 0.5) / 2000
    effect = np.array([statistics.NormalDist().inv_cdf((i + 0.5) / 2000) for i in range(2000)])
    one, two = _chances(easy[:, None], effect[None, :])
    return float(np.mean(two - one))


def _made(folder: Path, noise: np.random.Generator) -> list[Path]:
    """Writes two runs over new prompts, with rewards of 0 or 1, and returns their folders."""
    chances = _chances(noise.random(PROMPTS), noise.normal(size=PROMPTS))
    first = noise.random((PROMPTS, SAMPLES))
    second = np.where(noise.random(first.shape) < COMMON, first, noise.random(first.shape))
    out = []
    for name, chance, drawn in zip("xy", chances, (first, second)):
        run = folder / name
        run.mkdir(exist_ok=True)
        (run / "config.json").write_text(json.dumps({"seed": 0}))
        RolloutLog(run / "rollouts").write(1, _groups(drawn < chance[:, None]))
        out.append(run)
    return out


def _groups(right: np.ndarray) -> list:
    known = np.ones(right.shape[1], bool)
    return [
        Group(prompt=rollouts[0].prompt, rollouts=rollouts, rewards=rewards.astype(np.float32), scored=known)
        for rollouts, rewards in zip(_rollouts(*right.shape), right)
    ]


@functools.cache
def _rollouts(prompts: int, samples: int) -> tuple:
    return tuple(
        tuple(
            Rollout.written(RolloutId(0, "train", 0, prompt.id, sample), prompt, [1], Finish.EOS)
            for sample in range(samples)
        )
        for prompt in (Prompt(id=str(number), tokens=[1]) for number in range(prompts))
    )
