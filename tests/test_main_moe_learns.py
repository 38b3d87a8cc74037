"""A policy with experts learns in a few steps to work a sum out, by routes that the learner repeats: the demo in a small form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxrl_post import main
from jaxrl_post.runs import metric_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "demo" / "moe.py"
SMALL = ("steps=10", "scheduler.prompts=24", "eval.prompts=64", "eval.samples=2", "eval.every=0", "checkpoint.every=0")


def test_the_demo_with_experts_learns(tmp_path):
    """Greedy decoding turns from guesses to worked sums first, long before the mean of samples has risen as far."""
    flags = (f"--config={CONFIG}", f"--run-dir={tmp_path / 'run'}", *(f"--config.{one}" for one in SMALL))
    assert main.main(list(flags)) == 0
    rows = [row for row in metric_rows.read(tmp_path / "run" / "metrics.jsonl") if "training/router_mismatch" in row]
    assert len(rows) == 10 and all(row["training/recorded_routes"] == 1 for row in rows)
    assert all(row["training/router_mismatch"] == 0 for row in rows)
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["eval"]
    assert found["before"]["greedy"] < 0.1 and found["after"]["greedy"] > 0.3
    assert found["after"]["mean_at_2"] > found["before"]["mean_at_2"] + 0.05
