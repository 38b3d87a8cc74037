"""Runs that a judge on the engine's devices scores: whenever a question runs, its verdict is the same."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import served

from jaxrl_post import main
from jaxrl_post.data.tokenizer import load
from jaxrl_post.launch.parts.judges import JudgeQueue
from jaxrl_post.rewards.judge import Judge
from jaxrl_post.rewards.modelled import SleepingJudgeQueue
from jaxrl_post.runs import metric_rows
from jaxrl_post.runs.run_logs import groups_of, opened

# its parts are in test_rewards_judged.py, test_engine_host_judging.py and test_launch_judges.py
pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.extended]

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SMALL = (
    *("steps=3", "checkpoint.every=1", "checkpoint.keep_last=9", "scheduler.prompts=4", "scheduler.group_size=4"),
    *("eval.prompts=4", "eval.samples=1", "eval.every=0", "engine.slots=8", "engine.row_sizes=(64,)"),
    "engine.steps_per_dispatch=4",
)
STILL = "optimizer.lr=0"
PIPELINED = (
    *("scheduler.name=pipeline", "scheduler.max_staleness=2", "scheduler.ahead=2", "scheduler.max_unscored=6"),
)


def run(folder: Path, *more: str, code: int = 0, resumes: bool = False) -> Path:
    given = [f"--config={CONFIGS / 'demo/judge.py'}", f"--run-dir={folder}", *(["--resume"] if resumes else [])]
    assert main.main([*given, *(f"--config.{one}" for one in (*SMALL, *more))]) == code
    return folder


def records(folder: Path, name: str = "rewards.jsonl") -> dict[tuple, dict]:
    """The records by the rollout's id and tokens."""
    lines = map(json.loads, (folder / name).read_text().splitlines())
    return {(one["prompt_id"], one["epoch"], one["sample"], one["attempt"], one["digest"]): one for one in lines}


def verdicts(folder: Path) -> dict[tuple, float | None]:
    return {id: one["verdict"] for id, one in records(folder).items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("judged") / "whole")


def test_verdicts_are_those_of_an_endpoint(whole):
    """Every rollout of the run and of its evaluations, asked again over HTTP from the same judge."""
    policy = served.policy(CONFIGS / "judge_policy", engine__max_length=128, sampling__max_tokens=16)
    words, logs, asked = load(CONFIGS / "demo_policy"), opened(whole), 0
    how = dict(model="judge", question="{task} {answer}", high=2.0, attempts=1, deadline_s=60.0, key_variable="")
    with served.served(policy, token="", name="judge") as one, ThreadPoolExecutor(8) as askers:
        judge = Judge(f"http://127.0.0.1:{one.port}/v1", **how)

        def verdict(group, rollout) -> float:
            task = {"task": words.decode(group.prompt.tokens)}
            return judge("", words.decode(rollout.tokens, before=group.prompt.tokens), group.prompt.answer, task)

        for purpose, file in (("train", "rewards.jsonl"), ("eval", "eval_rewards.jsonl")):
            known = records(whole, file)
            pairs = [(group, rollout) for _, group in groups_of(logs, purpose) for rollout in group.rollouts]
            for (group, rollout), said in zip(pairs, askers.map(verdict, *zip(*pairs)), strict=True):
                mine = [r for id, r in known.items() if id[0] == group.prompt.id and id[2] == rollout.id.sample]
                assert said in {r["verdict"] for r in mine}
                asked += 1
    assert asked > 50


def test_sync_pipelined_and_asleep_give_each_rollout_one_verdict(tmp_path, monkeypatch):
    """With a learning rate of 0 all have the same rollouts."""
    begun, woken = [], []
    work, answer_all = JudgeQueue.work, SleepingJudgeQueue._answer_all
    monkeypatch.setattr(
        JudgeQueue, "work", lambda self, slots: (work(self, slots), begun.append(len(self._running)))[0]
    )
    monkeypatch.setattr(SleepingJudgeQueue, "_answer_all", lambda self: (answer_all(self), woken.append(1))[0])
    sync = verdicts(run(tmp_path / "sync", STILL))
    assert max(begun) > 0, "no question ran beside the policy"
    begun.clear()
    pipelined = verdicts(run(tmp_path / "pipelined", STILL, *PIPELINED))
    assert max(begun) > 0 and not woken
    asleep = verdicts(run(tmp_path / "asleep", STILL, "judge.asleep=true"))
    assert woken and asleep == sync
    common = sync.keys() & pipelined.keys()
    assert len(common) >= 32 and {id: sync[id] for id in common} == {id: pipelined[id] for id in common}
    assert len(set(sync.values())) > 1, "one verdict for all: the comparison would show nothing"


def test_a_resumed_run_reads_verdicts_and_ends_with_the_same_bits(tmp_path, whole, monkeypatch, capsys):
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    for step in (2, 3):
        shutil.rmtree(again / "checkpoints" / f"step_{step:06d}")
    shutil.rmtree(again / "policy")
    questions, ask = [], JudgeQueue.ask
    monkeypatch.setattr(JudgeQueue, "ask", lambda self, request: (questions.append(request), ask(self, request))[1])
    run(again, resumes=True)
    assert "are used again, not asked for again" in capsys.readouterr().out
    assert questions == []
    for file in ("policy/model.safetensors", "rewards.jsonl", "eval_rewards.jsonl"):
        assert (whole / file).read_bytes() == (again / file).read_bytes(), file
    rows = [
        [row for row in metric_rows.read(one / "metrics.jsonl") if "judge/questions" in row] for one in (whole, again)
    ]
    assert [row["judge/questions"] for row in rows[0]] == [row["judge/questions"] for row in rows[1]] == [16.0] * 3


def test_the_plan_counts_the_judge_and_what_cannot_be_is_refused(tmp_path, capsys):
    given = [f"--config={CONFIGS / 'demo/judge.py'}", *(f"--config.{one}" for one in SMALL), "--dry-run"]
    assert main.main([*given, "--config.judge.asleep=true"]) == 0
    told = capsys.readouterr().out
    assert "Memory per device while a judge is awake" in told and "weights (judge, asleep)" in told
    run(tmp_path / "none", f"judge.model={tmp_path}", code=1)
    assert "no such folder with a config.json" in capsys.readouterr().err
    run(tmp_path / "short", "judge.max_length=12", "judge.max_tokens=5", code=1)
    assert "judge.question: without a rollout, prompt" in capsys.readouterr().err
    assert not (tmp_path / "short").exists()
