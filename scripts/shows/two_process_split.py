"""Devices that learn and devices that generate, in two processes: both decide alike, and weights arrive as they left.

Runs configs/demo/pipeline.py for 5 steps on 8 forced devices, of which 4 learn (data 2 x fsdp 2) and 4 generate:
- `hosts`: one process learns and one generates, with 4 devices each.
- `halves`: each of two processes has two devices of either kind, and a fifth device that rests.
- `alone`: one process with all 8 devices.

Between two processes scheduler log, rollouts and deterministic metrics are equal byte for byte. At every publish each
process compares each piece of its engine's weights with what the learner has, bit for bit. Sums over devices of several
processes may be added in another order. Against one process the decisions and tokens of step 1 are equal; what later steps
do is reported.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

import processes
import trained

MINUTES = 8.0
STEPS = 5
FORMS = {"hosts": (2, 4), "halves": (2, 5), "alone": (1, 8)}  # processes, and forced devices of each
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
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Path(folder) / name for name in FORMS}
        for name, (count, devices) in FORMS.items():
            command = [
                "scripts/arrivals.py",
                str(runs[name]),
                "--config=configs/demo/pipeline.py",
                *OVERRIDES,
                f"--run-dir={runs[name]}",
            ]
            processes.run(record.root, command, processes=count, devices=devices)
        for name in ("hosts", "halves"):
            pair = runs[name]
            processes.compare(record, pair / "process_0", pair / "process_1", STEPS, f"{name}.")
            _against_one_process(record, name, pair / "process_0", runs["alone"])
            _staleness(record, name, pair / "process_0")
        for name, place, index, pieces in (
            ("hosts.process_0", runs["hosts"], 0, False),
            ("hosts.process_1", runs["hosts"], 1, True),
            ("halves.process_0", runs["halves"], 0, True),
            ("halves.process_1", runs["halves"], 1, True),
            ("alone", runs["alone"], 0, True),
        ):
            lines = Path(f"{place}.{index}.jsonl").read_text().splitlines()
            _arrivals(record, name, [json.loads(line) for line in lines], pieces)


def _arrivals(record, name: str, lines: list[dict], has_pieces: bool) -> None:
    record.figure(f"{name}_publishes", len(lines), at_least=STEPS)
    found = sum(line["pieces"] for line in lines)
    record.figure(f"{name}_pieces_compared", found, **({"at_least": STEPS} if has_pieces else {"equals": 0}))
    record.figure(f"{name}_pieces_that_differ", sum(line["differing"] for line in lines), equals=0)
    median = statistics.median(line["seconds"] for line in lines[1:])
    record.figure(f"{name}_publish", {"bytes": lines[0]["bytes"], "first_s": lines[0]["seconds"], "median_s": median})


def _against_one_process(record, name: str, pair: Path, alone: Path) -> None:
    decisions = [processes.first_round(run / "scheduler_log.jsonl") for run in (pair, alone)]
    record.figure(f"{name}.step_1_decisions_equal", decisions[0] == decisions[1], equals=True)
    for step in range(1, STEPS + 1):
        record.figure(
            f"{name}.step_{step}_share_of_rollouts_with_equal_tokens",
            processes.equal_tokens(pair, alone, step),
            **({"equals": 1.0} if step == 1 else {}),
        )


def _staleness(record, name: str, run: Path) -> None:
    rows = trained.rows(run)
    stale = [row["off_policy/mean"] for row in rows if "off_policy/mean" in row]
    record.figure(f"{name}.staleness_mean", statistics.mean(stale))
    most = max(row["off_policy/max"] for row in rows if "off_policy/max" in row)
    record.figure(f"{name}.staleness_max", most, at_least=1, at_most=4)
