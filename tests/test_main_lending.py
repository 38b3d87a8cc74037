"""The command with devices lent to its learner while a round drains: no answer changes, killed and resumed it ends alike, and what
cannot be lent is one sentence."""

import json
import sys
from pathlib import Path

import pytest
from resumed_runs import here, kill, resume, same_run  # noqa: F401  (a fixture, and what it is for)
from test_main import go
from test_main_split import WHERE, done
from test_main_tail_batching import steps_of

from jaxrl_post.runs import metric_rows, rollout_log
from jaxrl_post.runs.checkpoint import store

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = Path(__file__).parents[1]
COSTS = '{"figures": {"step_s": {"32": 0.002}, "train_token_s": 0.00013}}'
FLAGS = (
    "--config.scheduler.stream=1",
    "--config.scheduler.lend=0.2",
    "--config.steps=5",
    "--config.checkpoint.every=1",
    "--config.checkpoint.keep_last=5",
    "--config.sampling.max_tokens=24",
    "--config.engine.steps_per_dispatch=2",
    "--config.engine.row_sizes=(32,)",
    "--config.optimizer.lr=0.001",
    "--config.scheduler.prompts=8",
    "--config.scheduler.group_size=2",
)
LENDS = (*FLAGS, "--config.mesh.fsdp=2", "--config.mesh.engine=4", "--config.batch.rows=2")
RUNS = {
    "split": (*LENDS, "--config.engine.cost_table={here}/cost.json"),  # weights come in the midst of the next round
    "shared": (*FLAGS, "--config.mesh.data=4"),
    "sharded": (*FLAGS, "--config.mesh.data=2", "--config.mesh.fsdp=2"),
}


def rollouts(folder):
    groups = [group for file in sorted((folder / "rollouts").glob("*.npz")) for group in rollout_log.read(file)]
    return {r.id: (r.tokens.tobytes(), r.logprobs.tobytes()) for group in groups for r in group.rollouts}


def layouts(folder):
    lines = map(json.loads, (folder / "scheduler_log.jsonl").read_text().splitlines())
    return [line["layout"] for line in lines if line["event"] == "layout"]


def published(folder):
    """The layout at each publish."""
    lines, layout, out = map(json.loads, (folder / "scheduler_log.jsonl").read_text().splitlines()), [4, 1], []
    for line in lines:
        layout = line["layout"] if line["event"] == "layout" else layout
        out += [layout] if line.get("publish") else []
    return out


@pytest.fixture(scope="module", params=["split", pytest.param("shared", marks=pytest.mark.extended)])
def whole(here, request):  # noqa: F811
    """A run and its flags."""
    (here / "cost.json").write_text(COSTS)
    folder, flags = here / f"lending_{request.param}", [flag.format(here=here) for flag in RUNS[request.param]]
    assert resume(here, folder, *flags) == 0
    return folder, flags


