"""How old tokens are when they are trained on: as the closed form foresees, and never older than the bound.

Runs four pipelined settings: two on the real engine (the demo's task), and two simulated with log-normal lengths, with
learner and engine on the same devices and side by side. The measured mean staleness of a rollout's first token is
compared with the closed form, from counts of the run (scheduler/pipeline.py). It is the sum of two terms:

- rollouts that end in an engine step * E[longest of a group] / rollouts that an optimizer step trains on;
- the learner's time over the engine's for such a batch.

The arm `scheduler` of the show `suite` draws cases, in which no token may be older than the bound.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import trained

from jaxrl_post.ring import loop
from jaxrl_post.simulate import settings, simulation

MINUTES = 5.0
PLATFORM = "cpu"
CLOSE, WARM = 0.3, 8
STEPS = 40
REAL_OPTIONS = (
    f"steps={STEPS} scheduler.ahead=0 scheduler.max_unscored=0 engine.steps_per_dispatch=1 engine.refill_slots=1 "
    "engine.carry_over=keep engine.carry_share=1.0 optimizer.lr=0.0 eval.prompts=0 eval.every=0 checkpoint.every=0"
)
REAL = {"engine_small_batches": (16, 4), "engine_large_batches": (16, 8)}  # prompts, rollouts of each
SIMULATED = {"shared": (), "side_by_side": ("learner.apart=True", "learner.token_s=2.45e-3")}


def show(record) -> None:
    for name, (prompts, group) in REAL.items():
        _compared(record, name, record.cached(name, lambda: _real(record, prompts, group)))
    for name, overrides in SIMULATED.items():
        _compared(record, name, record.cached(name, lambda: _simulated(record, overrides)))


def _compared(record, name: str, found: dict) -> None:
    for figure in ("expected", "measured", "largest", "bound"):
        record.figure(f"{name}.{figure}", found[figure])
    record.figure(f"{name}.error", found["expected"] - found["measured"], at_least=-CLOSE, at_most=CLOSE)
    record.figure(f"{name}.beyond_the_bound", max(found["largest"] - found["bound"], 0), equals=0)


def _real(record, prompts: int, group: int) -> dict:
    bound = 8
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        own = (f"scheduler.prompts={prompts}", f"scheduler.group_size={group}", f"scheduler.max_staleness={bound}")
        trained.run(record, "configs/demo/pipeline.py", run, REAL_OPTIONS, *own, timeout_s=600)
        rows = trained.rows(run, "off_policy/mean")[WARM:]
    return {
        "expected": rows[-1]["sched/expected_staleness"],
        "bound": bound,
        "measured": statistics.mean(row["off_policy/first_token_mean"] for row in rows),
        "largest": max(row["off_policy/max"] for row in rows),
    }


def _simulated(record, overrides: tuple[str, ...]) -> dict:
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
    ring = simulation.assemble(given)
    learner = Ages(ring.learner)
    loop.run(
        simulation.tallied(ring), ring.engine, ring.scheduler, ring.rewards, learner, simulation.publish, given.rounds
    )
    return {
        "expected": ring.scheduler.expected_staleness(),
        "measured": statistics.mean(learner.first[WARM:-WARM]),
        "largest": max(learner.oldest),
        "bound": 8,
    }


class Ages:
    """A protocols.Learner around `learner`, which records the age of tokens in optimizer steps.

    For each accumulation with groups: `first`, the mean age of a rollout's first token, and `oldest`, the age of the
    oldest token.
    """

    def __init__(self, learner: Any):
        self._learner = learner
        self.first: list[float] = []
        self.oldest: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def accumulate(self, groups) -> None:
        stale = [self._learner.step - rollout.versions for group in groups for rollout in group.rollouts]
        if stale:
            self.first.append(sum(float(one[0]) for one in stale) / len(stale))
            self.oldest.append(max(int(one.max()) for one in stale))
        self._learner.accumulate(groups)
