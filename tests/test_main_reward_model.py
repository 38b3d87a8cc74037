"""A run that trains a reward model: TRL's metrics, the folder it leaves, and a resumed run with the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from jaxrl_post import main
from jaxrl_post.models import hf
from jaxrl_post.runs import metric_rows

# its parts are in test_trainer_reward_model.py
pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.extended]

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "demo/reward_model.py"
SMALL = ("steps=4", "checkpoint.every=2", "scheduler.prompts=8", "optimizer.warmup_steps=1")


def _run(folder: Path, *more: str) -> list[dict]:
    assert main.main([f"--config={CONFIG}", f"--run-dir={folder}", *(f"--config.{one}" for one in SMALL), *more]) == 0
    return [row for row in metric_rows.read(folder / "metrics.jsonl") if "rewards/margin" in row]


def test_a_run_leaves_a_reward_model_and_a_resumed_one_the_same(tmp_path, capsys):
    whole = _run(tmp_path / "whole")
    assert whole[0]["rewards/margin"] == 0.0 and len(whole) == 4
    assert whole[0]["actor/preference_loss"] == pytest.approx(np.log(2)) and "actor/entropy" not in whole[0]
    assert whole[3]["rewards/margin"] > 0 and whole[3]["actor/preference_loss"] < np.log(2)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_000004")
    shutil.rmtree(tmp_path / "again" / "reward_model")
    again = _run(tmp_path / "again", "--resume")
    for name in ("rewards/margin", "rewards/mean_reward", "actor/grad_norm"):
        assert [row[name] for row in again] == [row[name] for row in whole]
    weights = [tmp_path / name / "reward_model" / "model.safetensors" for name in ("whole", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert np.any(safetensors.numpy.load_file(weights[0])["score.weight"])
    assert hf.read_config(weights[0].parent / "config.json").scalar
    assert main.main([f"--branch={tmp_path / 'whole'}", "--config.model.path=" + str(weights[0].parent), *_POLICY]) == 1
    assert "is a reward model, which writes no tokens" in capsys.readouterr().err


_POLICY = (f"--config={CONFIG.parents[1] / 'demo.py'}",)
