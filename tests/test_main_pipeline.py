"""The command without rounds, which generates and trains at once.

A run that is killed in mid-generation and resumed ends as the undisturbed run. So it does with a gate, and with every
rule for running rollouts. At learning rate 0 it trains on the rollouts of synchronous rounds.
"""

import json

import jax
import pytest
from resumed_runs import here, kill, resume, same_run, saved, whole_run  # noqa: F401  (a fixture, and its kin)
from test_main import go
from test_main_tail_batching import steps_of

from jaxrl_post.parallel import weight_sync
from jaxrl_post.runs import rollout_log
from jaxrl_post.runs.checkpoint import store

pytestmark = pytest.mark.usefixtures("quick_compilation")

FLAGS = (
    "--config.scheduler.name=pipeline",
    "--config.scheduler.max_staleness=3",
    "--config.scheduler.ahead=2",
    "--config.checkpoint.every=1",
    "--config.checkpoint.keep_last=3",
    "--config.steps=7",
    "--config.engine.steps_per_dispatch=2",
    "--config.engine.refill_slots=1",
    "--config.scheduler.prompts=2",
    "--config.scheduler.group_size=2",
    "--config.sampling.max_tokens=24",
)
KEPT = (*FLAGS, "--config.scheduler.max_unscored=4", "--config.algorithm.min_ess=0.9999", "--config.optimizer.lr=0.05")
TURNS = (*FLAGS, "--config.scheduler.interleave=1.0", "--config.batch.rows=1")
AUTO = (*FLAGS, "--config.engine.carry_over=auto", "--config.engine.carry_share=0.3")


@pytest.mark.parametrize(
    "name, flags",
    [
        pytest.param("kept", KEPT, marks=pytest.mark.extended),
        pytest.param("turns", TURNS, marks=pytest.mark.shown("variants")),
        pytest.param("auto", AUTO, marks=pytest.mark.shown("variants")),
    ],
)
def test_killed_with_answers_on_their_way(here, name, flags, capsys):  # noqa: F811
    whole, target = whole_run(here, f"piped_{name}_whole", *flags), here / f"piped_{name}_killed"
    rows = steps_of(whole)
    assert sum(row["sched/num_groups_trained"] for row in rows) == 14 and len(rows) == 7
    assert 0 < max(row["off_policy/max"] for row in rows) <= 3
    assert sum(row["sched/recomputed_older_versions"] for row in rows if "sched/recomputed_older_versions" in row) > 0
    if flags is KEPT:
        assert 0 < sum(row["training/gated_updates"] for row in rows) < 7
    if flags is TURNS:
        lines = map(json.loads, (whole / "scheduler_log.jsonl").read_text().splitlines())
        assert any(line["event"] == "take" and line["groups"] and not line["fresh"] for line in lines), (
            "no step was handed over in pieces"
        )
    kill(here, target, store, "manifest", 3, flags=flags)  # in a save
    assert saved(target)
    kill(here, target, rollout_log.RolloutLog, "_index", 3, flags=flags)
    assert resume(here, target, *flags) == 0
    assert capsys.readouterr().out.count("goes on after step") >= 2
    same_run(whole, target)


def test_a_swap_that_fails_in_its_midst_says_restart_and_is_resumed(here, monkeypatch, capsys):  # noqa: F811
    whole, torn = whole_run(here, "piped_kept_whole", *KEPT), here / "piped_torn"
    calls, sound = [], weight_sync.WeightLayout._replaced

    def fails(self, *given):
        calls.append(1)
        if len(calls) == 4:
            raise jax.errors.JaxRuntimeError("INTERNAL: planted")
        return sound(self, *given)

    monkeypatch.setattr(weight_sync.WeightLayout, "_replaced", fails)
    assert resume(here, torn, *KEPT) == 42
    assert "the swap to new weights failed after its checks" in capsys.readouterr().err
    monkeypatch.undo()
    assert resume(here, torn, *KEPT) == 0
    same_run(whole, torn)


def test_at_learning_rate_zero_it_trains_on_what_synchronous_rounds_train_on(here):  # noqa: F811
    found = {}
    for name, more in (("sync", FLAGS[-3:]), ("pipeline", FLAGS)):
        folder = here / f"frozen_{name}"
        flags = (
            "--config.optimizer.lr=0.0",
            "--config.steps=7",
            "--config.eval=default",
            "--config.eval.prompts=0",
            "--config.checkpoint.every=0",
        )
        assert go(here, f"--run-dir={folder}", *more, *flags) == 0
        groups = [group for file in sorted((folder / "rollouts").glob("*.npz")) for group in rollout_log.read(file)]
        assert len(groups) == 14
        found[name] = [
            (group.prompt.id, r.id.seed().tobytes(), r.tokens.tobytes(), float(score))
            for group in groups
            for r, score in zip(group.rollouts, group.rewards, strict=True)
        ]
    assert sorted(found["pipeline"]) == sorted(found["sync"])
    assert max(row["off_policy/max"] for row in steps_of(here / "frozen_pipeline")) >= 2
