"""PPO on the demo's task learns in twenty steps what GRPO learns there: to work a sum out instead of guessing it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxrl_post import main
from jaxrl_post.runs import metric_rows

pytestmark = pytest.mark.shown("variants")  # two runs to a reward

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SHORT = ("--config.steps=20", "--config.eval.every=0", "--config.eval.prompts=64", "--config.checkpoint.every=0")


def told(name: str, folder: Path) -> tuple[dict, list]:
    run = folder / Path(name).name
    assert main.main([f"--config={CONFIGS / name}.py", f"--run-dir={run}", *SHORT]) == 0
    rows = [row for row in metric_rows.read(run / "metrics.jsonl") if "actor/grad_norm" in row]
    return json.loads((run / "summary.json").read_text())["eval"], rows


def test_ppo_on_the_demo_gains_what_grpo_does(tmp_path):
    """Both train on the same prompts from the same policy. PPO's first four steps train the critic alone."""
    ppo, rows = told("demo/ppo", tmp_path)
    grpo, _ = told("demo", tmp_path)
    gains = [found["after"]["mean_at_4"] - found["before"]["mean_at_4"] for found in (ppo, grpo)]
    assert ppo["before"] == grpo["before"]
    assert gains[0] > 0.1 and gains[0] > 0.8 * gains[1]
    explained = [row["critic/vf_explained_var"] for row in rows]
    assert explained[0] == pytest.approx(0, abs=1e-3) and max(explained[4:]) > 0.05
