"""How old tokens are when they are trained on: as the closed form foresees, and never older than the bound.

Runs four pipelined settings: two on the real engine (the demo's task), and two simulated with log-normal lengths, with
learner and engine on the same devices and side by side. The measured mean staleness of a rollout's first token is
compared with the closed form, from counts of the run (scheduler/pipeline.py). It is the sum of two terms:

- rollouts that end in an engine step * E[longest of a group] / rollouts that an optimizer step trains on;
- the learner's time over the engine's for such a batch.

Then hypothesis draws cases: slots, batches, bounds, filters, dispatch lengths, failing graders, late learners. Each
case runs twice, the second time restarted before every few calls. A judge objects to a token beyond the bound and to a
slot left empty without need. It also objects to a step that is not on the oldest whole groups, or that waits for
nothing. Planted faults must be found.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path

MINUTES = 5.0
EXAMPLES, CLOSE, WARM = 400, 0.3, 8
STEPS = 40
REAL = {"engine_small_batches": (16, 4), "engine_large_batches": (16, 8)}  # prompts, rollouts of each
SIMULATED = {"shared": (), "side_by_side": ("learner.apart=True", "learner.token_s=2.45e-3")}

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def show(record) -> None:
    sys.path[:0] = [str(record.root), str(record.root / "scripts"), str(record.root / "tests")]
    for name, (prompts, group) in REAL.items():
        _compared(record, name, record.cached(name, lambda: _real(record, prompts, group)))
    for name, overrides in SIMULATED.items():
        _compared(record, name, record.cached(name, lambda: _simulated(record, overrides)))
    _bounded(record)


def _compared(record, name: str, found: dict) -> None:
    for figure in ("expected", "measured", "largest", "bound"):
        record.figure(f"{name}.{figure}", found[figure])
    record.figure(f"{name}.error", found["expected"] - found["measured"], at_least=-CLOSE, at_most=CLOSE)
    record.figure(f"{name}.beyond_the_bound", max(found["largest"] - found["bound"], 0), equals=0)


def _real(record, prompts: int, group: int) -> dict:
    from jaxrl_post.telemetry import metrics

    bound = 8
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        record.run(
            "-m",
            "jaxrl_post.main",
            "--config=configs/demo_pipeline.py",
            f"--run-dir={run}",
            f"--config.steps={STEPS}",
            f"--config.scheduler.prompts={prompts}",
            f"--config.scheduler.group_size={group}",
            f"--config.scheduler.max_staleness={bound}",
            "--config.scheduler.ahead=0",
            "--config.scheduler.max_unscored=0",
            "--config.engine.steps_per_dispatch=1",
            "--config.engine.refill_slots=1",
            "--config.engine.carry_over=keep",
            "--config.engine.carry_share=1.0",
            "--config.optimizer.lr=0.0",
            "--config.eval.prompts=0",
            "--config.eval.every=0",
            "--config.checkpoint.every=0",
            timeout_s=600,
        )
        rows = [row for row in metrics.read(run / "metrics.jsonl") if "off_policy/mean" in row][WARM:]
    return {
        "expected": rows[-1]["sched/expected_staleness"],
        "bound": bound,
        "measured": statistics.mean(row["off_policy/first_token_mean"] for row in rows),
        "largest": max(row["off_policy/max"] for row in rows),
    }


def _simulated(record, overrides: tuple[str, ...]) -> dict:
    from ages import Ages

    from jaxrl_post import loop, simulate
    from jaxrl_post.sim import settings

    given = settings.resolve(
        settings.default(),
        (
            "rounds=80",
            "workload.name=lognormal",
            "workload.mean=1350.0",
            "workload.tail=1.42",
            "workload.cap=16384",
            "cluster.replicas=1",
            "cluster.slots=240",
            "cluster.step_s=1.0",
            "scheduler.name=pipeline",
            "scheduler.prompts=15",
            "scheduler.group_size=8",
            "scheduler.max_staleness=8",
            *overrides,
        ),
    )
    ring = simulate.assemble(given)
    learner = Ages(ring.learner)
    loop.run(simulate.tallied(ring), ring.engine, ring.scheduler, ring.rewards, learner, simulate.publish, given.rounds)
    return {
        "expected": ring.scheduler.expected_staleness(),
        "measured": statistics.mean(learner.first[WARM:-WARM]),
        "largest": max(learner.oldest),
        "bound": 8,
    }


def _bounded(record) -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st
    from test_scheduler_pipeline import CASES, FAULTS, holds

    seen: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
    @given(case=st.fixed_dictionaries(CASES).filter(lambda case: not case["filtered"] or case["count"] >= 12))
    def every_promise_holds(case):
        seen["cases"] += 1
        try:
            judge, restarts = holds(case)
        except AssertionError as objection:
            seen["objections"] += 1
            print(f"{case}: {objection}")
        else:
            seen.update(restarts=restarts, at_the_bound=0 < case["staleness"] == judge.oldest)

    every_promise_holds()
    record.figure("cases", seen["cases"], at_least=EXAMPLES)
    record.figure("cases_that_reach_their_bound", seen["at_the_bound"], at_least=EXAMPLES // 20)
    record.figure("restarts", seen["restarts"], at_least=5 * EXAMPLES)
    record.figure("objections", seen["objections"], equals=0)
    passed = record.passed("tests/test_scheduler_pipeline.py", "planted")
    record.figure("planted_faults_found", passed - 1, equals=len(FAULTS))  # one test has no fault, and passes
