"""python -m jaxrl_post compare A B [--metric=NAME] [--json]

Compares two runs: the options in which they differ, their curves, seconds and tokens a second, how stale their tokens
were, and what they generated, prompt by prompt.

Runs with one seed share the noise of every rollout, so rollouts of the same prompt, epoch, sample and attempt are
paired. The mean difference has a 95 % bootstrap interval over prompts. Beside it stands the interval that the same
values would have without the pairs. What has no partner is counted.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from jaxrl_post.commands.arguments import Command
from jaxrl_post.config.command_line import Flag
from jaxrl_post.launch.parts.evaluation import GREEDY
from jaxrl_post.ring.json_text import shown
from jaxrl_post.ring.types import Prompt
from jaxrl_post.runs import metric_rows, run_logs
from jaxrl_post.runs.checkpoint import identity
from jaxrl_post.runs.rollout_log import Scores
from jaxrl_post.runs.run_logs import RunLogs
from jaxrl_post.telemetry import estimates
from jaxrl_post.telemetry.screen import averaged, sparkline

HEADLINE = (
    "critic/score/mean",
    "reward/acc/mean",
    "response_length/mean",
    "actor/entropy",
    "actor/grad_norm",
    "off_policy/mean",
    "off_policy/max",
)
TIMED = {  # what a user calls these metrics
    "timing_s/step": "seconds a step",
    "timing_s/gen": "seconds of generation",
    "perf/throughput": "trained tokens/s a device",
    "perf/generated_tokens_per_s": "generated tokens/s",
}
_WIDTH = 32  # of a curve
_ALIKE = ("run_dir", "name")  # options that say only where a run lies

_FLAGS = (
    Flag("A", "a run's folder"),
    Flag("B", "a run's folder"),
    Flag("--metric=NAME ...", "also prints this metric at every step that both runs have; may come several times"),
    Flag("--json", 'one object: "curves" follow from config and code, "timed" is measured on the machine'),
)


def _print(flags: argparse.Namespace) -> int:
    found = compared(run_logs.opened(flags.a), run_logs.opened(flags.b))
    for name in flags.metric:
        _check_metric(name, found["curves"] | found["timed"])
    print(json.dumps(found) if flags.json else "\n".join(lines(found, flags.metric)))
    return 0


main = Command("compare", __doc__, _FLAGS, _print)


def compared(one: RunLogs, two: RunLogs) -> dict:
    """Returns the whole comparison as plain values.

    Raises:
      ValueError: the runs share no prompt and no metric at one step.
    """
    found = between(one, two, _same(one, two))
    shared, timed = (curves(one, two, timed=timed) for timed in (False, True))
    if not found and not shared:
        raise ValueError(
            f"compare: {one.folder} and {two.folder} share nothing: no scored prompt, and no metric at one step"
        )
    return {
        "a": str(one.folder),
        "b": str(two.folder),
        "seeds_equal": one.kept.get("seed") == two.kept.get("seed"),
        "config": _differences(one.kept, two.kept, _ALIKE),
        "environment": _differences(one.derived, two.derived),
        "paired": [asdict(pair) | {"width_over_unpaired": pair.width} for pair in found],
        "curves": shared,
        "timed": timed,
    }


def _differences(one: Mapping, two: Mapping, but: Sequence[str] = ()) -> dict[str, list]:
    return {name: [old, new] for name, old, new in identity.differences(one, two) if name not in but}


def _same(one: RunLogs, two: RunLogs):
    """Returns what tells whether two prompts of one id are the same: of the same tokens, or of the same text."""

    def same(a: Prompt, b: Prompt) -> bool:
        if a.answer != b.answer:
            return False
        return np.array_equal(a.tokens, b.tokens) or decode(0)(a.tokens) == decode(1)(b.tokens)

    decode = functools.cache(lambda side: run_logs.tokenizer_of((one, two)[side]).decode)
    return same


def curves(one: RunLogs, two: RunLogs, *, timed: bool = False) -> dict[str, dict]:
    """Returns {name: {"steps", "a", "b"}} at steps that both runs have, of metrics that were timed or of all others."""
    columns = [_columns(run.rows, timed) for run in (one, two)]
    out = {}
    for name in sorted(columns[0].keys() & columns[1].keys()):
        a, b = columns[0][name], columns[1][name]
        steps = sorted(a.keys() & b.keys())
        if steps and name != "training/global_step":
            out[name] = {"steps": steps, "a": [a[step] for step in steps], "b": [b[step] for step in steps]}
    return out


def _columns(rows: Sequence[Mapping], timed: bool) -> dict[str, dict[int, float]]:
    out: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and metric_rows.is_timing(name) == timed and math.isfinite(value):
                out.setdefault(name, {})[int(row["step"])] = value
    return out


def _check_metric(name: str, there: Mapping) -> None:
    if name not in there:
        near = difflib.get_close_matches(name[:200], there, n=1, cutoff=0.0)
        raise ValueError(
            f"--metric={shown(name)}: the runs have no such metric at one step"
            + (f"; nearest is {near[0]}" if near else "")
        )


# ---- as text


def lines(found: Mapping, asked: Sequence[str]) -> Iterator[str]:
    """Yields the comparison as lines."""
    yield f"A = {found['a']}\nB = {found['b']}"
    for heading in ("config", "environment"):
        yield from _table(f"\n{heading}", [(n, shown(a), shown(b)) for n, (a, b) in found[heading].items()])
    yield from _pairs(found)
    rows = []
    curves = found["curves"]
    headline = [name for name in HEADLINE if name in curves] + [name for name in curves if name.startswith("val-core/")]
    for name in headline:
        curve = curves[name]
        low, high = min(curve["a"] + curve["b"]), max(curve["a"] + curve["b"])
        for word in "ab":
            rows.append(
                (
                    name if word == "a" else "",
                    word.upper(),
                    sparkline(averaged(curve[word], _WIDTH), low, high),
                    *_ends(curve[word]),
                )
            )
    yield from _table("\ncurves at common steps: shape, first and last value", rows)
    yield from _speeds(found["timed"])
    for name in asked:
        curve = (found["curves"] | found["timed"])[name]
        yield from _table(
            f"\n{name}: step, A, B", [(str(s), f"{a:.6g}", f"{b:.6g}") for s, a, b in zip(*curve.values())]
        )


def _speeds(timed: Mapping) -> Iterator[str]:
    """Yields seconds and tokens a second: medians over common steps, of which the first compiles, and their ratio."""
    rows = []
    for name, words in TIMED.items():
        if name in timed:
            a, b = (statistics.median(timed[name][side][1:] or timed[name][side]) for side in "ab")
            rows.append((words, f"A {a:.4g}", f"B {b:.4g}", f"B/A {b / a:.2f}" if a else ""))
    yield from _table("\nmedian at common steps but the first, as measured", rows)


def _pairs(found: Mapping) -> Iterator[str]:
    by = "prompt, epoch, sample and attempt" if found["seeds_equal"] else "prompt alone, because the seeds differ"
    if not found["paired"]:
        yield "\nNothing can be paired: the two share no scored prompt."
        return
    yield f"\nB minus A, paired by {by}, with 95 % intervals over prompts"
    for pair in found["paired"]:
        span = _interval(pair["interval"])
        width = pair["width_over_unpaired"]
        beside = (
            "" if width is None else f"; unpaired {_interval(pair['unpaired'])}, so paired has {width:.2f} of its width"
        )
        yield f"  {pair['what']}: {pair['mean_a']:.4f} -> {pair['mean_b']:.4f}, difference {pair['difference']:+.4f} {span}{beside}"
        unit = "pairs" if found["seeds_equal"] else "prompts"
        yield (
            f"    {pair['num_prompts']} prompts, {pair['num_pairs']} {unit}; without a partner {pair['alone'][0]} rollouts "
            f"of A and {pair['alone'][1]} of B; without a score {pair['unscored']}"
            + (f"; {pair['other_prompts']} ids name different prompts" if pair["other_prompts"] else "")
        )


def _interval(span: Sequence[float] | None) -> str:
    return "(one prompt has no interval)" if span is None else f"[{span[0]:+.4f}, {span[1]:+.4f}]"


def _ends(values: Sequence[float]) -> tuple[str, str]:
    return f"{values[0]:.4g}", f"{values[-1]:.4g}"


def _table(heading: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield heading if rows else f"{heading}: nothing"
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()


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
