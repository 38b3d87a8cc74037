"""The command with tail batching. A run that is killed and resumed with groups put off ends as the one that was not.

At learning rate 0 it trains on the rollouts of synchronous rounds.
"""

import json

import numpy as np
import pytest
from resumed_runs import here, kill, resume, same_run, saved, whole_run  # noqa: F401  (a fixture, and its kin)
from test_main import go

from jaxrl_post.runs import metric_rows, rollout_log
from jaxrl_post.runs.checkpoint import store

pytestmark = pytest.mark.usefixtures("quick_compilation")

FLAGS = (
    "--config.scheduler.name=tail_batching",
    "--config.scheduler.over=1.5",
    "--config.checkpoint.every=1",
    "--config.steps=6",
)
PARTIAL = (*FLAGS, "--config.scheduler.prefix_mode=recompute", "--config.scheduler.stream=2")
VERIFIED = (*FLAGS, "--config.scheduler.long_batches=2")


def steps_of(folder):
    return [row for row in metric_rows.read(folder / "metrics.jsonl") if "actor/grad_norm" in row]


@pytest.mark.parametrize("flags", [pytest.param(PARTIAL, marks=pytest.mark.extended), VERIFIED])
def test_killed_with_groups_put_off(here, flags, capsys):  # noqa: F811
    name = "partial" if flags is PARTIAL else "verified"
    whole, target = whole_run(here, f"{name}_whole", *flags), here / f"{name}_killed"
    rows = steps_of(whole)
    partial = flags is PARTIAL
    assert [row["sched/num_long_rounds"] for row in rows] == ([0, 0, 1, 0, 0, 1] if partial else [0, 0, 0, 0, 1, 0])
    assert [row["sched/num_groups_queued"] for row in rows] == ([2, 4, 0, 2, 4, 0] if partial else [2, 4, 6, 8, 0, 0])
    assert [row["sched/num_groups_trained"] for row in rows] == ([4] * 6 if partial else [4] * 4 + [8, 0])
    stale = [row["off_policy/max"] for row in rows]
    assert stale[:2] == [0, 0] and stale[2] > 0 if partial else stale == [0] * 5 + [1]
    kill(here, target, store, "manifest", 3, flags=flags)  # in the save at step 3, where nobody waits any more
    assert "step_000002" in saved(target)  # and four groups wait here
    kill(here, target, rollout_log.RolloutLog, "_index", 4, flags=flags)  # at step 5 or so
    assert resume(here, target, *flags) == 0
    assert capsys.readouterr().out.count("goes on after step") >= 2
    same_run(whole, target)


def test_a_state_with_groups_put_off_holds_their_tokens(here):  # noqa: F811
    """What the checkpoint of step 2 says of the four groups that wait, against the decision log."""
    folder = whole_run(here, "partial_whole", *PARTIAL)
    events = [json.loads(line) for line in (folder / "scheduler_log.jsonl").read_text().splitlines()]
    admitted = [told for event in events if event["event"] == "admit" for told in event["requests"] if len(told) > 2]
    parked = {tuple(id): size for event in events if event["event"] == "parked" for id, size in event["ids"]}
    assert admitted and all(mode == "recompute" and size == parked[tuple(id)] for id, _, mode, size in admitted)


@pytest.mark.extended
def test_at_learning_rate_zero_it_trains_on_what_synchronous_rounds_train_on(here):  # noqa: F811
    found = {}
    for name, more in (("sync", ()), ("tail", VERIFIED), ("partial", PARTIAL)):
        folder = here / f"frozen_{name}"
        flags = (
            "--config.optimizer.lr=0.0",
            "--config.steps=6",
            "--config.eval=default",
            "--config.eval.prompts=0",
            "--config.checkpoint.every=0",
        )
        assert go(here, f"--run-dir={folder}", *more, *flags) == 0
        groups = [group for file in sorted((folder / "rollouts").glob("*.npz")) for group in rollout_log.read(file)]
        assert len(groups) == 24
        found[name] = sorted(
            (group.prompt.id, r.id.seed().tobytes(), r.tokens.tobytes(), float(score))
            for group in groups
            for r, score in zip(group.rollouts, group.rewards, strict=True)
        )
        mean = np.mean([len(r.tokens) for group in groups for r in group.rollouts])
        assert mean == pytest.approx(np.mean([row["response_length/mean"] for row in steps_of(folder)]))
    assert found["tail"] == found["sync"] == found["partial"]
