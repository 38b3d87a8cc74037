"""A policy visibly learns: configs/demo.py at three seeds, each from a cold compilation cache; two controls do not.

Neither the supervised training nor this one has seen the held-out prompts. The reward is the exact answer and nothing
else. The controls are one seed with 1,024 held-out prompts: learning rate 0, and the rewards of every group handed to
its rollouts in a random order.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import trained

from jaxrl_post import config
from jaxrl_post.data import prompts
from jaxrl_post.runs import rollout_log

MINUTES = 9.0

SEEDS = (0, 1, 2)
CONTROLS = {"learning_rate_0": ("--config.optimizer.lr=0.0",), "shuffled_rewards": ("--config.reward.shuffle=true",)}
LIMIT_S = 900.0  # of one run; the bound on its seconds is a figure


def show(record) -> None:
    for seed in SEEDS:
        found = record.cached(f"seed-{seed}", lambda seed=seed: _run(record, f"--config.seed={seed}"))
        before, after = found["before"], found["after"]
        record.figure(f"seed_{seed}.prompts", after["n"], at_least=256)
        record.figure(f"seed_{seed}.prompts_seen_in_training", found["seen"], equals=0)
        record.figure(f"seed_{seed}.evaluations", found["evaluations"], at_least=3)
        record.figure(f"seed_{seed}.mean_at_4.before", before["mean_at_4"], at_most=0.5)
        record.figure(f"seed_{seed}.mean_at_4.after", after["mean_at_4"], at_least=0.85)
        record.figure(f"seed_{seed}.greedy.before", before["greedy"])
        record.figure(f"seed_{seed}.greedy.gain", after["greedy"] - before["greedy"], at_least=0.2)
        for when in ("before", "after"):
            record.figure(
                f"seed_{seed}.correct_length_p99_to_p50.{when}", found[when]["correct_length_tail"], at_least=4.0
            )
        record.figure(f"seed_{seed}.length_mean.before", before["length_mean"])
        record.figure(f"seed_{seed}.length_mean.after", after["length_mean"])
        record.figure(f"seed_{seed}.seconds", found["seconds"], at_most=300.0)
    for name, overrides in CONTROLS.items():
        found = record.cached(name, lambda overrides=overrides: _run(record, *overrides, "--config.eval.prompts=1024"))
        record.figure(f"{name}.prompts", found["after"]["n"], equals=1024)
        record.figure(f"{name}.prompts_seen_in_training", found["seen"], equals=0)
        record.figure(f"{name}.mean_at_4.before", found["before"]["mean_at_4"])
        gain = found["after"]["mean_at_4"] - found["before"]["mean_at_4"]
        record.figure(f"{name}.mean_at_4.gain", gain, at_most=0.0299)
        record.figure(f"{name}.greedy.gain", found["after"]["greedy"] - found["before"]["greedy"], at_most=0.0299)


def _run(record, *overrides: str) -> dict:
    """Runs one whole command from a cold compilation cache. Returns its figures and what its held-out prompts met."""
    with tempfile.TemporaryDirectory() as folder:
        run, cache = Path(folder) / "run", Path(folder) / "cache"
        cold = {"JAX_COMPILATION_CACHE_DIR": str(cache)}
        seconds = trained.run(record, "configs/demo.py", run, "", *overrides, timeout_s=LIMIT_S, env=cold)
        evaluations = (run / "evaluations" / "index.jsonl").read_text().splitlines()
        return {
            **trained.summary(run)["eval"],
            "seconds": seconds,
            "evaluations": len(evaluations),
            "seen": _seen(record, run),
        }


def _seen(record, run: Path) -> int:
    """Returns the held-out prompts that the training rollouts, or the rows of the supervised training, contain."""

    def ids(folder: str) -> set[str]:
        return {group.prompt.id for file in sorted((run / folder).glob("*.npz")) for group in rollout_log.read(file)}

    sft = config.resolve(config.load(str(record.root / "configs" / "demo" / "sft.py")))
    rows = prompts.rows(sft.data.train, seed=sft.seed, split="sft", size=sft.data.size, arguments=sft.data.task)
    return len(ids("evaluations") & (ids("rollouts") | {row["id"] for row in rows}))
