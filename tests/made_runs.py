"""Run folders made by the host: a config, a tokenizer of single characters, and logs of made rollouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxrl_post.data.tokenizer import characters
from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId
from jaxrl_post.runs.rollout_log import RolloutLog

LETTERS = characters("0123456789+=#ab")


def group(
    name: str,
    texts: Sequence[str],
    rewards: Sequence[float | None],
    *,
    purpose: str = "train",
    seed: int = 0,
    epoch: int = 0,
    attempt: int = 0,
    prompt: str = "",
    versions: Sequence[Sequence[int]] = (),
    drafted: int = 0,
    **fields,
) -> Group:
    """A group of one rollout for each text. A reward of None is none. The first `drafted` tokens were drafts."""
    asked = Prompt(id=name, tokens=LETTERS.encode(prompt or "1+1="), **{"answer": "2", "source": "sums"} | fields)
    rollouts = []
    for sample, text in enumerate(texts):
        tokens = LETTERS.encode(text)
        rollouts.append(
            Rollout(
                id=RolloutId(seed, purpose, epoch, name, sample, attempt),
                prompt=asked,
                tokens=tokens,
                sampled=np.ones(len(tokens), bool),
                logprobs=np.full(len(tokens), -0.5),
                entropies=np.zeros(len(tokens)),
                versions=versions[sample] if versions else np.zeros(len(tokens)),
                drafted=np.arange(len(tokens)) < drafted,
                finish=Finish.EOS,
                start_clock=0,
                finish_clock=9,
            )
        )
    scored = np.array([reward is not None for reward in rewards])
    return Group(
        prompt=asked,
        rollouts=tuple(rollouts),
        rewards=[reward or 0.0 for reward in rewards],
        scored=scored,
        components={"acc": [float((reward or 0.0) > 0.5) for reward in rewards]},
    )


def run(
    folder: Path,
    *,
    rollouts: Mapping[int, Sequence[Group]] | None = None,
    evaluations: Mapping[int, Sequence[Group]] | None = None,
    rows: Sequence[Mapping] = (),
    config: Mapping | None = None,
) -> Path:
    """Writes a run's folder. `rows`: of metrics.jsonl."""
    folder.mkdir(parents=True)
    LETTERS.save(folder / "policy")
    (folder / "config.json").write_text(json.dumps({"seed": 0, "derived": {"processes": 1}} | dict(config or {})))
    for name, steps in (("rollouts", rollouts), ("evaluations", evaluations)):
        for step, groups in (steps or {}).items():
            RolloutLog(folder / name).write(step, groups)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
