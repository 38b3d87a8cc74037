"""Where a run's device time went: the share that did useful work, and each bubble by its cause.

Seconds are those of the ring's phases as they were measured; those of generation are divided by what its rows were for, which is
counted. Invariant: the shares of a run add up to 1, but for a learner's own devices; what no phase accounts for is said as such.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

USEFUL = ("generating", "training")
_PHASES = {
    "update_actor": "training",
    "old_log_prob": "training",
    "update_weights": "swaps",
    "relayout": "swaps",
    "reward": "rewards",
    "testing": "evaluation",
    "save_checkpoint": "checkpoints",
    "log": "logs",
}
_STEP = "timing_s/step"
LEARNER = "learner's devices at work"


def device_time(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Shares of the time between the first step's begin and the last one's end, largest first, by cause: those of USEFUL, and
    bubbles. Of generation: rows that stood empty since the bound on staleness held answers back, that stood empty else (a
    round's tail, a dispatch's rest), that were computed again after a swap, and drafts that proved wrong. Where learner and
    engine have devices of their own, or some are lent, it is the engine's, and training what the ring waited for; LEARNER says for
    which share there was training on any device, which adds to nothing else.

    Args:
      rows: of metrics.jsonl; those without a step's seconds count nothing.
    """
    seconds: Counter[str] = Counter()
    apart = 0.0
    for row in rows:
        if _STEP not in row:
            continue
        seconds["all"] += row[_STEP]
        apart += row.get("timing_s/train", 0.0)
        for phase, cause in _PHASES.items():
            seconds[cause] += row.get(f"timing_s/{phase}", 0.0)
        seconds.update(_generation(row))
    whole = seconds.pop("all", 0.0)
    if not whole:
        return {}
    seconds["else"] = max(whole - sum(seconds.values()), 0.0)
    seconds[LEARNER] = apart
    return dict(sorted(((cause, spent / whole) for cause, spent in seconds.items() if spent), key=lambda one: -one[1]))


def _generation(row: Mapping[str, float]) -> dict[str, float]:
    """Its seconds by what the rows were for."""
    used = {
        use: row.get(f"rows/{use}", 0.0)
        for use in ("prefill", "decode", "draft_accepted", "draft_rejected", "idle", "clone")
    }
    spent, count = row.get("timing_s/gen", 0.0), sum(used.values())
    if not count:
        return {"generating": spent}
    again = min(row.get("swap/rows", 0.0), used["prefill"])
    held = min(row.get("sched/paused_slot_steps", 0.0), used["idle"])
    useful = used["prefill"] - again + used["decode"] + used["draft_accepted"]
    shares = {
        "generating": useful,
        "rows computed again": again,
        "drafts that failed": used["draft_rejected"] + used["clone"],
        "rows held empty by the bound": held,
        "rows without an answer": used["idle"] - held,
    }
    return {cause: spent * rows / count for cause, rows in shares.items()}


def text(shares: Mapping[str, float]) -> str:
    """One line."""
    useful = sum(shares.get(cause, 0.0) for cause in USEFUL)
    told = ", ".join(f"{cause} {share:.1%}" for cause, share in shares.items() if share >= 0.0005 and cause != LEARNER)
    apart = f"; {LEARNER} {shares[LEARNER]:.1%}" if shares.get(LEARNER) else ""
    return f"device time: {useful:.1%} useful; {told}{apart}"


def headline(summary: Mapping, samples: int) -> list[str]:
    """A run's summary as lines: its first and last evaluation, which had so many samples, if there is one, and its device time."""
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    where = text(summary["device_time"])
    if before is None:
        return ["", where]
    shown = {name: [found[name] for found in (before, after)] for name in ("greedy", f"mean_at_{samples}")}
    lines = [f"{name}: {_number(a)} before, {_number(b)} after" for name, (a, b) in shown.items()]
    return [
        "",
        *lines,
        f"{before['n']} held-out prompts, {summary['steps']} steps, {summary['tokens']:,} sampled "
        f"tokens, {summary['seconds']:.1f} s",
        where,
    ]


def _number(value: float | None) -> str:
    return "none" if value is None or math.isnan(value) else f"{value:.4f}"
