"""Each numerical fault of a real run is said within one step, and nothing bad is exported.

Plants one fault at a time in short runs of the demo:

- weights that become infinite, and gradients that overflow;
- equal rewards, and entropy at both ends;
- lengths that collapse and grow, a reward that rises while lengths collapse, and an engine that is far from the learner.

A run without a fault is the control: it must stay quiet. The batch of an overflow is repeated by the replay command.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import trained

MINUTES = 7.0
RUN = (
    "--config=configs/demo.py",
    "--config.steps=8",
    "--config.scheduler.prompts=16",
    "--config.scheduler.group_size=8",
    "--config.eval.prompts=8",
    "--config.eval.every=0",
    "--config.checkpoint.every=2",
)
GRADERS = """
def equal(data_source, solution_str, ground_truth, extra_info):
    return 0.5

def huge(data_source, solution_str, ground_truth, extra_info):
    return 3e38 * (1 if len(solution_str) % 2 else -1)

def brief(data_source, solution_str, ground_truth, extra_info):
    return -float(extra_info["rollout"]["tokens"])

def lengthy(data_source, solution_str, ground_truth, extra_info):
    return float(extra_info["rollout"]["tokens"])
"""


class Fault(NamedTuple):
    """A fault: overrides of the run, the alarm or the words that must come, and whether the run must end by itself.

    `within`: steps after which it must have been said.
    """

    overrides: tuple[str, ...]
    says: str
    ends: bool = False
    within: int = 1


FAULTS = {
    "infinite weights": Fault(("optimizer.lr=1e300",), r"error: step 1: .*weights are not finite", ends=True),
    "overflowing gradients": Fault(
        ("reward.functions=('{graders}:huge',)", "algorithm.adv_estimator=dr_grpo", "alarms.max_skipped=2"),
        r"error: step 2: the gradient was not finite in 2 steps",
        ends=True,
        within=2,
    ),
    "equal rewards": Fault(("reward.functions=('{graders}:equal',)",), r"alarm: step 1: 100% of the groups"),
    "low entropy": Fault(("sampling.temperature=0.001",), r"alarm: step 1: the entropy is \S+ nats: below"),
    "high entropy": Fault(("sampling.temperature=50.0",), r"alarm: step 1: the entropy is \S+ nats: above"),
    # the first four steps set the scale of lengths, so that the fifth is the first that can be wrong
    "reward hacking": Fault(
        ("reward.functions=('{graders}:brief',)", "optimizer.lr=0.02", "alarms.hacking=0.9"),
        r"alarm: step 5: the mean reward rose",
    ),
    "collapse of lengths": Fault(
        ("reward.functions=('{graders}:brief',)", "optimizer.lr=0.02", "alarms.shrinkage=0.9"),
        r"alarm: step 5: the mean length is \S+ tokens, at first \S+: below",
    ),
    "growth of lengths": Fault(
        ("reward.functions=('{graders}:lengthy',)", "optimizer.lr=0.02", "alarms.growth=1.2"),
        r"alarm: step 5: the mean length is \S+ tokens, at first \S+: above",
    ),
    "mismatch": Fault(
        ("engine.dtype=bfloat16", "alarms.max_mismatch=1e-7"), r"alarm: step 1: engine and learner differ"
    ),
}


def show(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        graders = Path(folder, "graders.py")
        graders.write_text(GRADERS)
        code, text, run = _ran(record, Path(folder, "sound"), ())
        record.figure("sound.exit_code", code, equals=0)
        record.figure("sound.alarms", re.findall(r"^alarm: .*", text, re.M), equals=[])
        record.figure("sound.exported", (run / "policy").is_dir(), equals=True)
        for name, fault in FAULTS.items():
            overrides = [override.replace("{graders}", str(graders)) for override in fault.overrides]
            key = name.replace(" ", "_")
            code, text, run = _ran(record, Path(folder, key), overrides)
            said = [line for line in text.splitlines() if re.match(fault.says, line)]
            print(f"{name}: exit code {code}; {said[:1] or text[-500:]}", flush=True)
            record.figure(f"{key}.said", len(said), at_least=1)
            record.figure(f"{key}.exit_code", code, equals=1 if fault.ends else 0)
            steps = len(trained.rows(run, "actor/grad_norm"))
            record.figure(f"{key}.steps", steps, **({"at_most": fault.within} if fault.ends else {}))
            record.figure(f"{key}.exported", (run / "policy").is_dir(), equals=not fault.ends)
        _replayed(record, Path(folder, "overflowing_gradients"))


def _ran(record, run: Path, overrides) -> tuple[int, str, Path]:
    """Runs the demo with overrides. Returns its exit code, its output and its folder."""
    command = [
        sys.executable,
        "-m",
        "jaxrl_post.main",
        *RUN,
        *(f"--config.{one}" for one in overrides),
        f"--run-dir={run}",
    ]
    done = subprocess.run(command, cwd=record.root, capture_output=True, text=True, timeout=900)
    return done.returncode, f"{done.stdout}\n{done.stderr}", run


def _replayed(record, run: Path) -> None:
    """The replay command finds the same norm of the gradient, and the batch is that of the skipped step."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_post", "replay", str(run), "--batch=1"],
        cwd=record.root,
        capture_output=True,
        text=True,
        timeout=600,
    )
    record.figure("replay.exit_code", done.returncode, equals=0)
    found = re.search(r"gradient norm (\S+);", done.stdout)
    record.figure("replay.gradient_is_finite", bool(found) and math.isfinite(float(found[1])), equals=False)
    record.figure("replay.found", bool(found), equals=True)
    rollouts = (run / "rollouts" / "step_000001.npz").read_bytes()
    record.figure(
        "replay.batch_is_the_steps", (run / "skipped" / "step_000001.npz").read_bytes() == rollouts, equals=True
    )
