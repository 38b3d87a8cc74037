"""Tokens per second of the row engine alone, at several numbers of slots and rows, without and with candidates.

    python scripts/bench.py engine --json FILE [--turns=3] [--sizes=32x32,64x64,64x128]

Runs the tiny model and the 64 log-normal rollouts of scripts/bench.py step, refilled as slots get free. A size is
SLOTSxROWS. With `none` there are no candidates. With `right` every token of the rollout is known beforehand and is
verified. With `half` the first half is, and what follows is wrong. Candidates never change a rollout, which is checked,
bit for bit. All engines take their turns one after another. A figure is a median over the turns.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
SIZES = "16x32,32x32,64x64,64x128"
WARMUP = 1


def bench(record) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import step

    given = record.options
    turns = int(given.get("turns", 3))
    asked, engines, seconds = step.requests(0, step.lengths("lognormal")), {}, {}
    for size in given.get("sizes", SIZES).split(","):
        slots, rows = map(int, size.split("x"))
        engines[size] = step.engine(
            step.weights(), slots=slots, rows=rows, heads=rows, page=64, steps=16, refill=max(1, slots // 16)
        )
    for turn in range(WARMUP + turns):
        for size, engine in engines.items():
            answers, took = run(engine, asked)
            took = {"none": took}
            for kind, share in (("right", 1.0), ("half", 0.5)):
                again, took[kind] = run(engine, [guessed(r, answers[r.rollout_id], share) for r in asked])
                assert bits(again) == bits(answers), f"{size}: candidates changed an answer"
            for kind, (total, counts) in took.items():
                if turn >= WARMUP:
                    seconds.setdefault((size, kind), []).append((total, counts))
    tokens = sum(step.lengths("lognormal"))
    for (size, kind), turned in seconds.items():
        total, counts = statistics.median(total for total, _ in turned), turned[0][1]
        used = sum(counts[f"rows/{use}"] for use in ("prefill", "decode", "draft_accepted", "draft_rejected"))
        record.figure(
            f"{size}_{kind}",
            {
                "tokens_per_s": tokens / total,
                "rollout_s": total,
                "steps": counts["rows/steps"],
                "step_ms": 1e3 * total / counts["rows/steps"],
                "rows_used_ratio": used / (used + counts["rows/idle"]),
            },
        )
    record.figure("load_average", os.getloadavg()[0])


def run(engine, asked: list) -> tuple[dict, tuple[float, dict]]:
    """Returns the rollouts, seconds and counters."""
    engine.reset()
    engine.metrics()
    begun, out = time.perf_counter(), {}
    engine.submit(asked)
    while engine.pending:
        out.update((rollout.id, rollout) for rollout in engine.step())
    return out, (time.perf_counter() - begun, engine.metrics())


def guessed(request, answer, share: float):
    """Returns the request with candidates for all tokens of its rollout, of which the first `share` are right."""
    import numpy as np

    right = np.arange(len(answer)) < share * len(answer)
    tokens = np.where(right, answer.tokens, (answer.tokens + 1) % 1024)
    return dataclasses.replace(request, prefix=dataclasses.replace(answer, tokens=tokens), prefix_mode="verify")


def bits(answers: dict) -> bytes:
    return b"".join(
        r.tokens.tobytes() + r.logprobs.tobytes() + r.entropies.tobytes() for _, r in sorted(answers.items())
    )
