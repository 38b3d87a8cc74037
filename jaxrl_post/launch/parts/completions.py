"""Held-out completions of a run that trains on written ones: solutions, or pairs of preferences.

Invariant: they are measured by the learner's own programs, with the current weights and, for pairs, with those of the
reference. Nothing is drawn and nothing is trained. Figures are means over the completions, whatever the micro-batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_post.algorithms import preferences
from jaxrl_post.config import AlgorithmConfig
from jaxrl_post.launch.parts.sources import LoadedPrompts
from jaxrl_post.ring.types import Finish, Group, Rollout, RolloutId
from jaxrl_post.trainer.learner import Learner

PREFIX = "val/"


def groups(found: LoadedPrompts, run_seed: int) -> tuple[Group, ...]:
    """Returns a group for each prompt: its solution, or its chosen and its rejected completion."""
    return tuple(
        Group.unscored(
            prompt,
            [
                _rollout(RolloutId(run_seed, "eval", 0, prompt.id, sample), prompt, tokens, found.trained)
                for sample, tokens in enumerate(found.pairs.get(prompt.id) or (found.taught[prompt.id],))
            ],
        )
        for prompt in found.prompts
    )


def _rollout(id: RolloutId, prompt: Any, tokens: Sequence[int], trained: Mapping[str, Sequence[bool]]) -> Rollout:
    written = Rollout.written(id, prompt, np.asarray(tokens, np.int32), Finish.EOS)
    mask = trained.get(prompt.id)
    return written if mask is None else dataclasses.replace(written, sampled=np.asarray(mask, bool))


def measured(
    held_out: Sequence[Group], learner: Learner, algorithm: AlgorithmConfig
) -> tuple[list[Group], dict[str, float]]:
    """Returns the groups with the policy's log-probs, for the log, and the figures for the row of metrics.

    - val/loss: as verl's. Of solutions the mean negative log-prob of a token, of pairs the mean loss of a pair.
    - val/loss_se: its standard error over groups.
    - of pairs, under TRL's names: val/rewards/accuracies, the share whose chosen completion has the higher reward,
      val/rewards/{chosen, rejected, margins} and val/logps/{chosen, rejected}. Of a reward model val/rewards/{accuracy,
      margin, mean_reward, min_reward, max_reward}.
    """
    logps = learner.logprobs(held_out)
    describe = _of_pairs if algorithm.compares_pairs else _of_solutions
    figures = describe(held_out, logps, learner, algorithm)
    scored = [
        dataclasses.replace(group, rollouts=tuple(dataclasses.replace(r, logprobs=logps[r.id]) for r in group.rollouts))
        for group in held_out
    ]
    return scored, {f"{PREFIX}{name}": value for name, value in figures.items()}


def _of_solutions(
    held_out: Sequence[Group], logps: Mapping[RolloutId, np.ndarray], learner: Learner, algorithm: AlgorithmConfig
) -> dict[str, float]:
    """The error is that of a ratio of two means: of lost nats and of tokens."""
    rollouts = [rollout for group in held_out for rollout in group.rollouts]
    lost = np.array([-logps[r.id][r.sampled].sum(dtype=float) for r in rollouts])
    tokens = np.array([float(r.sampled.sum()) for r in rollouts])
    loss = lost.sum() / tokens.sum()
    return {"loss": float(loss), "loss_se": _error((lost - loss * tokens) / tokens.mean())}


def _of_pairs(
    held_out: Sequence[Group], logps: Mapping[RolloutId, np.ndarray], learner: Learner, algorithm: AlgorithmConfig
) -> dict[str, float]:
    known = {} if algorithm.trains_reward_model else learner.logprobs(held_out, of_reference=True)
    pairs = preferences.compared(held_out, algorithm, logps, known)
    figures = preferences.describe(pairs, algorithm)
    loss = figures.pop("actor/preference_loss")
    return {"loss": loss, "loss_se": _error(np.array([pair.loss for pair in pairs])), **figures}


def _error(values: np.ndarray) -> float:
    """Returns the standard error of the mean; 0 for a single value, which has none."""
    return float(values.std(ddof=1) / math.sqrt(values.size)) if values.size > 1 else 0.0


def before_and_after(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]] | None:
    """Returns the figures of the first and of the last row that has any, without PREFIX. `rows`: of metrics.jsonl."""
    evaluations = [
        {name.removeprefix(PREFIX): value for name, value in row.items() if name.startswith(PREFIX)}
        for row in rows
        if f"{PREFIX}loss" in row
    ]
    return {"before": evaluations[0], "after": evaluations[-1]} if evaluations else None
