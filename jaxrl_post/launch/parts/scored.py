"""Scores a policy on data: pass@k for every k, and the mean with its interval, in all and by source.

Invariant: seeds depend on (seed, prompt, sample) alone, as in the evaluations of a run. So two policies are sampled with
equal noise, and a figure can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_post import config as configs
from jaxrl_post.data import duplicates, prompts, special_tags
from jaxrl_post.launch.parts import sources
from jaxrl_post.launch.parts.policy import Policy
from jaxrl_post.launch.parts.python_inputs import OWN, listed_rows
from jaxrl_post.parallel.processes import say
from jaxrl_post.rewards import NoScores
from jaxrl_post.rewards.carried import Carried, carried
from jaxrl_post.rewards.limits import Fixed
from jaxrl_post.rewards.pool import Graders, Pool
from jaxrl_post.ring.types import Finish, Group, Prompt, RolloutId, Sampling
from jaxrl_post.telemetry import estimates

TASK_PROMPTS = 256  # of a procedural task, where no number is given


@dataclass(frozen=True, kw_only=True)
class Scored:
    """An evaluation of a policy. `groups`: of each prompt, in order; `settings`: what it was sampled with."""

    groups: tuple[Group, ...]
    settings: Mapping[str, Any]

    @property
    def figures(self) -> dict[str, Any]:
        """Returns the figures over all prompts; see `figures_of`."""
        return figures_of(self.groups)

    @property
    def sources(self) -> dict[str, dict[str, Any]]:
        """Returns the figures of each source, by its name."""
        names = sorted({group.prompt.source for group in self.groups})
        return {name: figures_of([g for g in self.groups if g.prompt.source == name]) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Returns {"settings", "all", "sources"}, ready for JSON."""
        return {"settings": dict(self.settings), "all": self.figures, "sources": self.sources}


def figures_of(groups: Sequence[Group]) -> dict[str, Any]:
    """Returns figures over groups of n rollouts each.

    - prompts, samples: how many prompts, and rollouts of each.
    - avg: mean accuracy of scored rollouts, averaged over prompts. avg_interval: its 95 % bootstrap interval over
      prompts.
    - pass_at: pass@k by k from 1 to n, unbiased, over prompts whose rollouts are all scored. Right is an accuracy above
      0.5.
    - reward: mean reward, as avg. length_mean: tokens. clip_ratio: share that max_tokens cut. unscored: rollouts.

    An accuracy is the reward component "acc", else the reward. A figure over no rollouts is None.
    """
    n = len(groups[0].rollouts)
    known = [group for group in groups if group.scored.any()]
    means = [float(group.accuracies[group.scored].astype(np.float64).mean()) for group in known]
    rewards = [float(group.rewards[group.scored].astype(np.float64).mean()) for group in known]
    right = [int(np.sum(group.accuracies > 0.5)) for group in groups if group.scored.all()]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "prompts": len(groups),
        "samples": n,
        "avg": float(np.mean(means)) if means else None,
        "avg_interval": list(estimates.mean_interval(means)) if means else None,
        "pass_at": {
            k: float(np.mean([estimates.pass_at(n, count, k) for count in right])) if right else None
            for k in range(1, n + 1)
        },
        "reward": float(np.mean(rewards)) if rewards else None,
        "length_mean": float(np.mean([len(rollout) for rollout in rollouts])),
        "clip_ratio": float(np.mean([rollout.finish is Finish.LENGTH for rollout in rollouts])),
        "unscored": sum(int(np.sum(~group.scored)) for group in groups),
    }


