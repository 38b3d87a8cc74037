"""Two processes decide, sample and measure the same, byte for byte, without messages about decisions.

Runs the demo config for 3 steps on a mesh of data x fsdp = 2 x 2 devices. One run has 2 processes of 2
forced devices, the other 1 process with all four devices. Between the two processes scheduler log, rollouts and deterministic metrics are equal byte for byte.
Against the single process the decisions and tokens of step 1 are equal. Its gradient agrees per leaf to the order of
additions. What later steps do is reported.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

MINUTES = 5.0
STEPS = 3
OVERRIDES = [
    f"--config.steps={STEPS}",
    "--config.mesh.data=2",
    "--config.mesh.fsdp=2",
    "--config.engine.slots=32",
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
                "scripts/first_gradient.py",
                f"{place}.npz",
                "--config=configs/demo.py",
                *OVERRIDES,
                f"--run-dir={place}",
            ]
            processes.run(record.root, command, processes=count, devices=4 // count)
        processes.compare(record, pair / "process_0", pair / "process_1", STEPS)
        decisions = [processes.first_round(run / "scheduler_log.jsonl") for run in (pair / "process_0", alone)]
        record.figure("step_1_decisions_equal", decisions[0] == decisions[1], equals=True)
        record.figure("step_1_num_decisions", len(decisions[0]), at_least=3)
        for step in range(1, STEPS + 1):
            record.figure(
                f"step_{step}_share_of_rollouts_with_equal_tokens",
                processes.equal_tokens(pair / "process_0", alone, step),
                **({"equals": 1.0} if step == 1 else {}),
            )
        worst = _worst_leaf(f"{pair}.npz", f"{alone}.npz")
        record.figure("step_1_gradient_worst_leaf_relative_difference", worst, at_most=5e-6)


def _worst_leaf(one: str, two: str) -> float:
    """Returns the largest |a - b| / |b| over leaves, in 2-norm."""
    import numpy as np

    a, b = np.load(one), np.load(two)
    assert sorted(a) == sorted(b)
    return max(float(np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name])) for name in a)
