"""Alarms on rows that are written by hand: each begins once, lasts as a metric, and survives a resume."""

from __future__ import annotations

import dataclasses
import math

import pytest

from jaxrl_post.config import AlarmConfig, load, resolve
from jaxrl_post.telemetry.alarms import FIRST, Alarms, Diverged, thresholds

SOUND = {
    "frac_reward_zero_std": 0.5,
    "actor/entropy": 1.0,
    "rollout_corr/k3_kl": 0.001,
    "response_length/mean": 100.0,
    "critic/score/mean": 0.5,
    "training/skip_reason": 0.0,
}
FAULTS = {  # alarm -> what a row says then, and a number in its line
    "equal_rewards": ({"frac_reward_zero_std": 1.0}, "100% of the groups"),
    "low_entropy": ({"actor/entropy": 0.009}, "0.009 nats: below 0.01"),
    "high_entropy": ({"actor/entropy": 0.95 * math.log(1000)}, "6.56 nats: above 6.22"),
    "mismatch": ({"rollout_corr/k3_kl": 0.2}, "0.2 nats per token: above 0.1"),
    "length_collapse": ({"response_length/mean": 24.0, "critic/score/mean": 0.4}, "24 tokens, at first 100: below 25"),
    "length_growth": ({"response_length/mean": 401.0}, "401 tokens, at first 100: above 400"),
    "reward_hacking": ({"response_length/mean": 40.0, "critic/score/mean": 0.9}, "from 0.5 to 0.9"),
}


def alarms(**given):
    lines: list[str] = []
    return Alarms(AlarmConfig(**given), 1000, lines.append), lines


def warmed(**given):
    """Returns alarms that have seen the first rows, and their lines."""
    made, lines = alarms(**given)
    for step in range(1, FIRST + 1):
        assert set(made.look(step, SOUND).values()) == {0.0}
    return made, lines


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_rings_one_alarm_once(name):
    made, lines = warmed()
    wrong, words = FAULTS[name]
    for step in (5, 6):
        found = made.look(step, SOUND | wrong)
        assert {key for key, value in found.items() if value} == {f"alarm/{name}"}
    assert len(lines) == 1 and lines[0].startswith("alarm: step 5: ") and words in lines[0]
    assert set(made.look(7, SOUND).values()) == {0.0} and len(lines) == 1
    made.look(8, SOUND | wrong)
    assert len(lines) == 2


def test_a_threshold_of_zero_switches_an_alarm_off():
    off = dict(
        equal_rewards=0.0, min_entropy=0.0, max_entropy=0.0, shrinkage=0.0, growth=0.0, max_mismatch=0.0, hacking=0.0
    )
    made, lines = alarms(**off)
    for step in range(1, 2 * FIRST):
        assert made.look(step, {"frac_reward_zero_std": 1.0, **FAULTS["length_growth"][0]}) == {}
    assert lines == []


def test_metrics_that_are_missing_ring_nothing():
    made, lines = alarms()
    assert made.look(1, {}) == {} and lines == []


def test_a_run_of_skipped_steps_ends():
    made, _ = alarms(max_skipped=3)
    bad, masked = {"training/skip_reason": 2.0}, {"training/skip_reason": 1.0}
    for step, row in enumerate([bad, bad, SOUND, bad, masked, bad, bad], 1):
        made.check(step, row)
    with pytest.raises(Diverged, match=r"step 8: the gradient was not finite in 3 steps in a row, .*max_skipped=3"):
        made.check(8, bad)
    never, _ = alarms(max_skipped=0)
    for step in range(10):
        never.check(step, bad)


def test_a_resumed_run_rings_alike():
    one, lines = warmed()
    wrong = SOUND | FAULTS["length_collapse"][0]
    one.look(5, wrong)
    one.check(5, {"training/skip_reason": 2.0})
    two, more = alarms()
    two.load_state_dict(one.state_dict())
    assert two.look(6, wrong) == one.look(6, wrong) and len(lines) == 1 and more == []
    assert two.state_dict() == one.state_dict()


@pytest.mark.parametrize(
    "file, idle",
    [
        ("configs/demo.py", set()),
        ("configs/demo/dpo.py", {"equal_rewards", "hacking", "shrinkage", "growth"}),
        ("configs/demo/distill.py", {"equal_rewards", "hacking"}),
    ],
)
def test_alarms_on_rewards_and_lengths_are_those_of_runs_that_have_some(file, idle):
    given = resolve(load(file))
    found, wanted = thresholds(given), given.alarms
    assert {
        field.name for field in dataclasses.fields(found) if getattr(found, field.name) != getattr(wanted, field.name)
    } == idle
    assert not any(getattr(found, name) for name in idle)
