"""Where the time went and how long the rollouts were, by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_post.runs.run_logs import RunLogs
from jaxrl_post.telemetry import report
from jaxrl_post.telemetry.length_bias import bin_of, edges
from jaxrl_post.telemetry.page.curves import evenly, number, parts

BARS = 120  # of the time, and columns of lengths


def times(steps: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Returns seconds by part of the time. A bar is one published step, or several neighbours where there are more than BARS.

    Returns:
      first, last: the steps of each bar.
      seconds: the mean seconds of a step, by part, for each bar. The parts of a bar add up to its time.
      shares: shares of the whole run by part, as in summary.json.
    """
    published: list[list[Mapping[str, float]]] = [[]]
    for row in steps:
        published[-1].append(row)
        if "timing_s/step" in row:
            published.append([])
    bars = [[row for one in part for row in one] for part in parts(published[:-1], BARS)]
    split = [_seconds(bar) for bar in bars]
    shares = {name: share for name, share in report.device_time(steps).items() if name != report.LEARNER}
    return {
        "first": [int(bar[0]["step"]) for bar in bars],
        "last": [int(bar[-1]["step"]) for bar in bars],
        "seconds": {name: [number(one.get(name, 0.0), 5) for one in split] for name in shares},
        "shares": {name: number(share, 5) for name, share in shares.items()},
    }


def _seconds(bar: Sequence[Mapping[str, float]]) -> dict[str, float]:
    mean = sum(row.get("timing_s/step", 0.0) for row in bar) / len(bar)
    return {name: share * mean for name, share in report.device_time(bar).items()}


def lengths(files: RunLogs) -> dict[str, Any]:
    """Returns histograms of rollout lengths for at most BARS steps of training, evenly spaced.

    Returns:
      steps: the steps drawn. all: the number of steps.
      edges: the smallest length of each bin, and the end of the last one.
      counts: rollouts by step and bin.
    """
    every = files.steps("train")
    steps = evenly(every, BARS)
    found = [files.lengths("train", step) for step in steps]
    some = [one for one in found if one.size]
    if not some:
        return {"steps": [], "all": len(every), "edges": [], "counts": []}
    low, high = (bin_of(int(extreme)) for extreme in (min(map(np.min, some)), max(map(np.max, some))))
    counts = [np.bincount([bin_of(int(n)) - low for n in one], minlength=high - low + 1).tolist() for one in found]
    return {"steps": steps, "all": len(every), "edges": edges()[low : high + 2], "counts": counts}
