"""python -m jaxrl_post compare A B [--metric=NAME] [--json]

Compares two runs: the options in which they differ, their curves, seconds and tokens a second, how stale their tokens
were, and what they generated, prompt by prompt.

--metric=NAME   also prints this metric at every step that both runs have; may come several times
--json          prints one object: "curves" has the metrics that follow from config and code, "timed" those of the machine

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import numpy as np

from jaxrl_post.checkpoint import identity
from jaxrl_post.commands import pairs
from jaxrl_post.commands.arguments import Arguments, answered
from jaxrl_post.commands.texts import decoder
from jaxrl_post.config import refuse_url
from jaxrl_post.json_text import shown
from jaxrl_post.telemetry import metrics, run_logs
from jaxrl_post.telemetry.run_logs import RunLogs
from jaxrl_post.types import Prompt

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
_BARS, _WIDTH = "▁▂▃▄▅▆▇█", 32
_ALIKE = ("run_dir", "name")  # options that say only where a run lies


def main(arguments: Sequence[str]) -> int:
    """Prints the comparison. Exit code 1, with one sentence, where a run cannot be read or they share nothing."""
    return answered(lambda: _print(_read(arguments)))


def _read(arguments: Sequence[str]) -> argparse.Namespace:
    words = Arguments("compare", str(__doc__))
    for name in ("a", "b"):
        words.add_argument(name, metavar=name.upper(), help=argparse.SUPPRESS)
    words.add_argument("--metric", action="append", default=[], help=argparse.SUPPRESS)
    words.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    flags = words.read(arguments)
    for folder in (flags.a, flags.b):
        refuse_url(folder, "a run")
    return flags


def _print(flags: argparse.Namespace) -> int:
    found = compared(run_logs.opened(flags.a), run_logs.opened(flags.b))
    for name in flags.metric:
        _check_metric(name, found["curves"] | found["timed"])
    print(json.dumps(found) if flags.json else "\n".join(lines(found, flags.metric)))
    return 0


def compared(one: RunLogs, two: RunLogs) -> dict:
    """Returns the whole comparison as plain values.

    Raises:
      ValueError: the runs share no prompt and no metric at one step.
    """
    found = pairs.between(one, two, _same(one, two))
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

    decode = functools.cache(lambda side: decoder((one, two)[side]))
    return same


def curves(one: RunLogs, two: RunLogs, *, timed: bool = False) -> dict[str, dict]:
    """Returns {name: {"steps", "a", "b"}} at steps that both runs have, of metrics that were timed or of all others."""
    columns = [_columns(run.metrics(), timed) for run in (one, two)]
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
            if name != "step" and metrics.is_timing(name) == timed and math.isfinite(value):
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
    for name in _headline(found["curves"]):
        curve = found["curves"][name]
        low, high = min(curve["a"] + curve["b"]), max(curve["a"] + curve["b"])
        for word in "ab":
            rows.append(
                (name if word == "a" else "", word.upper(), sparkline(curve[word], low, high), *_ends(curve[word]))
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


def _headline(there: Mapping) -> list[str]:
    return [name for name in HEADLINE if name in there] + [name for name in there if name.startswith("val-core/")]


def _ends(values: Sequence[float]) -> tuple[str, str]:
    return f"{values[0]:.4g}", f"{values[-1]:.4g}"


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Returns a line of bars between `low` and `high`: means of neighbours where there are more values than places."""
    parts = np.array_split(np.asarray(values, np.float64), min(len(values), _WIDTH))
    heights = [(float(part.mean()) - low) / (high - low) if high > low else 0.5 for part in parts]
    return "".join(_BARS[min(int(height * len(_BARS)), len(_BARS) - 1)] for height in heights)


def _table(heading: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield heading if rows else f"{heading}: nothing"
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
