"""From the command line to the table and the JSON of a simulation."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from jaxrl_post import config
from jaxrl_post.simulate import settings, simulation

ROOT = Path(__file__).resolve().parents[1]
FILE = """
from jaxrl_post.simulate.settings import default
def get_config():
    c = default()
    c.name, c.rounds = "small", 6
    c.workload.prompts, c.workload.prompt_tokens, c.workload.cap = 200, 3, 2048
    c.cluster.replicas, c.cluster.slots, c.cluster.step_s, c.cluster.round_s = 2, 64, 0.01, 0.5
    c.scheduler.prompts, c.scheduler.group_size = 8, 4
    c.published, c.fitted = {"rollout_s": 20.0}, ("rollout_s",)
"""


def small(tmp_path, *lines):
    file = tmp_path / "small.py"
    file.write_text(FILE + "".join(f"    {line}\n" for line in (*lines, "return c")))
    return str(file)


def test_synchronous_rounds_by_hand(tmp_path):
    """A round lasts as long as its longest answer, at a constant cost of a step."""
    given = settings.resolve(config.load(small(tmp_path)))
    ring = simulation.assemble(given)
    from jaxrl_post.ring import loop

    loop.run(simulation.tallied(ring), ring.engine, ring.scheduler, ring.rewards, ring.learner, simulation.publish, 6)
    longest = [int(one.lengths.max()) for one in ring.tally.rounds]
    assert [one.generate_s for one in ring.tally.rounds] == pytest.approx([0.5 + 0.01 * length for length in longest])
    assert ring.engine.clock == sum(longest) and all(one.lengths.size == 32 for one in ring.tally.rounds)


def test_a_long_round_of_two_batches(tmp_path):
    """At weights that stand still the same answers in as many batches, in fewer seconds, the second of two a step stale."""
    over = ("rounds=12", "scheduler.name=tail_batching", "scheduler.over=1.5", "scheduler.prefix_mode=verify")
    one, two = (
        simulation.run(settings.resolve(config.load(small(tmp_path)), (*over, f"scheduler.long_batches={batches}")))
        for batches in (1, 2)
    )
    assert one["mean_length"] == two["mean_length"] and two["rollout_s"] < one["rollout_s"]
    assert (one["period"], two["period"]) == (3.0, 5.0)  # four short rounds, then a long one of two batches
    assert one["staleness"] == 0.0 and two["staleness"] == pytest.approx(0.5 / 5)


def test_report_and_json(tmp_path):
    out = tmp_path / "out.json"
    assert (
        simulation.main(
            [
                f"--config={small(tmp_path)}",
                "--json",
                str(out),
                "--config.scheduler.name=tail_batching",
                "--config.scheduler.over=1.5",
                "--config.scheduler.prefix_mode=recompute",
            ]
        )
        == 0
    )
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    assert row["fitted"] is True and row["error"] == pytest.approx(math.log(row["ours"] / 20.0))
    assert found["rms_log_error"] == pytest.approx(abs(row["error"]))
    sync, ours = found["stages"]["sync"], found["stages"]["small"]
    assert (
        found["speedup_over_sync"] == pytest.approx(sync["step_s"] / ours["step_s"])
        and found["speedup_over_sync"] > 1.1
    )
    assert found["length_bias"] == 0.0 and found["tokens_wasted"] == 0.0 and ours["period"] == 3.0
    assert found["part_shares"] == {"small": 1.0}


def test_the_meter_and_the_trace_of_a_simulation(tmp_path):
    """Synchronous rounds drop nothing; RollPacker's shift is negative. The trace is whole, and its slots add up."""
    out = tmp_path / "trace.json"
    given = settings.resolve(config.load(small(tmp_path)), ("rounds=5",))
    packed = ("rounds=20", "scheduler.name=rollpacker", "scheduler.over=1.25", "scheduler.over_samples=1.25")
    sync, rollpacker = (simulation.run(one) for one in (given, settings.resolve(config.load(small(tmp_path)), packed)))
    assert sync["shift"] == sync["num_dropped"] == sync["num_tokens_wasted"] == 0.0
    assert rollpacker["shift"] < -0.1 and rollpacker["num_dropped"] > 0
    assert simulation.main([f"--config={small(tmp_path)}", "--config.rounds=2", "--trace", str(out)]) == 0
    events = json.loads(out.read_text())
    slots = [event for event in events if event.get("cat", "").startswith("replica")]
    assert len(slots) == 2 * 8 * 4 and sum(event["name"].startswith("round to") for event in events) == 2
    assert all(event["dur"] == pytest.approx(1e4 * event["args"]["tokens"], abs=0.01) for event in slots)