def evaluate(
    policy: Policy,
    data: str | Path | Sequence[Mapping],
    rewards: Sequence[str | Callable] = (),
    n: int = 4,
    *,
    weights: Sequence[float] = (),
    sampling: Sampling | Mapping[str, Any] | None = None,
    max_tokens: int = 0,
    seed: int = 0,
    most: int = 0,
    task: Mapping[str, Any] | None = None,
    workers: int = 1,
    timeout_s: float = 0.0,
) -> Scored:
    """Generates n rollouts of every prompt and scores them.

    Args:
      data: rows, a JSONL or Parquet file, or task:NAME, whose held-out prompts are drawn with `seed`. Columns are read
        by the options data.* of the policy.
      rewards: functions, or their import paths. Empty: those of the policy's run, with their weights.
      weights: of the rewards in their sum. Empty: all 1.
      sampling: changes of the policy's parameters, which are those of its run's training.
      max_tokens: of a rollout. 0: the policy's.
      most: prompts at most, in order. 0: all of a file, TASK_PROMPTS of a task.
      task: arguments of a procedural task.
      workers, timeout_s: of the reward processes. A limit of 0 is that of the policy's run, which is 10 without one.

    Raises:
      ValueError: data, rewards or parameters are wrong, or a prompt does not fit.
      NoScores: no rollout could be scored.
    """
    if n < 1:
        raise ValueError(f"evaluate: n={n} must be at least 1")
    sampling_params, given = policy.sampling_with(sampling), carried(rewards or _rewards_of(policy), OWN)
    weights = weights or (() if rewards else policy.config.reward.weights)
    with _graders(policy, given, weights, workers, timeout_s) as pool:
        chosen = prompts_of(policy, data, seed, most, task)
        pool.check(chosen)
        ids = {p.id: [RolloutId(seed, "eval", 0, p.id, sample) for sample in range(n)] for p in chosen}
        requests = [
            policy.request(prompt, index, id, id.seed(), sampling_params, max_tokens)
            for index, prompt in enumerate(chosen)
            for id in ids[prompt.id]
        ]
        found = policy.run(requests, seen=pool.start)
        groups = tuple(pool.join(Group.unscored(p, [found[id] for id in ids[p.id]])) for p in chosen)
    if not any(group.scored.any() for group in groups):
        raise NoScores(
            f"evaluate: none of {len(requests)} rollouts could be scored: the graders failed, or apply to none of the prompts"
        )
    told = {
        name: getattr(sampling_params, name) for name in ("temperature", "top_k", "top_p", "stop_ids", "stop_strings")
    }
    return Scored(groups=groups, settings={**told, "max_tokens": max_tokens, "seed": seed, "rewards": given.names})


def _graders(policy: Policy, given: Carried, weights: Sequence[float], workers: int, timeout_s: float) -> Pool:
    about, ends = policy.config.reward, (*policy.sampling.eos_ids, *policy.sampling.stop_ids)
    graders = Graders(
        functions=given.names,
        weights=weights,
        code=given.code,
        workers=workers,
        timeout_s=timeout_s or about.timeout_s,
        limits=Fixed(about.limit_s),
        sandbox=about.sandbox,
    )
    return Pool(graders, special_tags.graded(policy.tokenizer, ends, skip=about.skip_special_tokens))


def _rewards_of(policy: Policy) -> tuple[str, ...]:
    """Returns the reward functions of the policy's run."""
    names = policy.config.reward.functions
    if not names:
        raise ValueError(
            "evaluate: the policy is of no run whose rewards could be used: name reward functions, for example "
            "jaxrl_post.rewards.math:exact"
        )
    own = [name for name in names if name.startswith(OWN)]
    if own:
        raise ValueError(
            f"evaluate: {own[0]!r} is a function of the program that began the run: hand over a function, or name one by its path"
        )
    return names


def prompts_of(
    policy: Policy, data: str | Path | Sequence[Mapping], seed: int, most: int, task: Mapping[str, Any] | None
) -> tuple[Prompt, ...]:
    """Returns the prompts of data; see `evaluate`."""
    columns = sources.columns(policy.config)
    if isinstance(data, (str, Path)):
        source = str(data)
        configs.refuse_url(source, "data")
        rows = prompts.rows(source, seed=seed, split="eval", size=most or TASK_PROMPTS, arguments=task, columns=columns)
    else:
        source = f"{OWN}data"
        rows = sources.handed_rows(source, listed_rows("evaluate: data", data), columns.row)
    if not rows:
        raise ValueError(f"evaluate: {source} has no rows")
    rows, notes = duplicates.settled(rows, policy.config.data.duplicates, "data", source)
    for note in notes:
        say(note)
    template = policy.template()
    limit = policy.config.engine.max_length - 1
    chosen = prompts.tokenised(rows[: most or None], policy.tokenizer, chat=template, limit=limit, where=source)
    if template is not None:
        template.close()
    return chosen