def test_devices_come_and_go_and_train(whole):
    folder, flags = whole
    rows, told = steps_of(folder), layouts(folder)
    assert len(told) >= 4 and told == [[2, 1], [4, 1]] * (len(told) // 2)
    assert sum(row["training/lent_micro_batches"] for row in rows) >= 4
    assert sum(row["sched/num_lendings"] for row in rows) == len(told) // 2
    assert sum(row["engine/num_relayouts"] for row in rows) == len(told)
    assert sum(row["sched/lent_steps"] for row in rows) > 0
    overlaps = "--config.mesh.engine=4" in flags
    assert max(row["off_policy/max"] for row in rows) == overlaps
    assert ([2, 1] in published(folder)) is overlaps  # a step that ended while the next round had lent devices


@pytest.mark.extended
def test_killed_while_devices_are_lent(here, whole, capsys):  # noqa: F811
    """Where weights come in the midst of a round a checkpoint lies within a loan: the run that goes on there borrows again."""
    one, flags = whole
    target, at = here / f"{one.name}_killed", published(one)
    step = at.index([2, 1]) + 1 if [2, 1] in at else 2
    kill(here, target, store, "manifest", step + 1, flags=flags)  # in the midst of the next save
    kill(here, target, rollout_log.RolloutLog, "_index", 3, flags=flags)
    assert f"goes on after step {step}" in capsys.readouterr().out
    assert resume(here, target, *flags) == 0
    same_run(one, target)


@pytest.mark.extended
@pytest.mark.parametrize("where", WHERE)
def test_when_deferred_calls_are_made_changes_nothing(here, whole, where, monkeypatch):  # noqa: F811
    """A micro-batch goes to lent devices if they were there when its group was handed over, not when it was packed."""
    one, flags = whole
    other = here / f"{one.name}_chores_{where.replace(' ', '_')}"
    done(where, monkeypatch)
    assert resume(here, other, *flags) == 0
    same_run(one, other)


@pytest.mark.parametrize(
    "name",
    [pytest.param("split", marks=pytest.mark.extended), pytest.param("sharded", marks=pytest.mark.shown("variants"))],
)
def test_at_learning_rate_zero_every_answer_is_that_of_a_run_which_lends_nothing(here, name):  # noqa: F811
    """Also those that moved to another replica: tokens and log-probs, bit for bit, since its programs are the same."""
    found = {}
    (here / "cost.json").write_text(COSTS)
    for lend in ("0.2", "0.0"):
        folder = here / f"frozen_{name}_{lend}"
        assert (
            go(
                here,
                f"--run-dir={folder}",
                *[flag.format(here=here) for flag in RUNS[name]],
                f"--config.scheduler.lend={lend}",
                "--config.optimizer.lr=0.0",
                "--config.eval=default",
                "--config.eval.prompts=0",
                "--config.checkpoint=default",
                "--config.checkpoint.every=0",
            )
            == 0
        )
        found[lend] = rollouts(folder)
    assert sum(row["engine/num_moved_rollouts"] for row in steps_of(here / f"frozen_{name}_0.2")) > 10
    assert found["0.2"] == found["0.0"] and len(found["0.0"]) == 80


@pytest.mark.shown("variants")  # test_main.py starts two processes too
def test_two_processes_lend_half_of_their_devices_each(here):  # noqa: F811
    """They decide, sample and measure alike, and at learning rate 0 every answer is that of two processes which lend nothing."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import processes

    folders = {lend: here / f"two_{lend}" for lend in ("0.2", "0.0")}
    for lend, folder in folders.items():
        flags = [
            *RUNS["shared"],
            f"--config.scheduler.lend={lend}",
            "--config.optimizer.lr=0.0",
            "--config.eval=default",
            "--config.eval.prompts=0",
        ]
        processes.run(
            ROOT,
            ["-m", "jaxrl_post.main", f"--config={here / 'toy.py'}", f"--run-dir={folder}", *flags],
            processes=2,
            devices=2,
            timeout_s=240,
        )
    one, two = (folders["0.2"] / f"process_{index}" for index in range(2))
    assert (one / "scheduler_log.jsonl").read_bytes() == (two / "scheduler_log.jsonl").read_bytes()
    rows = [
        [metric_rows.deterministic(row) for row in metric_rows.read(folder / "metrics.jsonl")] for folder in (one, two)
    ]
    assert rows[0] == rows[1] and sum(row.get("training/lent_micro_batches", 0) for row in rows[0]) >= 2
    assert rollouts(one) == rollouts(two) == rollouts(folders["0.0"] / "process_0") and len(rollouts(one)) == 80


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (
            ["--config.mesh.engine=1"],
            "scheduler.lend=0.2 lends half of the engine's replicas, and it has one; the nearest valid scheduler.lend is 0",
        ),
        (
            ["--config.mesh.engine=0", "--config.mesh.data=2", "--config.batch.rows=4", "--config.engine.layouts=[2]"],
            "lends replicas "
            "within a round, and engine.layouts=(2,) are changed between two: leave one of them empty or 0",
        ),
        (
            ["--config.scheduler.name=pipeline"],
            "lends devices while a round drains, and scheduler.name='pipeline' has no rounds; the "
            "nearest valid scheduler.lend is 0",
        ),
        (["--config.scheduler.lend=1.0"], "of all of them none is left to wait for: it must be below 1; 0.4 is usual"),
        (
            [
                "--config.engine.name=demonstrations",
                "--config.algorithm.loss_mode=sft",
                "--config.algorithm.adv_estimator=ones",
            ],
            "lends devices that generate, and engine.name='demonstrations' does not; the nearest valid scheduler.lend is 0",
        ),
        (
            ["--config.scheduler.stream=0"],
            "scheduler.stream=0 gives it none before the round is over; the nearest valid scheduler.stream is 1",
        ),
        (
            ["--config.scheduler.placement=divided"],
            "scheduler.placement='divided' keeps its own account; the nearest valid scheduler.placement is "
            "'least_loaded'",
        ),
        (
            ["--config.mesh.engine=6", "--config.batch.rows=4"],
            "lends 3 shards for micro-batches of batch.rows=4, which must be a "
            "multiple of it; the nearest valid batch.rows is 6",
        ),
    ],
)
def test_mistakes_are_one_sentence(here, capsys, flags, sentence):  # noqa: F811
    assert go(here, f"--run-dir={here / 'never'}", *LENDS, *flags) == 1
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1 and not (here / "never").exists()
