"""A run of conversations: it learns from whole ones, and resumes in the middle of one to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import jaxrl_post
from jaxrl_post import main
from jaxrl_post.rewards.environments.conversations import TurnScores
from jaxrl_post.ring.types import Finish
from jaxrl_post.runs import metric_rows, rollout_log

# test_engine_host_turns.py and test_rewards_environments.py have the parts in the first tier
pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.extended]

ROOT = Path(__file__).resolve().parents[1]
FLAGS = (
    f"--config={ROOT / 'configs' / 'demo/calculator.py'}",
    "--config.steps=3",
    "--config.checkpoint.every=1",
    "--config.checkpoint.keep_last=4",
    "--config.scheduler.name=pipeline",
    "--config.scheduler.max_staleness=2",
    "--config.scheduler.ahead=8",
    "--config.scheduler.max_unscored=12",
    "--config.scheduler.prompts=4",
    "--config.scheduler.group_size=4",
    "--config.engine.slots=8",
    "--config.engine.row_sizes=(16,)",
    "--config.batch.rows=4",
    "--config.eval.prompts=2",
    "--config.eval.samples=2",
    "--config.eval.show=0",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environments") / "whole"
    assert main.main([*FLAGS, f"--run-dir={folder}"]) == 0
    return folder


def test_its_policy_has_no_reward_functions(whole):
    """Those of the config's defaults would score something else than the run did."""
    with pytest.raises(ValueError, match="the policy is of no run whose rewards could be used"):
        jaxrl_post.evaluate(str(whole), [{"prompt": "1+1=", "answer": "2"}])


def test_rollouts_are_whole_conversations(whole):
    groups = [group for file in sorted((whole / "rollouts").glob("*.npz")) for group in rollout_log.read(file)]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == 48 and all(group.scored.all() for group in groups)
    several = [rollout for rollout in rollouts if not rollout.sampled.all()]
    assert len(several) >= 8
    for rollout in several:
        assert rollout.sampled[0] and rollout.sampled[-1] and rollout.finish in (Finish.EOS, Finish.LENGTH)
        assert not rollout.logprobs[~rollout.sampled].any() and (rollout.logprobs[rollout.sampled] < 0).all()
    for group in groups:
        turns = [1 + int(np.sum(np.diff(r.sampled.astype(int)) == -1)) for r in group.rollouts]
        assert group.components["turns"].tolist() == turns
        assert np.isin(group.rewards, (0.0, 1.0)).all()


def test_turns_are_journaled_and_counted(whole):
    journal = [json.loads(line) for line in (whole / "rewards.jsonl").read_text().splitlines()]
    rows = metric_rows.read(whole / "metrics.jsonl")
    assert sum(row.get("environment/turns", 0) for row in rows) >= 48
    tools = [record for record in journal if record["messages"]]
    assert tools and all(record["messages"][0]["role"] == "tool" and not record["done"] for record in tools)
    assert {record["reward"] for record in journal if record["done"]} <= {0.0, 1.0}


class Killed(BaseException):
    """Not an Exception: nothing of the run may catch it."""


def test_a_run_that_is_killed_resumes_to_the_bit(whole, tmp_path, monkeypatch):
    """It dies where the ring asks for the scores of the ninth group of training; evaluation has asked for four before."""
    real, calls = TurnScores.join, []

    def dying(self, group):
        calls.append(group)
        if len(calls) == 13:
            raise Killed
        return real(self, group)

    monkeypatch.setattr(TurnScores, "join", dying)
    with pytest.raises(Killed):
        main.main([*FLAGS, f"--run-dir={tmp_path / 'again'}"])
    monkeypatch.undo()
    assert main.main([*FLAGS, "--resume", f"--run-dir={tmp_path / 'again'}"]) == 0
    files = ["rewards.jsonl", "eval_rewards.jsonl", "policy/model.safetensors", "scheduler_log.jsonl"]
    files += [file.relative_to(whole).as_posix() for file in (whole / "rollouts").glob("*")]
    assert [name for name in files if (whole / name).read_bytes() != (tmp_path / "again" / name).read_bytes()] == []
    rows = [
        [metric_rows.deterministic(row) for row in metric_rows.read(run / "metrics.jsonl")]
        for run in (whole, tmp_path / "again")
    ]
    assert rows[0] == rows[1]
