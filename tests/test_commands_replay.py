"""A run whose gradients overflow ends by itself, exports nothing, and its skipped batch can be repeated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_post.commands import replay
from jaxrl_post.telemetry import rollout_log

ROOT = Path(__file__).resolve().parents[1]
RUN = (
    "--config=configs/demo.py",
    "--config.steps=6",
    "--config.scheduler.prompts=4",
    "--config.scheduler.group_size=4",
    "--config.eval.prompts=4",
    "--config.eval.every=0",
    "--config.checkpoint.every=1",
    "--config.algorithm.adv_estimator=dr_grpo",
    "--config.alarms.max_skipped=2",
)
GRADER = """
def score(data_source, solution_str, ground_truth, extra_info):
    return 3e38 * (1 if len(solution_str) % 2 else -1)
"""


def ran(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


@pytest.mark.extended
@pytest.mark.slow
def test_overflowing_gradients_end_a_run_and_their_batch_is_repeated(tmp_path):
    (tmp_path / "huge.py").write_text(GRADER)
    run = tmp_path / "run"
    done = ran("jaxrl_post.main", *RUN, f"--config.reward.functions=('{tmp_path}/huge.py:score',)", f"--run-dir={run}")
    assert done.returncode == 1 and "error: step 2: the gradient was not finite in 2 steps in a row" in done.stderr
    assert "step 1 was skipped: the gradient is not finite" in done.stdout
    assert not (run / "policy").exists() and not (run / "summary.json").exists()
    assert (run / "skipped" / "step_000002.npz").read_bytes() == (run / "rollouts" / "step_000002.npz").read_bytes()
    again = ran("jaxrl_post", "replay", str(run), "--batch=2")
    assert again.returncode == 0 and "4 groups, 16 rollouts, at the weights of step 1" in again.stdout
    assert "gradient norm nan" in again.stdout or "gradient norm inf" in again.stdout


def test_what_cannot_be_replayed_is_one_sentence(tmp_path, capsys):
    assert replay.main([str(tmp_path), "--batch=3"]) == 1
    assert "has no config.json" in capsys.readouterr().err
    assert replay.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: replay: say what is repeated: --rollout=ID or --batch=STEP\n"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "skipped").mkdir()
    (tmp_path / "skipped" / "step_000007.npz").write_bytes(b"no archive")
    assert replay.main([str(tmp_path), "--batch=3"]) == 1
    assert "no skipped batch of step 3; it has those of steps [7]" in capsys.readouterr().err
    assert replay.main([str(tmp_path), "--batch=7"]) == 1
    assert "is no rollout log, or is damaged" in capsys.readouterr().err
    rollout_log.RolloutLog(tmp_path / "skipped").write(7, [])
    (tmp_path / "config.json").write_text("[]")
    assert replay.main([str(tmp_path), "--batch=7"]) == 1
    assert "holds a list, not the config of a run" in capsys.readouterr().err
