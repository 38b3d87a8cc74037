"""Priced runs: timelines by hand, the committed tables, and the time to a reward."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import cost_tables
import intervals
import priced
import priced_runs
import reward_runs

PRICE = cost_tables.Price(
    step_s={1: 1.0, 3: 2.0},
    launch_s=0.5,
    dispatch_s=10.0,
    slot_s=1.0,
    train_token_s=0.25,
    train_step_s=4.0,
    publish_s=100.0,
)


def test_a_shared_step_by_hand():
    """Two slots. A dispatch of 3 steps of 2 rows takes 10 + 2 + 3 * (1.5 + 0.5), and 8 tokens train in 4 + 2."""
    (found,) = priced.seconds([priced.Step(dispatches=((3, 2),), begins=1, tokens=8)], PRICE, 2)
    assert found == priced.Seconds(all=18 + 6 + 100, engine=18, learner=6, waited=6)


def test_a_learner_of_its_own_by_hand():
    """The learner begins behind the first dispatch, at 13.5, and ends at 13.5 + 24; the engine is done at 27.

    Then it publishes. In the second step the learner begins at once and is done before the engine."""
    steps = [
        priced.Step(dispatches=((1, 1), (1, 1)), begins=1, tokens=80),
        priced.Step(dispatches=((1, 1),), begins=0, tokens=4),
    ]
    one, two = priced.seconds(steps, PRICE, 2)
    assert one == priced.Seconds(all=13.5 + 24 + 100, engine=27, learner=24, waited=10.5)
    assert two == priced.Seconds(all=13.5 + 100, engine=13.5, learner=5, waited=0)


def write(folder, **files):
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def logs(**changes) -> dict:
    """Two optimizer steps: the first is handed over at clock 4 and published at 9, the second at 9 at once."""
    dispatches = [{"purpose": "train", "clock": c, "steps": n, "rows": 8} for c, n in ((0, 4), (4, 5), (9, 2))]
    rows = [
        {"actor/lr": 1.0, "step": 1, "rows/dispatches": 2.0, "rows/steps": 9.0, "rollout/num_tokens": 30.0},
        {"actor/lr": 1.0, "step": 2, "rows/dispatches": 1.0, "rows/steps": 2.0, "rollout/num_tokens": 7.0},
        {"eval/accuracy": 1.0, "step": 2},
    ]
    takes = [(4, False), (9, True), (11, True)]
    log = [{"event": "admit", "clock": 0}, *({"event": "take", "clock": c, "commit": done} for c, done in takes)]
    return {"dispatches": dispatches, "metrics": rows, "scheduler_log": log} | changes


def test_steps_are_read_from_the_logs(tmp_path):
    write(tmp_path, **logs())
    assert priced.steps_of(tmp_path) == [
        priced.Step(dispatches=((4, 8), (5, 8)), begins=1, tokens=30),
        priced.Step(dispatches=((2, 8),), begins=1, tokens=7),
    ]


def test_the_second_of_two_steps_with_one_publish_has_no_dispatches(tmp_path):
    """Two batches were ready at clock 11. The engine made no step between them."""
    told = logs()
    last = {"actor/lr": 1.0, "step": 3, "rows/dispatches": 0.0, "rows/steps": 0.0, "rollout/num_tokens": 5.0}
    log = [*told["scheduler_log"], {"event": "take", "clock": 11, "commit": True}]
    write(tmp_path, **told | {"metrics": [*told["metrics"], last], "scheduler_log": log})
    _, second, third = priced.steps_of(tmp_path)
    assert second == priced.Step(dispatches=((2, 8),), begins=1, tokens=7)
    assert third == priced.Step(dispatches=(), begins=0, tokens=5)


@pytest.mark.parametrize(
    "broken, says",
    [
        ({"scheduler_log": []}, "2 rows of metrics, 0 steps begun"),
        ({"dispatches": [{"purpose": "eval", "clock": 0, "steps": 4, "rows": 8}] * 3}, "drafts and evaluation"),
        ({"dispatches": [{"purpose": "train", "clock": 0, "steps": 4, "rows": 8}] * 3}, "counts 9.0 engine steps"),
    ],
)
def test_logs_that_do_not_belong_together_are_refused(tmp_path, broken, says):
    write(tmp_path, **logs(**broken))
    with pytest.raises(ValueError, match=says):
        priced.steps_of(tmp_path)


@pytest.mark.parametrize("name", cost_tables.SLICES)
def test_the_committed_tables_are_those_that_are_written(name):
    committed = json.loads((cost_tables.FOLDER / f"{name}.json").read_text())
    assert committed == json.loads(json.dumps(cost_tables.made(name)))
    assert all(placed["memory"]["word"] in ("fits", "tight") for placed in committed["placements"].values())


def test_the_table_of_8xh100_by_hand():
    """15.23 GB of weights at 0.85 * 3.35 TB/s; 6 FLOPs a weight and token on 8 or 4 GPUs at 0.45 * 989 TFLOP/s."""
    shared, split = (cost_tables.read("8xh100", placement) for placement in ("shared", "split"))
    assert shared.step_s[64] == pytest.approx(15.231e9 / (0.85 * 3.35e12), rel=1e-3)
    assert shared.train_token_s == pytest.approx(6 * 7.6156e9 / (8 * 0.45 * 9.89e14), rel=1e-3)
    assert split.train_token_s == pytest.approx(2 * shared.train_token_s, rel=1e-5)


def test_a_scaled_price_changes_what_it_says():
    dear = PRICE.scaled(launch=2.0, train=0.5)
    assert (dear.launch_s, dear.dispatch_s, dear.slot_s) == (1.0, 20.0, 2.0)
    assert (dear.train_token_s, dear.train_step_s, dear.publish_s) == (0.125, 2.0, 100.0)
    figures = dear.table()["figures"]
    assert figures == {"step_s": {"1": 2.0, "3": 3.0}, "train_token_s": 0.125, "train_step_s": 2.0}


def test_runs_on_shared_devices_are_made_once_for_all_prices():
    """A run on split devices decides by its price. One on shared devices does not, and is priced by another table."""
    shared, split = (
        reward_runs.Setting(overrides=(), rollouts=2, slots=2, placement=placement, filtered=False)
        for placement in ("shared", "split")
    )
    workload = reward_runs.Workload(config="c", overrides=(), trained=4, window=2, arms={"pipeline": [shared, split]})
    runs = reward_runs.Runs("made", workload, Made())
    keys = [runs.of("pipeline", at, "8xh100", price, 7) for at in (0, 1) for price in reward_runs.PRICES]
    assert len(set(keys)) == 1 + len(reward_runs.PRICES)
    runs.make(keys)
    told = json.loads(runs.found(keys[-1])["job"])
    assert told["overrides"] == ["steps=3", "seed=7"]
    dear = cost_tables.read("8xh100", "split").scaled(train=2.0)
    assert told["table"] == dear.table() and json.loads(runs.found(keys[0])["job"])["table"] is None


class Made:
    """Jobs that return themselves."""

    def all(self, jobs):
        return [{"job": json.dumps(job)} for _, job in jobs]


def test_the_first_step_whose_window_reaches_the_target():
    rewards, even = [0.0, 1.0, 0.0, 1.0, 1.0], [4] * 5
    assert reward_runs.reached(rewards, even, 1.0, 8) == 5
    assert reward_runs.reached(rewards, even, 0.5, 8) == 2
    assert reward_runs.reached(rewards, even, 0.9, 12) is None


def test_a_window_weighs_steps_by_their_scored_rollouts():
    """The last 6 rollouts are those of two steps: (4 * 0.5 + 2 * 1) / 6."""
    assert reward_runs.last([0.0, 0.5, 1.0], [8, 4, 2], 6) == pytest.approx(4 / 6)
    assert reward_runs.last([0.0, 0.5], [8, 4], 13) is None
    assert reward_runs.reached([0.0, 0.5, 1.0], [8, 4, 2], 0.6, 6) == 3


def test_a_step_has_the_scores_of_groups_that_a_filter_leaves_out(tmp_path):
    """Groups of two, one a batch. The first step leaves two out. The row of the second counts the third's group too."""
    (tmp_path / "config.json").write_text(json.dumps({"scheduler": {"group_size": 2, "prompts": 1}}))
    write(tmp_path, rewards=[{"reward": float(one)} for one in (1, 0, 1, 1, 1, 1, 0, 1, 0, 0, 1, 0, 7)])
    trained = {"sched/num_groups_trained": 1.0, "sched/num_groups_filtered": 0.0}
    first, second = trained | {"sched/num_groups_filtered": 2.0}, trained | {"sched/num_groups_refused": 1.0}
    both, none = (second | {"sched/num_groups_trained": many} for many in (2.0, 0.0))
    none = none | {"sched/num_groups_refused": 0.0}
    assert priced_runs.scores(tmp_path, [first, second]) == ([5 / 6, 1 / 4], [6, 4])
    assert priced_runs.scores(tmp_path, [first, both, none]) == ([5 / 6, 1 / 4, 1 / 2], [6, 4, 2])
    with pytest.raises(ValueError, match="2 steps of 1 groups trained on 1"):
        priced_runs.scores(tmp_path, [first, none])
    with pytest.raises(ValueError, match="13 rollouts were scored, its steps have 14"):
        priced_runs.scores(tmp_path, [first, second, second])


def test_a_ratio_of_medians():
    ratio, low, high = intervals.ratio_of_medians([4.0, 6.0, 5.0], [2.0, 2.0, 2.0])
    assert (ratio, low, high) == (2.5, 2.0, 3.0)


@pytest.mark.extended
def test_a_job_runs_in_a_process_of_its_own():
    """A pipelined run with a learner of its own."""
    worker = priced_runs.Worker()
    try:
        table = cost_tables.read("8xh100", "split").table()
        answer = worker.run({"config": "configs/demo/long_tail.py", "overrides": SMALL, "table": table})
    finally:
        worker.close()
    assert len(answer["rewards"]) == len(answer["steps"]) == 2 and answer["scored"] == [8, 8] and answer["oldest"] <= 1
    assert all(tokens > 0 and dispatches for dispatches, _, tokens in answer["steps"][:1])


SMALL = [
    "steps=2",
    "scheduler.prompts=4",
    "scheduler.name=pipeline",
    "scheduler.over=1.0",
    "scheduler.lane=0.0",
    "scheduler.max_staleness=1",
    "mesh.engine=1",
    "engine.slots=8",
    "engine.row_sizes=(64,)",
    "engine.refill_slots=1",
    "batch.rows=1",
]
