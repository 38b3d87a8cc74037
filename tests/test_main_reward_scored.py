"""A run that a reward model scores: its scores are journaled, and a resumed run ends with the same bits."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxrl_post import main
from jaxrl_post.models import hf
from jaxrl_post.runs import metric_rows

# its parts are in test_trainer_reward_scorer.py and test_rewards_modelled.py
pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.extended]

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SMALL = (
    "steps=4",
    "checkpoint.every=2",
    "scheduler.prompts=4",
    "scheduler.group_size=4",
    "eval.prompts=4",
    "eval.samples=1",
    "eval.every=0",
)


@pytest.fixture
def judge(tmp_path) -> Path:
    """The demo's decoder with a head that is not 0."""
    policy, params = hf.load(CONFIGS / "demo_policy")
    head = np.random.default_rng(1).standard_normal((policy.embed, 1)).astype(np.float32)
    params = {name: leaf for name, leaf in params.items() if name != "head"} | {"score": head}
    files = [file for file in (CONFIGS / "demo_policy").iterdir() if "token" in file.name]
    hf.save(tmp_path / "judge", dataclasses.replace(policy, scalar=True), params, tokenizer_files=files, eos_ids=(0,))
    return tmp_path / "judge"


def _run(folder: Path, judge: Path, *more: str, code: int = 0) -> list[dict]:
    given = [
        f"--config={CONFIGS / 'demo/from_preferences.py'}",
        f"--run-dir={folder}",
        f"--config.reward.model={judge}",
    ]
    assert main.main([*given, *(f"--config.{one}" for one in SMALL), *more]) == code
    return [row for row in metric_rows.read(folder / "metrics.jsonl") if "actor/grad_norm" in row] if code == 0 else []


def test_a_resumed_run_has_the_same_scores_and_ends_with_the_same_bits(tmp_path, judge, capsys):
    whole = _run(tmp_path / "whole", judge)
    assert "weights (reward model, float32)" in capsys.readouterr().out
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_000004")
    shutil.rmtree(tmp_path / "again" / "policy")
    assert [row["critic/score/mean"] for row in _run(tmp_path / "again", judge, "--resume")] == [
        row["critic/score/mean"] for row in whole
    ]
    for file in ("policy/model.safetensors", "rewards.jsonl", "eval_rewards.jsonl"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file
    records = [json.loads(line) for line in (tmp_path / "whole" / "rewards.jsonl").read_text().splitlines()]
    assert len(records) == 64 and len({record["model"] for record in records}) > 32
    assert all(record["reward"] == 0.5 * record["model"] for record in records)


def test_another_model_is_refused_at_a_resume_and_a_policy_at_the_start(tmp_path, judge, capsys):
    _run(tmp_path / "run", judge, "--config.steps=2")
    shutil.copytree(judge, tmp_path / "other")
    policy, params = hf.load(judge)
    shutil.rmtree(judge)
    files = [file for file in (tmp_path / "other").iterdir() if "token" in file.name]
    hf.save(judge, policy, params | {"score": params["score"] + 1}, tokenizer_files=files, eos_ids=(0,))
    capsys.readouterr()
    _run(tmp_path / "run", judge, "--resume", "--config.steps=4", code=1)
    assert "reward.model" in capsys.readouterr().err
    _run(tmp_path / "new", CONFIGS / "demo_policy", code=1)
    assert "is a policy: a reward model's architecture is" in capsys.readouterr().err
