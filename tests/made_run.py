"""A run's folder made by hand, with logs whose numbers a test knows: no model and no device."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from jaxrl_post.data import tokenizer
from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId
from jaxrl_post.runs.metric_rows import Jsonl
from jaxrl_post.runs.rollout_log import RolloutLog

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+-=<>/& !\n"


def rollout(prompt: Prompt, sample: int, ids, *, step: int = 1, drafted=(), versions=None) -> Rollout:
    n = len(ids)
    return Rollout(
        id=RolloutId(0, "train", 0, prompt.id, sample),
        prompt=prompt,
        tokens=ids,
        sampled=np.ones(n, bool),
        logprobs=-0.25 * np.arange(n),
        entropies=0.125 * np.arange(n),
        versions=np.full(n, step - 1) if versions is None else versions,
        drafted=np.isin(np.arange(n), drafted),
        finish=Finish.EOS,
        start_clock=0,
        finish_clock=n,
    )


def group(words, name: str, asked: str, answers: list[str], *, step: int = 1, **about) -> Group:
    """A group whose rollouts say `answers`. The first one has reward 1, the others 0."""
    prompt = Prompt(id=name, tokens=words.encode(asked), answer=f"truth of {name}")
    rollouts = tuple(rollout(prompt, i, [*words.encode(text), 0], step=step, **about) for i, text in enumerate(answers))
    rewards = [float(i == 0) for i in range(len(answers))]
    return Group(
        prompt=prompt, rollouts=rollouts, rewards=rewards, scored=[True] * len(answers), components={"acc": rewards}
    )


def row(step: int) -> dict[str, float]:
    return {
        "training/global_step": float(step),
        "critic/score/mean": 0.1 * step + 1 / 3,
        "response_length/mean": 4.0 + step,
        "actor/entropy": 1.0 / step,
        "off_policy/mean": 0.5,
        "off_policy/max": 1.0,
        "off_policy/share_0": 0.5,
        "off_policy/share_1": 0.5,
        "timing_s/step": 10.0,
        "timing_s/gen": 5.0,
        "timing_s/update_actor": 3.0,
        "timing_s/reward": 1.0,
        "alarm/low_entropy": float(step == 2),
    }


def make(folder: Path, *, steps: int = 3, groups: int = 2, planted: str = "", ended: bool = True) -> Path:
    """Writes a run of some steps. `planted` is the first answer of the last step."""
    words = tokenizer.characters(ALPHABET)
    folder.mkdir(parents=True)
    words.save(folder / "policy")
    config = {"name": "made", "seed": 3, "steps": steps, "model": {"path": ""}, "data": {"train": "task:sums"}}
    told = {"versions": {"jaxrl_post": "0", "jax": "1"}, "device": "cpu", "devices": 1, "processes": 1}
    (folder / "config.json").write_text(json.dumps(config | {"derived": told}))
    rows, log = Jsonl(folder / "metrics.jsonl"), RolloutLog(folder / "rollouts")
    rows.write(0, {"val-core/sums/acc/mean@4": 0.25, "val-aux/sums/acc/greedy": 0.0})
    for step in range(1, steps + 1):
        first = planted if planted and step == steps else f"answer{step}"
        log.write(
            step,
            [
                group(
                    words,
                    f"p{step}-{k}",
                    f"ask{k}=",
                    [first if k == 0 else "b" * k, "a" * step],
                    step=step,
                    drafted=(1,),
                )
                for k in range(groups)
            ],
        )
        rows.write(step, row(step) | ({"actor/grad_norm": float("inf")} if step == 1 else {}))
    rows.write(steps, {"val-core/sums/acc/mean@4": 0.75, "val-aux/sums/acc/greedy": 1.0})
    rows.close()
    if ended:
        figures = {
            "before": {"greedy": 0.0, "mean_at_4": 0.25, "n": 2},
            "after": {"greedy": 1.0, "mean_at_4": 0.75, "n": 2},
        }
        (folder / "summary.json").write_text(
            json.dumps({"steps": steps, "seconds": 12.5, "tokens": 40, "eval": figures})
        )
    return folder
