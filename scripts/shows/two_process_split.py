"""Devices that learn and devices that generate, in two processes: both decide alike, and weights arrive as they left.

Runs configs/demo_pipeline.py for 5 steps on 8 forced devices, of which 4 learn (data 2 x fsdp 2) and 4 generate. One
run has 2 processes of 4 devices, each with two of either kind. The other has 1 process with all 8 devices. Between the
two processes scheduler log, rollouts and deterministic metrics are equal byte for byte. At every publish each process
compares each piece of its engine's weights with what the learner has, bit for bit. The single process copies weights in
another way. Against it the decisions and tokens of step 1 are equal; what later steps do is reported.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

MINUTES = 5.0
STEPS = 5
OVERRIDES = [
    f"--config.steps={STEPS}",
    "--config.mesh.data=2",
    "--config.mesh.fsdp=2",
    "--config.mesh.engine=4",
    "--config.engine.slots=16",
    "--config.engine.row_sizes=(16,32)",
    "--config.eval.prompts=16",
    "--config.eval.every=0",
]


def show(record) -> None:
    sys.path[:0] = [str(record.root), str(record.root / "scripts")]
    import processes

    with tempfile.TemporaryDirectory() as folder:
        pair, alone = Path(folder) / "pair", Path(folder) / "alone"
        for place, count in ((pair, 2), (alone, 1)):
            command = [
                "scripts/arrivals.py",
                str(place),
                "--config=configs/demo_pipeline.py",
                *OVERRIDES,
                f"--run-dir={place}",
            ]
            processes.run(record.root, command, processes=count, devices=8 // count)
        processes.compare(record, pair / "process_0", pair / "process_1", STEPS)
        arrivals = {
            name: _read(f"{place}.{index}.jsonl")
            for name, place, index in (("process_0", pair, 0), ("process_1", pair, 1), ("one_process", alone, 0))
        }
        for name, lines in arrivals.items():
            record.figure(f"{name}_publishes", len(lines), at_least=STEPS)
            record.figure(f"{name}_pieces_compared", sum(line["pieces"] for line in lines), at_least=STEPS)
            record.figure(f"{name}_pieces_that_differ", sum(line["differing"] for line in lines), equals=0)
            record.figure(
                f"{name}_publish",
                {
                    "bytes": lines[0]["bytes"],
                    "first_s": lines[0]["seconds"],
                    "median_s": statistics.median(line["seconds"] for line in lines[1:]),
                },
            )
        decisions = [processes.first_round(run / "scheduler_log.jsonl") for run in (pair / "process_0", alone)]
        record.figure("step_1_decisions_equal", decisions[0] == decisions[1], equals=True)
        for step in range(1, STEPS + 1):
            record.figure(
                f"step_{step}_share_of_rollouts_with_equal_tokens",
                processes.equal_tokens(pair / "process_0", alone, step),
                **({"equals": 1.0} if step == 1 else {}),
            )
        rows = [json.loads(line) for line in (pair / "process_0" / "metrics.jsonl").read_text().splitlines()]
        stale = [row["off_policy/mean"] for row in rows if "off_policy/mean" in row]
        record.figure("staleness_mean", statistics.mean(stale))
        record.figure(
            "staleness_max",
            max(row["off_policy/max"] for row in rows if "off_policy/max" in row),
            at_least=1,
            at_most=4,
        )


def _read(file: str) -> list[dict]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]
