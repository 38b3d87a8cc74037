"""Whole runs of the demos, each from a cold compilation cache, and what their held-out prompts met."""

from __future__ import annotations

import tempfile
from pathlib import Path

import trained

from jaxrl_post import config
from jaxrl_post.data import prompts
from jaxrl_post.runs import rollout_log

LIMIT_S = 900.0  # of one run; the bound on its seconds is a figure


def whole(record, recipe: str, supervised: str, *overrides: str) -> dict:
    """Runs configs/`recipe`.py by one command. Returns its figures and how many held-out prompts training had seen.

    Args:
      supervised: the config below configs/ by which the policy was made.
    """
    with tempfile.TemporaryDirectory() as folder:
        run, cache = Path(folder) / "run", Path(folder) / "cache"
        cold = {"JAX_COMPILATION_CACHE_DIR": str(cache)}
        seconds = trained.run(record, f"configs/{recipe}.py", run, "", *overrides, timeout_s=LIMIT_S, env=cold)
        evaluations = (run / "evaluations" / "index.jsonl").read_text().splitlines()
        mismatch = [row["training/router_mismatch"] for row in trained.rows(run, "training/router_mismatch")]
        return {
            **trained.summary(run)["eval"],
            "seconds": seconds,
            "evaluations": len(evaluations),
            "seen": _seen(record, run, supervised),
            "mismatch": mismatch,
            "engine_steps": _engine_steps(run),
        }


def _engine_steps(run: Path) -> int:
    """Returns the engine steps of the whole run, evaluations included."""
    return sum(row.get("rollout/engine_steps", 0) for row in trained.rows(run))


def _seen(record, run: Path, supervised: str) -> int:
    """Returns the held-out prompts that the training rollouts, or the rows of the supervised training, contain."""

    def ids(folder: str) -> set[str]:
        return {group.prompt.id for file in sorted((run / folder).glob("*.npz")) for group in rollout_log.read(file)}

    sft = config.resolve(config.load(str(record.root / "configs" / f"{supervised}.py")))
    rows = prompts.rows(sft.data.train, seed=sft.seed, split="sft", size=sft.data.size, arguments=sft.data.task)
    return len(ids("evaluations") & (ids("rollouts") | {row["id"] for row in rows}))
