"""Evaluation on the run's own engine at a publish. Every prompt gets one greedy rollout and k sampled ones.

Invariant: seeds depend on (run seed, prompt, sample) only, so every evaluation of a run samples with the same noise.
Figures do not depend on the order in which rollouts finish. Training never sees these rollouts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_post.rewards import NoScores
from jaxrl_post.ring.protocols import Engine, Rewards
from jaxrl_post.ring.types import Finish, Group, Prompt, Request, RolloutId, Sampling
from jaxrl_post.telemetry import estimates

GREEDY = 1  # the attempt that marks a prompt's greedy rollout: sample 0, attempt 1


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One evaluation. For each prompt, in order: a scored group of k sampled rollouts and one of the greedy rollout."""

    sampled: tuple[Group, ...]
    greedy: tuple[Group, ...]

    def figures(self) -> dict[str, float | int]:
        """Returns the figures for summary.json.

        - An accuracy is the reward component "acc", else the reward. Unscored rollouts are left out of means.
        - num_unscored: unscored rollouts, sampled and greedy.
        - mean_at_k_se: standard error of mean_at_k over prompts.
        - pass_at_j: unbiased (arXiv 2107.03374, equation 1), over prompts whose k rollouts are all scored.
        - A rollout is right when its accuracy is above 0.5.
        - Lengths are in tokens, of sampled rollouts. `correct_*` are of right ones. Percentiles are by nearest rank.
        - A figure over no rollouts is None.
        """
        k = len(self.sampled[0].rollouts)
        means = np.array([_mean(group) for group in self.sampled])
        lengths = np.array([len(r) for group in self.sampled for r in group.rollouts])
        right = np.concatenate([(group.accuracies > 0.5) & group.scored for group in self.sampled])
        p50, p99 = _percentiles(lengths[right])
        cut = [r.finish is Finish.LENGTH for group in self.sampled for r in group.rollouts]
        unscored = sum(int(np.sum(~group.scored)) for group in (*self.sampled, *self.greedy))
        return {
            "n": len(self.sampled),
            "greedy": _nanmean([_mean(group) for group in self.greedy]),
            f"mean_at_{k}": _nanmean(means),
            f"mean_at_{k}_se": _standard_error(means),
            **{f"pass_at_{j}": _pass_at(self.sampled, j) for j in _powers_of_two(k)},
            "length_mean": float(lengths.mean()),
            "length_max": int(lengths.max()),
            "clip_ratio": float(np.mean(cut)),
            "num_correct": int(right.sum()),
            "correct_length_p50": p50,
            "correct_length_p99": p99,
            "correct_length_tail": p99 / p50 if p50 else None,
            "num_unscored": unscored,
        }

    def metrics(self) -> dict[str, float]:
        """Returns metrics of each source, under verl's names.

        - val-core/{source}/acc/mean@k
        - val-aux/{source}/acc/{greedy, pass@j}
        - val-aux/{source}/response_length/{mean, clip_ratio}

        `acc` is `reward` where the reward has no such component.
        """
        out = {}
        for source in sorted({group.prompt.source for group in self.sampled}):
            sampled = tuple(group for group in self.sampled if group.prompt.source == source)
            part = Evaluation(sampled=sampled, greedy=tuple(g for g in self.greedy if g.prompt.source == source))
            figures, k = part.figures(), len(sampled[0].rollouts)
            word = "acc" if "acc" in sampled[0].components else "reward"
            out[f"val-core/{source}/{word}/mean@{k}"] = figures[f"mean_at_{k}"]
            out[f"val-aux/{source}/{word}/greedy"] = figures["greedy"]
            out |= {f"val-aux/{source}/{word}/pass@{j}": figures[f"pass_at_{j}"] for j in _powers_of_two(k)}
            out[f"val-aux/{source}/response_length/mean"] = figures["length_mean"]
            out[f"val-aux/{source}/response_length/clip_ratio"] = figures["clip_ratio"]
        return {name: value for name, value in out.items() if value is not None}


def of(groups: Sequence[Group]) -> Evaluation:
    """Returns the evaluation whose `sampled + greedy` are these groups."""
    half = len(groups) // 2
    return Evaluation(sampled=tuple(groups[:half]), greedy=tuple(groups[half:]))


