"""Two runs compared prompt by prompt: what both have generated, and the interval of the mean difference.

Runs with one seed share the noise of every rollout. So a rollout is paired with that of the same prompt, epoch, sample
and attempt. Runs with different seeds share prompts only, and all of a prompt's rollouts are paired at once.

Invariant: a prompt gives one value, the mean over its pairs. Values of different prompts are independent, so the
interval is that of the mean of independent values. What has no partner, or no score, is counted and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxrl_post.evaluation import GREEDY
from jaxrl_post.telemetry import estimates
from jaxrl_post.telemetry.rollout_log import Scores
from jaxrl_post.telemetry.run_logs import RunLogs
from jaxrl_post.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Paired:
    """The paired comparison of one thing: B minus A.

    - `interval`: paired, of the difference. `unpaired`: of the same values as if they had nothing in common. Both are
      None below two prompts.
    - `num_pairs`: of rollouts, or of prompts where the seeds differ.
    - `alone`: rollouts of A and of B without a partner.
    - `unscored`: pairs with a rollout that has no score. Where the seeds differ, rollouts without one.
    - `other_prompts`: prompts of one id and different texts, which are not paired.
    """

    what: str
    mean_a: float
    mean_b: float
    difference: float
    interval: tuple[float, float] | None
    unpaired: tuple[float, float] | None
    num_prompts: int
    num_pairs: int
    alone: tuple[int, int]
    unscored: int
    other_prompts: int

    @property
    def width(self) -> float | None:
        """Returns the width of the paired interval over that of the unpaired one, or None without either."""
        if self.interval is None or self.unpaired is None or self.unpaired[1] == self.unpaired[0]:
            return None
        return (self.interval[1] - self.interval[0]) / (self.unpaired[1] - self.unpaired[0])


@dataclass
class Side:
    """The values of one run: prompt id -> key -> value, None where a rollout has no score."""

    prompts: dict[str, Prompt] = field(default_factory=dict)
    values: dict[str, dict[tuple, float | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, groups: Iterable[Scores], value: Callable[[Scores], np.ndarray]) -> Side:
        """Collects the values of groups. A later one replaces an earlier one with the same id."""
        out = cls()
        for group in groups:
            out.prompts[group.prompt.id] = group.prompt
            mine = out.values.setdefault(group.prompt.id, {})
            for id, one, scored in zip(group.ids, value(group), group.scored, strict=True):
                mine[id.epoch, id.sample, id.attempt] = float(one) if scored else None
        return out

    def __len__(self) -> int:
        return sum(map(len, self.values.values()))


def between(
    one: RunLogs, two: RunLogs, same: Callable[[Prompt, Prompt], bool], *, draws: int | None = None
) -> list[Paired]:
    """Returns the comparisons of two runs: training rewards, then evaluations at every step that both have.

    Without a common step it is the last evaluation of each. Comparisons without a pair are left out.

    Args:
      same: whether a prompt of A and one of B with its id are the same.
      draws: resamples of a bootstrap; None: estimates.DRAWS.
    """
    by_seed = one.kept.get("seed") == two.kept.get("seed")
    sides = [Side.of(_trained(run), lambda group: group.rewards) for run in (one, two)]
    out = [paired("training rewards", *sides, same, by_seed=by_seed, draws=draws)]
    for word, steps in _evaluations(one, two):
        groups = [run.scores("eval", step) for run, step in zip((one, two), steps, strict=True)]
        for kind, greedy in (("sampled", False), ("greedy", True)):
            mine = [[g for g in some if (g.ids[0].attempt == GREEDY) == greedy] for some in groups]
            sides = [Side.of(some, lambda group: group.accuracies) for some in mine]
            out.append(paired(f"evaluation {word}, {kind}", *sides, same, by_seed=by_seed, draws=draws))
    return [found for found in out if found is not None]


def _trained(run: RunLogs) -> Iterator[Scores]:
    """Yields the scores of training, oldest first."""
    for step in run.steps("train"):
        yield from run.scores("train", step)


def _evaluations(one: RunLogs, two: RunLogs) -> list[tuple[str, tuple[int, int]]]:
    """Returns, as words and numbers, the steps of evaluations that are compared."""
    steps = [run.steps("eval") for run in (one, two)]
    both = sorted({*steps[0]} & {*steps[1]})
    if both or not all(steps):
        return [(f"of step {step}", (step, step)) for step in both]
    last = steps[0][-1], steps[1][-1]
    return [(f"of step {last[0]} and of step {last[1]}", last)]


def paired(
    what: str, one: Side, two: Side, same: Callable[[Prompt, Prompt], bool], *, by_seed: bool, draws: int | None = None
) -> Paired | None:
    """Returns the comparison of two sides, or None where they have no pair with two scores.

    Args:
      by_seed: pair rollout with rollout; else prompt with prompt.
    """
    common = [id for id in one.values if id in two.values]
    alike = [id for id in common if same(one.prompts[id], two.prompts[id])]
    met = [_meeting(one.values[id], two.values[id], by_seed) for id in alike]
    means = [[np.mean(a), np.mean(b)] for a, b, _, _ in met if a and b]
    if not means:
        return None
    a, b = np.array(means, np.float64).T
    enough = len(means) > 1
    partners = [sum(one[2][side] for one in met) for side in (0, 1)]
    return Paired(
        what=what,
        mean_a=float(a.mean()),
        mean_b=float(b.mean()),
        difference=float((b - a).mean()),
        interval=estimates.mean_interval(b - a, draws=draws) if enough else None,
        unpaired=estimates.difference_interval(a, b, draws=draws) if enough else None,
        num_prompts=len(means),
        num_pairs=sum(len(a) for a, _, _, _ in met) if by_seed else len(means),
        alone=(len(one) - partners[0], len(two) - partners[1]),
        unscored=sum(one[3] for one in met),
        other_prompts=len(common) - len(alike),
    )


def _meeting(
    a: Mapping[tuple, float | None], b: Mapping[tuple, float | None], by_seed: bool
) -> tuple[list[float], list[float], tuple[int, int], int]:
    """Returns a prompt's values of either side, how many rollouts have a partner, and how many lack a score."""
    if not by_seed:
        scored = [[value for value in side.values() if value is not None] for side in (a, b)]
        return *scored, (len(a), len(b)), len(a) + len(b) - sum(map(len, scored))
    pairs = [(a[key], b[key]) for key in a if key in b]
    kept = [(x, y) for x, y in pairs if x is not None and y is not None]
    return [x for x, _ in kept], [y for _, y in kept], (len(pairs), len(pairs)), len(pairs) - len(kept)
