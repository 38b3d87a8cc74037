"""A run on preferences: the metrics of TRL, and a resumed run that has the bits of one that was never stopped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jaxrl_post import main
from jaxrl_post.runs import metric_rows

# its parts are in test_trainer_preferences.py
pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.extended]

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "demo/dpo.py"
SMALL = (
    "steps=4",
    "checkpoint.every=2",
    "scheduler.prompts=8",
    "optimizer.warmup_steps=1",
    "eval.prompts=8",
    "eval.samples=1",
    "eval.every=0",
)


def _run(folder: Path, *more: str) -> list[dict]:
    assert main.main([f"--config={CONFIG}", f"--run-dir={folder}", *(f"--config.{one}" for one in SMALL), *more]) == 0
    return [row for row in metric_rows.read(folder / "metrics.jsonl") if "rewards/margins" in row]


def test_a_resumed_run_has_the_same_reference_and_ends_with_the_same_bits(tmp_path):
    whole = _run(tmp_path / "whole")
    assert whole[0]["rewards/margins"] == 0.0 and len(whole) == 4
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_000004")
    shutil.rmtree(tmp_path / "again" / "policy")
    again = _run(tmp_path / "again", "--resume")
    for name in ("rewards/chosen", "rewards/rejected", "logps/chosen", "actor/grad_norm"):
        assert [row[name] for row in again] == [row[name] for row in whole]
    weights = [tmp_path / name / "policy" / "model.safetensors" for name in ("whole", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
