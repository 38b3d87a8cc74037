"""The batch of a skipped optimizer step, opened again with the learner and the weights of that time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import optax

from jaxrl_post import config as configs
from jaxrl_post.checkpoint import store
from jaxrl_post.launch import build, compile_guard, inputs
from jaxrl_post.telemetry import rollout_log, run_logs
from jaxrl_post.trainer.learner import Learner
from jaxrl_post.types import Group


def opened(run: Path, step: int) -> tuple[Learner, tuple[Group, ...], int]:
    """Returns the learner, the batch of a skipped step, and the step whose weights the learner has.

    Raises:
      ValueError: there is no such run or batch, or it is damaged.
    """
    if not (run / "config.json").is_file():
        raise ValueError(f"replay: {run} is no folder of a run: it has no config.json")
    folder = run_logs.mine(run) / "skipped"
    file = folder / f"step_{step:06d}.npz"
    if not file.is_file():
        there = sorted(int(path.stem.removeprefix("step_")) for path in folder.glob("step_*.npz"))
        raise ValueError(f"replay: {run} has no skipped batch of step {step}; it has those of steps {there}")
    groups = rollout_log.read(file)
    kept = json.loads((run / "config.json").read_text(encoding="utf-8"))
    if not isinstance(kept, dict):
        raise ValueError(f"replay: {run / 'config.json'} holds a {type(kept).__name__}, not the config of a run")
    config = configs.resolve({name: value for name, value in kept.items() if name != "derived"})
    start = inputs.gather(config)
    compile_guard.use_cache({})
    learner = build.learner(config, start.model, start.load_params, build.device_plan(config), start.adapter)
    saved = store.Checkpoints(run / "checkpoints", keep_last=config.checkpoint.keep_last, say=print).before(step)
    if saved is not None:
        learner.restore(saved.arrays, saved.step)
    return learner, groups, learner.step


def findings(learner: Learner, groups: Sequence[Group], step: int, at: int) -> Iterator[str]:
    """Yields lines on a batch: its gradient's norm, and each rollout with a number that is not finite."""
    yield f"step {step}: {len(groups)} groups, {sum(len(group.rollouts) for group in groups)} rollouts, at the weights of step {at}"
    logprobs = learner.logprobs(groups)
    odd = 0
    for group in groups:
        for rollout, reward, scored in zip(group.rollouts, group.rewards, group.scored, strict=True):
            found = {
                "the engine's log-probs": rollout.logprobs[rollout.sampled],
                "the learner's log-probs": logprobs[rollout.id][rollout.sampled],
                "the reward": np.array([reward] if scored else []),
            }
            wrong = [name for name, values in found.items() if not np.isfinite(values).all()]
            odd += bool(wrong)
            if wrong:
                yield f"  {rollout.id}: not finite: {', '.join(wrong)}"
    learner.prepare(groups)
    learner.accumulate(groups)
    norm = float(optax.global_norm(learner.gradient()))
    yield f"  gradient norm {norm:g}; rollouts with a number that is not finite: {odd}"
