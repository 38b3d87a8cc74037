"""Where a run's device time went: the share of useful work, and each bubble by its cause.

Seconds are measured per phase of the ring. Generation is divided by the counted uses of its rows. Invariant: the
shares of a run add up to 1, without the share of a learner's own devices. Time outside all phases is a share of its
own.
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
WRITTEN = ("loss", "rewards/accuracies", "rewards/margins")  # figures of held-out completions that the screen shows
LINE = 100  # characters of a text that one line of the screen shows


def device_time(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns shares of the time from the first step's start to the last step's end, by cause, largest first.

    Causes are those of USEFUL, and bubbles. Bubbles of generation are:

    - rows left empty by the bound on staleness
    - other empty rows: the end of a round or of a dispatch
    - rows computed again after a swap
    - rejected drafts

    With separate or lent devices, shares are of engine time. Training is the time that the ring waited for the
    learner. LEARNER is the share of time with training on any device. It is not part of the sum.

    Args:
      rows: rows of metrics.jsonl. Only rows whose step was published have seconds. Counts of the rows before belong to
        them.
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
    """Returns seconds of generation by the use of its rows."""
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
        "idle rows": used["idle"] - held,
    }
    return {cause: spent * rows / count for cause, rows in shares.items()}


def text(shares: Mapping[str, float]) -> str:
    """Returns the shares as one line."""
    useful = sum(shares.get(cause, 0.0) for cause in USEFUL)
    causes = ", ".join(
        f"{cause} {share:.1%}" for cause, share in shares.items() if share >= 0.0005 and cause != LEARNER
    )
    apart = f"; {LEARNER} {shares[LEARNER]:.1%}" if shares.get(LEARNER) else ""
    return f"device time: {useful:.1%} useful; {causes}{apart}"


def swap(swapped: Mapping) -> str:
    """Returns how weights reach the engine and what that moves, as one line. `swapped`: a case, and bytes by link."""
    merged = ["merged matrices in place"] if swapped["case"].endswith("merge") else []
    moved = ", ".join([*merged, *(f"{count:,} bytes {link}" for link, count in swapped["links"].items() if count)])
    return (
        f"weights reach the engine: {swapped['case']}; a publish writes {moved or 'nothing'}, and none through the host"
    )


def headline(summary: Mapping, samples: int, tokens: str = "sampled") -> list[str]:
    """Returns lines that describe a run's summary: the first and last evaluation, if any, and device time.

    `samples`: samples per prompt of the evaluation. `tokens`: what its tokens are called.
    """
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    where, swaps = text(summary["device_time"]), [swap(summary["swap"])] if summary.get("swap") else []
    written = []
    if summary.get("completions"):
        first, last = summary["completions"]["before"], summary["completions"]["after"]
        written = [
            f"held-out {name}: {_number(first[name])} before, {_number(last[name])} after"
            for name in WRITTEN
            if name in first
        ]
    if before is None:
        return ["", *written, pace(summary, tokens), *swaps, where]
    shown = {name: [found[name] for found in (before, after)] for name in ("greedy", f"mean_at_{samples}")}
    lines = [f"{name}: {_number(a)} before, {_number(b)} after" for name, (a, b) in shown.items()]
    return ["", *lines, *written, f"{before['n']} held-out prompts, {pace(summary, tokens)}", *swaps, where]


def pace(summary: Mapping, kind: str = "sampled") -> str:
    """Returns steps, tokens of a kind and seconds of a run's last start, and how many tokens a second that makes."""
    tokens, seconds, first = summary["tokens"], summary["seconds"], summary.get("resumed_at", 0)
    since = f" since step {first}, where it was resumed: {summary['steps'] - first} steps" if first else ""
    return f"{summary['steps']} steps{since}, {tokens:,} {kind} tokens, {seconds:.1f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s"


def line(text: str, most: int = LINE) -> str:
    """Returns a text as it is shown on one line of the screen: quoted, and cut at `most` characters, which is said."""
    shown = repr(text[:most])
    return shown if len(text) <= most else f"{shown}... ({len(text):,} characters)"


def _number(value: float | None) -> str:
    return "none" if value is None or math.isnan(value) else f"{value:.4f}"
