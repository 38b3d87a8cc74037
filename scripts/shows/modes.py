"""What becomes of rollouts under new weights: verify is exact to the bit; keep beside recompute, over staleness, while
learning.

First the demo runs pipelined with `verify`. Every rollout that was trained on has one version throughout. Long after
the run, the weights of that version give it again on the same engine, token for token and log-prob for log-prob.

Then the demo's task runs at its own learning rate in batches of 32 rollouts, so that several optimizer steps pass under
one rollout. Arms are synchronous, and pipelined with `keep` and with `recompute` at bounds of 1, 2, 4 and 8 optimizer
steps. Figures of each arm are reward at the end, staleness, KL (k3) of the newest policy to the one that sampled, and
total variation per version. The effective sample size and the share of rows that swaps cost follow. Published evidence
on `keep` is one figure (PipelineRL, arXiv 2509.19128, at 2,048 tokens).
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from pathlib import Path

import jax
import numpy as np
import trained

from jaxrl_post import main
from jaxrl_post.ring.types import Request
from jaxrl_post.runs import rollout_log

MINUTES = 15.0
PLATFORM = "cpu"
BOUNDS, SEEDS, STEPS, LAST = (1, 2, 4, 8), (0, 1), 150, 30
SMALL = (
    "scheduler.prompts=8",
    "scheduler.group_size=4",
    "engine.steps_per_dispatch=4",
    "engine.refill_slots=2",
    "eval.prompts=0",
    "eval.every=0",
    "checkpoint.every=0",
)
PIPED = ("scheduler.name=pipeline", "scheduler.ahead=8")
VERIFIED = (*SMALL, "steps=24", "engine.carry_over=verify", "engine.carry_share=1.0", "scheduler.max_unscored=0")


def show(record) -> None:
    for name, value in record.cached("verify", lambda: _verified(record)).items():
        bounds = {"answers": {"at_least": 300}, "verified_at_swaps": {"at_least": 100}, "versions": {"at_least": 8}}
        record.figure(f"verify.{name}", value, **bounds.get(name, {"equals": 0}))
    found = {"sync": record.cached("sync", lambda: _arm(record, ()))}
    for bound in BOUNDS:
        for mode in ("keep", "recompute"):
            found[f"{mode}.{bound}"] = record.cached(
                f"{mode}-{bound}",
                lambda: _arm(record, (*PIPED, f"scheduler.max_staleness={bound}", f"engine.carry_over={mode}")),
            )
            record.figure(
                f"{mode}.{bound}.beyond_the_bound", max(found[f"{mode}.{bound}"]["largest"] - bound, 0), equals=0
            )
    for name, told in found.items():
        record.figure(name, told)
    record.figure("sync.gain", found["sync"]["reward"] - found["sync"]["first"], at_least=0.2)
    record.figure(
        "reward_keep_minus_recompute",
        {bound: found[f"keep.{bound}"]["reward"] - found[f"recompute.{bound}"]["reward"] for bound in BOUNDS},
    )
    record.figure(
        "kl_keep_over_recompute",
        {bound: found[f"keep.{bound}"]["kl"] / found[f"recompute.{bound}"]["kl"] for bound in BOUNDS},
    )


# ---- verify gives what its version gives from the start


def _verified(record) -> dict[str, int]:
    weights: dict[int, object] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        run = main.assemble(
            [
                "--config=configs/demo/pipeline.py",
                f"--run-dir={folder}/run",
                *(f"--config.{override}" for override in VERIFIED),
            ],
            stack,
        )
        engine, swap = run.engine, run.engine.swap
        weights[0] = jax.tree.map(np.array, run.learner.params)

        def keep_and_swap(params, version):
            weights[version] = jax.tree.map(np.array, params)
            swap(params, version)

        engine.swap = keep_and_swap
        main.run_training(run)
        groups = [
            group for file in sorted((run.mine / "rollouts").glob("step_*.npz")) for group in rollout_log.read(file)
        ]
        rows = trained.rows(run.mine, "off_policy/mean")
        by_version: dict[int, list] = {}
        for group in groups:
            for rollout in group.rollouts:
                by_version.setdefault(int(rollout.versions[-1]), []).append(rollout)
        mixed = sum(len(set(r.versions.tolist())) > 1 for mine in by_version.values() for r in mine)
        differ = 0
        for number, version in enumerate(sorted(by_version)):
            home = jax.tree.map(lambda x: x.sharding, run.learner.params)
            swap(jax.device_put(weights[version], home), 1000 + number)
            again = _again(run, by_version[version])
            differ += sum(
                again[r.id].tokens.tobytes() != r.tokens.tobytes()
                or again[r.id].logprobs.tobytes() != r.logprobs.tobytes()
                for r in by_version[version]
            )
    return {
        "answers": sum(map(len, by_version.values())),
        "versions": len(by_version),
        "of_several_versions": mixed,
        "verified_at_swaps": int(sum(row.get("swap/num_verified", 0) for row in rows)),
        "that_differ_from_the_start": differ,
    }


def _again(run, rollouts) -> dict:
    """Generates the same requests from the start with the weights in use."""
    run.engine.submit(
        [
            Request(
                rollout_id=r.id,
                prompt=r.prompt,
                seed=r.id.seed(),
                sampling=run.start.sampling,
                max_tokens=run.config.sampling.max_tokens,
            )
            for r in rollouts
        ]
    )
    again = {}
    while run.engine.pending:
        again.update((r.id, r) for r in run.engine.step())
    return again


# ---- keep and recompute while learning


def _arm(record, overrides: tuple[str, ...]) -> dict[str, float]:
    told = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            own = (f"seed={seed} steps={STEPS}", *SMALL, *overrides)
            trained.run(record, "configs/demo.py", Path(folder) / "run", *own, timeout_s=900)
            told.append(trained.rows(Path(folder) / "run", "off_policy/mean"))
    steps = [row for rows in told for row in rows]

    def mean(name, some=steps):
        return statistics.mean(row.get(name, 0.0) for row in some)

    stale = mean("off_policy/mean")
    return {
        "first": mean("critic/score/mean", [row for rows in told for row in rows[:5]]),
        "reward": mean("critic/score/mean", [row for rows in told for row in rows[-LAST:]]),
        "staleness": stale,
        "largest": max(row["off_policy/max"] for row in steps),
        "kl": mean("rollout_corr/k3_kl"),
        "ess": mean("rollout_corr/ess"),
        "tv_per_version": mean("rollout_corr/tv") / stale if stale else 0.0,
        "rows_share": mean("swap/rows_share"),
    }
