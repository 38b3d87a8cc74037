"""Experts over 2, 4 and 8 devices compute what one device does: sums, gradients, the engine's tokens, and whole runs.

First the layer of experts alone, with routes that load devices unevenly, in float64 and float32. Then the learner's gradient of a
model with experts, with routers' losses. Each distance is the largest per-leaf relative 2-norm. Then the engine: tokens of one
device but for near ties, and one layout's own bits under other batching. A planted fault, sums that devices do not
add up, must be far outside.

Last whole runs of configs/demo/moe.py. One over four devices is killed with kill -9 at six random moments and resumed: it ends
as the undisturbed run, bit for bit. Resumed on another mesh, and begun on another one, a run has the same rollouts and,
within the bounds, the same weights.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import divided_experts as arms
import engine_lab as lab
import jax
import numpy as np
import pytest
from killed import Runs, end, steps

from jaxrl_post.models import hf
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.runs import rollout_log

MINUTES = 20.0
PLATFORM = "cpu"
BOUNDS = {np.float64: 1e-12, np.float32: 5e-6}
LAYERS = ("expert2", "expert4", "expert8", "expert2-tensor2", "data2-expert2", "fsdp2-expert2", "data2-expert2-tensor2")
LEARNERS = ("expert2", "expert4", "expert8", "fsdp2-expert4", "data2-expert2-tensor2")
ENGINES = ("expert2", "expert4", "expert8", "expert2-tensor2", "data2-expert2-tensor2")

POLICY = "configs/moe_policy"
STEPS, SEEDS, STARTING = 8, tuple(range(6)), 1  # of the runs that are killed, the first is while it starts
COMMAND = [
    "--config=configs/demo/moe.py",
    f"--config.steps={STEPS}",
    "--config.checkpoint.every=1",
    "--config.eval.every=4",
    "--config.eval.prompts=16",
    "--config.scheduler.prompts=16",
    "--config.engine.slots=32",
]
MESHES = {  # of whole runs
    "one": (),
    "expert2": ("expert=2",),
    "expert4": ("expert=4", "engine_expert=2"),
    "expert8": ("expert=8",),
    "fsdp4": ("fsdp=4",),
    "data2-expert2": ("data=2", "expert=2"),
}
MOVED = ("one", "fsdp4", "data2-expert2")  # where a run of "expert4" goes on

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")


def show(record) -> None:
    for dtype, bound in BOUNDS.items():
        short, one = np.dtype(dtype).name, arms.layer(dtype, None)
        for split in LAYERS:
            for leaf, gap in arms.gaps(arms.layer(dtype, arms.sizes(split)), one).items():
                record.figure(f"{short}.layer.{split}{leaf}", gap, at_most=bound)
        one = arms.gradient(dtype, {})
        for split in LEARNERS:
            found = arms.gaps(arms.gradient(dtype, arms.sizes(split)), one)
            record.figure(f"{short}.learner.{split}", max(found.values()), at_most=bound)
    _engines(record)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "psum_scatter", lambda x, axis, tiled: x[: x.shape[0] // jax.lax.axis_size(axis)])
        found = arms.gaps(arms.layer(np.float64, arms.sizes("expert2")), arms.layer(np.float64, None))
    record.figure("planted_no_sum", max(found.values()), at_least=1e-3)
    _runs(record)


def _engines(record) -> None:
    asked = lab.requests(16, temperatures=(1.0,), seed=3)
    weights = lab.weights(0, arms.SAMPLED)

    def made(split: str):
        return lab.engine(weights, arms.SAMPLED, meshes.make_mesh(**arms.sizes(split)))

    one = lab.run(made("data1"), asked)
    for split in ENGINES:
        engine = made(split)
        requests = lab.requests(16, temperatures=(1.0,), seed=3, replicas=engine.layout.replicas)
        many = lab.run(engine, requests)
        near, worst = lab.first_differences(one, many, asked, weights, arms.SAMPLED)
        record.figure(f"engine.{split}.logprobs", worst, at_most=1e-5)
        record.figure(f"engine.{split}.score_gap_where_tokens_differ", max(near, default=0.0), at_most=1e-4)
        engine.reset()
        again = lab.run(engine, requests, submit_at=[3 * at for at in range(len(requests))])
        record.figure(f"engine.{split}.same_bits_one_after_another", lab.same_bits(again, many), equals=True)


def _runs(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        runs = {
            name: Runs(record, here, [*COMMAND, *(f"--config.mesh.{size}" for size in sizes)], STEPS)
            for name, sizes in MESHES.items()
        }
        whole, seconds = runs["expert4"].killed_at(SEEDS, STARTING)
        for name in ("one", "expert2", "expert8"):
            runs[name].finish(name)
        for name, run in {"expert2": here / "expert2", "expert4": whole, "expert8": here / "expert8"}.items():
            _alike(record, f"whole_run.{name}", run, here / "one")
        runs["expert4"].kill("moved", seconds / 2, 0.0)
        saved = max(steps(here / "moved"), default=0)
        record.figure("moved_run.newest_step_then", saved, at_least=1, at_most=STEPS - 1)
        for name in MOVED:
            run = shutil.copytree(here / "moved", here / f"moved-{name}")
            said = end(runs[name].begin(run.name))
            record.figure(f"moved_run.{name}.goes_on", f"goes on after step {saved}\n" in said, equals=True)
            record.figure(f"moved_run.{name}.said", "resume: mesh.expert was 4 and is" in said, equals=True)
            _alike(record, f"moved_run.{name}", run, whole)


def _alike(record, key: str, run: Path, other: Path) -> None:
    """Compares all rollouts of two runs, the weights they end with, and what training added to these weights."""
    ours, theirs = (
        {
            str(rollout.id): rollout
            for file in sorted((folder / "rollouts").glob("step_*.npz"))
            for group in rollout_log.read(file)
            for rollout in group.rollouts
        }
        for folder in (run, other)
    )
    same = [name for name in ours.keys() & theirs.keys() if np.array_equal(ours[name].tokens, theirs[name].tokens)]
    record.figure(f"{key}.rollouts", len(ours), at_least=1)
    record.figure(f"{key}.rollouts_of_other_tokens", len(ours.keys() | theirs.keys()) - len(same), equals=0)
    gap = max(np.abs(ours[name].logprobs - theirs[name].logprobs).max() for name in same)
    record.figure(f"{key}.logprobs", float(gap), at_most=1e-4)
    begun, *ended = (hf.load(folder)[1] for folder in (POLICY, run / "policy", other / "policy"))
    record.figure(f"{key}.weights", max(arms.gaps(*ended).values()), at_most=BOUNDS[np.float32])
    added = (jax.tree.map(np.subtract, weights, begun) for weights in ended)
    record.figure(f"{key}.added_by_training", max(arms.gaps(*added).values()), at_most=1e-3)
