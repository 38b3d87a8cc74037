"""Where a run's device time went: the share of useful work, and each bubble by its cause.

Seconds are those measured for the ring's phases. Generation is divided by the counted uses of its rows. Invariant: the
shares of a run add up to 1, except for a learner's own devices. Time that no phase accounts for is a share of its own.
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
_USES = ("prefill", "decode", "draft_accepted", "draft_rejected", "idle", "clone")
_COUNTS = (*(f"rows/{use}" for use in _USES), "swap/rows", "sched/paused_slot_steps")
LEARNER = "learner's devices at work"


def device_time(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns shares of the time between the first step's start and the last step's end, largest first, by cause.

    Causes are those of USEFUL, and bubbles. Bubbles of generation are: rows left empty by the bound on staleness,
    other empty rows (a round's tail, a dispatch's rest), rows computed again after a swap, and rejected drafts.

    Where learner and engine have separate devices, or some are lent, shares are of engine time. Training is then the
    time that the ring waited for the learner. LEARNER is the share of time with training on any device; it is not part
    of the sum.

    Args:
      rows: of metrics.jsonl. Seconds stand on rows whose step was published; counts of the rows before belong to them.
    """
    seconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    apart = 0.0
    for row in rows:
        counts.update({name: row.get(name, 0.0) for name in _COUNTS})
        if _STEP not in row:
            continue
        seconds["all"] += row[_STEP]
        apart += row.get("timing_s/train", 0.0)
        for phase, cause in _PHASES.items():
            seconds[cause] += row.get(f"timing_s/{phase}", 0.0)
        seconds.update(_generation(row | counts))
        counts.clear()
    whole = seconds.pop("all", 0.0)
    if not whole:
        return {}
    seconds["else"] = max(whole - sum(seconds.values()), 0.0)
    seconds[LEARNER] = apart
    return dict(sorted(((cause, spent / whole) for cause, spent in seconds.items() if spent), key=lambda one: -one[1]))


def _generation(row: Mapping[str, float]) -> dict[str, float]:
    """Its seconds by what the rows were for."""
    used = {use: row.get(f"rows/{use}", 0.0) for use in _USES}
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
    """Describes a run's summary as lines: the first and the last evaluation, if any, with `samples` samples, and
    device time.
    """
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