def evaluate(
    engine: Engine,
    rewards: Rewards,
    prompts: Sequence[Prompt],
    *,
    samples: int,
    run_seed: int,
    sampling: Sampling,
    max_tokens: int,
    replicas: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> Evaluation:
    """Generates one greedy rollout and `samples` sampled ones of every prompt, and scores them.

    Training rollouts in the engine wait until the evaluation ends.

    Args:
      rewards: for evaluation only. Its counts and journal are separate from training's.
      sampling: gives stop tokens and strings. Its temperature, top-k and top-p are not used.
      temperature, top_p: of the sampled rollouts.

    Raises:
      ValueError: no prompts.
      RuntimeError: the engine became idle before every rollout was returned.
      NoScores: no sampled rollout has a score.
    """
    if not prompts:
        raise ValueError("evaluation needs at least one prompt, got 0; set eval.prompts=0 to go without")
    hot = dataclasses.replace(sampling, temperature=temperature, top_k=0, top_p=top_p)
    requests = _requests(prompts, samples, run_seed, hot, max_tokens, replicas)
    engine.submit(requests)
    finished = {}
    while len(finished) < len(requests):
        if engine.pending == 0:
            raise RuntimeError(
                f"evaluation: the engine is idle with {len(requests) - len(finished)} of "
                f"{len(requests)} rollouts missing"
            )
        for rollout in engine.step():
            rewards.start(rollout)
            finished[rollout.id] = rollout

    def joined(prompt: Prompt, ids: Sequence[RolloutId]) -> Group:
        return rewards.join(Group.unscored(prompt, (finished[id] for id in ids)))

    found = Evaluation(
        sampled=tuple(joined(p, [_id(run_seed, p, s, 0) for s in range(samples)]) for p in prompts),
        greedy=tuple(joined(p, [_id(run_seed, p, 0, GREEDY)]) for p in prompts),
    )
    if not any(group.scored.any() for group in found.sampled):
        raise NoScores(
            f"evaluation: none of {len(requests)} rollouts could be scored: the graders failed, twice each, "
            "as the warnings above say"
        )
    return found


def _requests(
    prompts: Sequence[Prompt], samples: int, run_seed: int, hot: Sampling, max_tokens: int, replicas: int
) -> list[Request]:
    """Returns requests for every prompt: `samples` drawn by `hot` and one greedy."""
    cold = dataclasses.replace(hot, temperature=0.0, top_p=1.0)
    requests = []
    for index, prompt in enumerate(prompts):
        ids = [(_id(run_seed, prompt, s, 0), hot) for s in range(samples)] + [(_id(run_seed, prompt, 0, GREEDY), cold)]
        requests += [
            Request(
                rollout_id=id,
                prompt=prompt,
                seed=id.seed(),
                max_tokens=max_tokens,
                sampling=sampling,
                replica=index % replicas,
            )
            for id, sampling in ids
        ]
    return requests


def _id(run_seed: int, prompt: Prompt, sample: int, attempt: int) -> RolloutId:
    return RolloutId(run_seed, "eval", 0, prompt.id, sample, attempt)


def _mean(group: Group) -> float:
    """Returns the mean accuracy of the scored rollouts, or NaN without any."""
    return float(group.accuracies[group.scored].astype(np.float64).mean()) if group.scored.any() else math.nan


def _nanmean(values) -> float | None:
    known = np.asarray(values)[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def _standard_error(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.std(ddof=1) / math.sqrt(known.size)) if known.size > 1 else None


def _percentiles(lengths: np.ndarray) -> tuple[int | None, int | None]:
    if lengths.size == 0:
        return None, None
    p50, p99 = np.percentile(lengths, (50, 99), method="inverted_cdf")
    return int(p50), int(p99)


def _powers_of_two(k: int) -> list[int]:
    return [j for j in (1 << e for e in range(k.bit_length())) if j < k] + [k]


def _pass_at(groups: Sequence[Group], j: int) -> float | None:
    """Returns the mean over groups of pass@j, of groups whose rollouts are all scored."""
    whole = [group for group in groups if group.scored.all()]
    if not whole:
        return None
    n = len(whole[0].rollouts)
    right = [int(np.sum(group.accuracies > 0.5)) for group in whole]
    return float(np.mean([estimates.pass_at(n, c, j) for c in right]))
