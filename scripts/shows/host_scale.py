"""A million rollouts of a hundred thousand prompts over 1,024 replicas: minutes and bytes on one core, at a flat cost.

Runs the real loop and tail batching (recompute, 1.25 times the prompts) over the simulated engine. A round has 200
prompts x 10 rollouts of the fitted 8k workload. There are 500 rounds, and, for the cost at 10,000 rollouts, the median
of three runs of 5 rounds. Each runs in a process that may use one core. Minutes are of the loop by the wall clock, cost
per rollout is by the core's own time, and bytes are of the whole process.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path

MINUTES = 9.0
PROMPTS, GROUP = 200, 10


def show(record) -> None:
    few = statistics.median(_run(record, 5)["us_per_rollout"] for _ in range(3))
    many = _run(record, 500)
    record.figure("rollouts", many["rollouts"], at_least=1_000_000)
    record.figure("prompts", many["prompts"], at_least=100_000)
    record.figure("replicas", many["replicas"], equals=1024)
    record.figure("minutes", many["seconds"] / 60, at_most=10)
    record.figure("gigabytes", many["bytes"] / 2**30, at_most=4)
    record.figure("us_per_rollout_at_10k", few)
    record.figure("us_per_rollout_at_1m", many["us_per_rollout"])
    record.figure("cost_1m_over_10k", many["us_per_rollout"] / few, at_most=1.3)


def _run(record, rounds: int) -> dict:
    told = record.said(__file__, str(rounds), timeout_s=3600, env={"PYTHONPATH": str(record.root)})
    return json.loads(told.splitlines()[-1])


def one(rounds: int) -> dict:
    """Simulates the given number of rounds in this process."""
    from jaxrl_post import config
    from jaxrl_post.ring import loop
    from jaxrl_post.simulate import settings, simulation

    root = Path(__file__).resolve().parents[2]
    given = settings.resolve(
        config.load(str(root / "configs" / "sim" / "rollpacker_8k.py")),
        (
            f"rounds={rounds}",
            "workload.prompts=100000",
            "cluster.replicas=1024",
            "cluster.slots=64",
            f"scheduler.prompts={PROMPTS}",
            f"scheduler.group_size={GROUP}",
            "scheduler.name=tail_batching",
            "scheduler.over=1.25",
            "scheduler.over_samples=1.0",
            "scheduler.prefix_mode=recompute",
        ),
    )
    ring = simulation.assemble(given)
    begun, busy = time.perf_counter(), time.process_time()
    loop.run(
        simulation.tallied(ring), ring.engine, ring.scheduler, ring.rewards, ring.learner, simulation.publish, rounds
    )
    seconds, busy = time.perf_counter() - begun, time.process_time() - busy
    rollouts = sum(one.lengths.size for one in ring.tally.rounds)
    return {
        "rollouts": rollouts,
        "prompts": rounds * PROMPTS,
        "replicas": len(ring.engine.capacity.slots),
        "seconds": seconds,
        "us_per_rollout": 1e6 * busy / rollouts,
        "bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


if __name__ == "__main__":
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(json.dumps(one(int(sys.argv[1]))))
