"""A run as a picture for the terminal, from the files of its folder: how far it is, and how it goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
import rich.table
import rich.text

from jaxrl_post.runs.run_logs import RunLogs
from jaxrl_post.telemetry import report
from jaxrl_post.telemetry.page.curves import parts

_TICKS = "▁▂▃▄▅▆▇█"
_RECENT = 10  # steps whose time is told
_LINES = {
    "reward": ("critic/score/mean", ".4f"),
    "length": ("response_length/mean", ".1f"),
    "longest": ("response_length/max", ".0f"),
    "entropy": ("actor/entropy", ".4f"),
    "grad norm": ("actor/grad_norm", ".4f"),
    "seconds": ("timing_s/step", ".2f"),
    "staleness": ("off_policy/mean", ".2f"),
}
_SUPERVISED = {  # of runs that learn what is written: rewards of it say nothing
    "loss": ("actor/pg_loss", ".4f"),
    "margin": ("rewards/margins", ".4f"),
    **{name: line for name, line in _LINES.items() if name in ("length", "longest", "grad norm", "seconds")},
}


def picture(files: RunLogs, width: int, now: float) -> rich.console.Group:
    """Returns the picture of a run.

    Args:
      width: columns of the terminal.
      now: the present time, in seconds as time.time() gives it.
    """
    steps = files.step_rows
    if not steps:
        return rich.console.Group(f"{files.folder}: no step has ended yet")
    table = rich.table.Table(box=None, pad_edge=False, show_header=False)
    for column in ("right", "left", "left"):
        table.add_column(justify=column, no_wrap=True)
    for heading, (name, form) in (_SUPERVISED if files.written else _LINES).items():
        values = [row[name] for row in steps if not math.isnan(row.get(name, math.nan))]
        if values:
            curve = averaged(values, max(width - 34, 8))
            low, high = min(curve), max(curve)
            ends = f"{low:.4g} to {high:.4g}"
            table.add_row(format(values[-1], form), heading, f"{sparkline(curve, low, high)}  {ends}")
    about = [
        _head(files, steps, now),
        "",
        table,
        "",
        *_time(steps),
        *_held_out(files),
        *_staleness(steps),
        *_alarms(steps),
    ]
    return rich.console.Group(*(rich.text.Text(one) if isinstance(one, str) else one for one in about))


def averaged(values: Sequence[float], width: int) -> list[float]:
    """Returns at most `width` values, each the mean of neighbours."""
    return [sum(part) / len(part) for part in parts(values, width)]


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Returns a bar for each value, from `low` to `high`."""
    top = len(_TICKS) - 1
    return "".join(_TICKS[round((value - low) / (high - low) * top) if high > low else 0] for value in values)


def _head(files: RunLogs, steps: Sequence[Mapping[str, float]], now: float) -> str:
    last, most = int(steps[-1]["step"]), files.kept.get("steps", "?")
    if files.summary:
        told = files.summary
        seconds, first = told.get("seconds", 0), told.get("resumed_at", 0)
        since = f" since it was resumed at step {first}" if first else ""
        pace = f", {told['tokens'] / seconds:,.0f} sampled tokens/s" if seconds and "tokens" in told else ""
        return f"{files.folder}: ended at step {last} of {most}, after {seconds:,.0f} s{since}{pace}"
    age = now - files.changed
    ago = f"{max(age, 0):,.0f} s ago" if age > -5 else f"by a clock {-age:,.0f} s ahead of this one"
    seconds = [row["timing_s/step"] for row in steps[-_RECENT:] if "timing_s/step" in row]
    left = f", about {(most - last) * sum(seconds) / len(seconds) / 60:.0f} min left" if seconds else ""
    return f"{files.folder}: step {last} of {most}, {ago}{left}"


def _time(steps: Sequence[Mapping[str, float]]) -> list[str]:
    shares = report.device_time(steps[-_RECENT:])
    return [f"last {min(_RECENT, len(steps))} steps: {report.text(shares)}"] if shares else []


def _held_out(files: RunLogs) -> list[str]:
    evaluated: list[dict[str, Any]] = [row for row in files.rows if any(name.startswith("val-core/") for name in row)]
    if not evaluated:
        return []
    names = [
        n for n in evaluated[-1] if n.startswith("val-core/") or (n.startswith("val-aux/") and n.endswith("/greedy"))
    ]
    told = "  ".join(
        f"{n.split('/', 1)[1]} {evaluated[0].get(n, math.nan):.4f} -> {evaluated[-1][n]:.4f}" for n in names
    )
    return [f"held out, step {int(evaluated[0]['step'])} -> {int(evaluated[-1]['step'])}: {told}"]


def _staleness(steps: Sequence[Mapping[str, float]]) -> list[str]:
    row = steps[-1]
    shares = {int(name.rsplit("_", 1)[1]): row[name] for name in row if name.startswith("off_policy/share_")}
    if not shares:
        return ["every token was sampled with the weights that it trained"]
    return ["age of trained tokens, in steps: " + ", ".join(f"{age} {shares[age]:.0%}" for age in sorted(shares))]


def _alarms(steps: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns a line for each alarm of the last step, and the steps that had one before."""
    ringing = [name.removeprefix("alarm/") for name, value in steps[-1].items() if name.startswith("alarm/") and value]
    rang = [
        int(row["step"]) for row in steps if any(value and name.startswith("alarm/") for name, value in row.items())
    ]
    if not rang:
        return ["alarms: none so far"]
    return [f"ALARM now: {', '.join(ringing)}"] * bool(ringing) + [
        f"steps with an alarm: {len(rang)}, the last is {rang[-1]}"
    ]
