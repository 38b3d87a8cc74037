"""A simulated judge: its seconds by hand, beside the policy and apart from it."""

from __future__ import annotations

import pytest

from jaxrl_post import config
from jaxrl_post.engine import step_cost
from jaxrl_post.simulate import parts, settings, simulation

FILE = """
from jaxrl_post.simulate.settings import default
def get_config():
    c = default()
    c.name, c.rounds = "judged", 4
    c.workload.prompts, c.workload.prompt_tokens, c.workload.cap = 200, 3, 2048
    c.cluster.replicas, c.cluster.slots, c.cluster.step_s = 2, 64, 0.01
    c.scheduler.prompts, c.scheduler.group_size = 8, 4
    return c
"""
JUDGED = ("judge.place=beside", "judge.reply=100", "judge.question=50")
APART = ("judge.place=apart", "judge.replicas=3", "judge.reply=100", "judge.question=50")


@pytest.fixture
def given(tmp_path):
    file = tmp_path / "judged.py"
    file.write_text(FILE)
    return lambda *overrides: settings.resolve(config.load(str(file), settings.Simulation), overrides)


def ran(one: settings.Simulation) -> simulation.Parts:
    from jaxrl_post.ring import loop

    made = simulation.assemble(one)
    loop.run(
        simulation.tallied(made), made.turns, made.scheduler, made.rewards, made.learner, simulation.publish, one.rounds
    )
    return made


def test_a_judge_changes_no_rollout_and_adds_its_own_seconds(given):
    plain, beside, apart = (ran(given(*more)) for more in ((), JUDGED, APART))
    lengths = [[one.lengths.tolist() for one in made.tally.rounds] for made in (plain, beside, apart)]
    assert lengths[0] == lengths[1] == lengths[2]
    assert plain.engine.seconds == pytest.approx(beside.engine.seconds) == pytest.approx(apart.engine.seconds)
    queue = beside.rewards.queue
    assert beside.tally.now() == pytest.approx(beside.engine.seconds + queue._judge.seconds)
    assert queue._judge.seconds > 0 and not queue._running and not queue._waiting and not queue._replies


def test_replies_and_questions_by_hand(given):
    """Every rollout is asked about once. A question is 50 tokens longer than its rollout, and replies have the given mean."""
    made = ran(given(*JUDGED, "rounds=20"))
    counted, rollouts = (
        made.rewards.queue._judge.metrics(),
        [n for one in made.tally.rounds for n in one.lengths.tolist()],
    )
    assert counted["sim/num_tokens_forced"] == sum(rollouts) + 50 * len(rollouts)
    assert counted["sim/num_tokens_generated"] / len(rollouts) == pytest.approx(100, rel=0.1)


def test_apart_the_policy_waits_for_the_last_replies_only(given):
    """With a judge of its own, a round is longer than the policy's by no more than the longest reply."""
    made = ran(given(*APART))
    waited = made.rewards.queue._waited_s
    law, longest = parts.judge(given(*APART), made.engine)._judge, 8 * 100
    step = step_cost.decode("h800", step_cost.SHAPES["qwen2.5-7b"])
    most = 4 * (longest * float(step(64.0, 64 * 3000.0)) + 32 * 3000 * step.prefill_s)
    assert 0 < waited <= most and law.seconds == 0


def test_evaluation_is_refused_and_a_judge_without_devices_too(given):
    with pytest.raises(ValueError, match="judge.replicas=3 would be ignored"):
        given("judge.place=beside", "judge.replicas=3")
    with pytest.raises(ValueError, match="judge.reply=9.0 would be ignored"):
        given("judge.reply=9")