def test_parts_are_added_one_after_the_other_and_their_shares_add_up(tmp_path):
    file = small(
        tmp_path,
        'c.parts = ("tail: scheduler.name=tail_batching scheduler.over=1.5", '
        '"drafts: cluster.draft_tokens=2.0 cluster.draft_width=4 cluster.draft_running=8")',
    )
    found = simulation.report(settings.resolve(config.load(file)))
    assert list(found["stages"]) == ["sync", "tail", "drafts"] and sum(found["part_shares"].values()) == pytest.approx(
        1.0
    )
    assert found["stages"]["drafts"]["step_s"] < found["stages"]["tail"]["step_s"] < found["stages"]["sync"]["step_s"]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--confg=x"], "unknown argument '--confg=x'; nearest is --config=FILE"),
        (["--config=nowhere.py"], "--config='nowhere.py': no such Python file"),
        (
            ["--config=FILE", "--config.workload.capp=5"],
            "unknown name 'workload.capp'; nearest valid name is 'workload.cap'",
        ),
        (
            ["--config=FILE", "--config.scheduler.over=1.5"],
            "(sync waits for all it launches, and a pipeline has no rounds to race in)",
        ),
        (
            ["--config=FILE", "--config.scheduler.lend=0.5"],
            "scheduler.lend=0.5 moves rollouts in the midst of a round, which the ",
        ),
        (["--config=FILE", "--config.parts=['nothing']"], "parts: 'nothing' must be a name, a colon and overrides"),
        (["--config=FILE", "--config.workload.name=trace"], "workload.name='trace' needs workload.path"),
        (
            [
                "--config=FILE",
                "--config.learner.apart=True",
                "--config.cluster.layouts=[2]",
                "--config.cluster.step_s=0.0",
            ],
            "learner.apart=True: weights come in the midst of",
        ),
        (["--config=FILE", "--config.published={'speed': 2.0}", "--config.fitted=[]"], "published names 'speed'"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, capsys, arguments, said):
    given = [argument.replace("FILE", small(tmp_path)) for argument in arguments]
    assert simulation.main(given) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "sim").glob("*.py")), ids=lambda file: file.stem)
def test_shipped_simulations_resolve_and_turn(file, data_dir, monkeypatch):
    monkeypatch.setenv("JAXRL_DATA", str(data_dir))
    given = settings.resolve(config.load(str(file)), ("rounds=2", "scheduler.prompts=4", "scheduler.group_size=2"))
    for stage in simulation.stages(given).values():
        assert simulation.run(stage)["rollout_s"] > 0


def test_staleness_counts_versions_between_sampling_and_training(tmp_path):
    """Two optimizer steps a round: the first trains on what its own version sampled, the second on what the one before did."""
    given = settings.resolve(config.load(small(tmp_path)), ("scheduler.mini_batches=2",))
    assert simulation.run(given)["staleness"] == 0.5


def test_what_a_learner_apart_is_compared_with_is_synchronous(tmp_path):
    given = settings.resolve(config.load(small(tmp_path)), ("learner.apart=True", "learner.token_s=1.0"))
    stages = simulation.stages(given)
    found = {name: simulation.run(stage) for name, stage in stages.items()}
    assert found["sync"]["staleness"] == 0 < found[given.name]["staleness"]


def test_turns_by_micro_batch_save_no_time_and_age_tokens():
    """Decode plus training work is what it was, and weights come the later, the more of the time is the engine's."""
    from jaxrl_post.ring import loop

    took, aged = [], []
    for ratio in (0.0, 0.5, 1.0):
        given = settings.resolve(
            settings.default(),
            (
                "rounds=24",
                "workload.name=lognormal",
                "workload.mean=300.0",
                "workload.tail=1.0",
                "workload.cap=2048",
                "workload.prompts=2000",
                "cluster.replicas=4",
                "cluster.slots=64",
                "cluster.step_s=0.01",
                "scheduler.name=pipeline",
                "scheduler.max_staleness=6",
                "scheduler.prompts=16",
                "scheduler.group_size=8",
                "learner.token_s=0.00002",
                f"scheduler.interleave={ratio}",
            ),
        )
        ring = simulation.assemble(given)
        loop.run(
            simulation.tallied(ring),
            ring.engine,
            ring.scheduler,
            ring.rewards,
            ring.learner,
            simulation.publish,
            given.rounds,
        )
        rounds = ring.tally.rounds[6:]
        took.append(sum(one.step_s for one in rounds) / sum(one.batches for one in rounds))
        aged.append(sum(one.staleness for one in rounds) / len(rounds))
    assert took == pytest.approx([took[0]] * 3, rel=0.1)
    assert aged[0] + 0.5 < aged[1] < aged[2] - 0.5
    with pytest.raises(
        ValueError,
        match="scheduler.interleave=0.5 divides the time of shared devices, and with learner.apart=True none are",
    ):
        settings.resolve(
            settings.default(), ("scheduler.name=pipeline", "learner.apart=True", "scheduler.interleave=0.5")
        )
