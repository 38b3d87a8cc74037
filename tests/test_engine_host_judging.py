"""An engine that shares its devices with a judge: free slots decide when the judge works, and no bit of either changes."""

from __future__ import annotations

import dataclasses

import engine_lab as lab
import pytest

from jaxrl_post.engine.host.turns import Judging
from jaxrl_post.engine.row_engine import HostWeights
from jaxrl_post.rewards.modelled import JudgeQueue, SleepingJudgeQueue
from jaxrl_post.ring.types import Request, RolloutId

ASKED = lab.requests(24, longest_prompt=20)
PLAIN = dict(slots=8, row_sizes=(64,))


def questions(requests: list[Request]) -> list[Request]:
    """The same requests as questions to a judge: prompts, seeds and laws are kept."""
    return [dataclasses.replace(one, rollout_id=RolloutId(0, "judge", 0, str(n), 0)) for n, one in enumerate(requests)]


QUESTIONS = questions(lab.requests(20, longest_prompt=30, temperatures=(1.0, 0.0))[:12])


@pytest.fixture(scope="module")
def policy():
    return lab.engine(lab.weights(1), **PLAIN)


@pytest.fixture(scope="module")
def judge():
    return lab.engine(lab.weights(2), **PLAIN)


def replies(queue: JudgeQueue) -> dict:
    """Every reply, once all questions are answered."""
    queue.answer([one.rollout_id for one in QUESTIONS])
    return {one.rollout_id: queue.take(one.rollout_id) for one in QUESTIONS}


def together(policy, queue: JudgeQueue) -> tuple[dict, dict, list[int]]:
    """Runs a policy and a judge, of which all questions are asked at the start. Returns rollouts, replies and free slots at
    each dispatch of the judge."""
    policy.reset()
    seen, work = [], queue.work
    engine = Judging(policy, queue)
    queue.work = lambda slots: (seen.append((slots, len(queue._running))), work(slots))
    for one in QUESTIONS:
        queue.ask(one)
    found = lab.run(engine, ASKED)
    queue.work = work
    return found, replies(queue), seen


def test_neither_changes_a_bit_of_the_other(policy, judge):
    policy.reset(), judge.reset()
    alone = lab.run(policy, ASKED)
    judge.reset()
    apart = JudgeQueue(judge, 8, 1)
    for one in QUESTIONS:
        apart.ask(one)
    said = replies(apart)
    clock = policy.clock
    judge.reset()
    queue = JudgeQueue(judge, 8, 1)
    found, heard, seen = together(policy, queue)
    assert lab.same_bits(alone, found) and lab.same_bits(said, heard) and policy.clock == clock
    slots = [slots for slots, _ in seen]
    assert slots[0] == 0 and max(slots) > 2, "the queue of the policy comes first, then its slots are free"
    assert judge.clock == 0, "questions are no training: their steps are on a clock of their own"
    assert "judge/rows/steps" in judge.metrics() and "rows/steps" in policy.metrics()
    assert sum(len(one) for one in heard.values()) > 40


def test_a_question_takes_a_free_slot(policy, judge):
    judge.reset()
    running = []
    queue = JudgeQueue(judge, 8, 1)
    begin = queue._begin
    queue._begin = lambda slots: (begin(slots), running.append((slots, len(queue._running))))
    together(policy, queue)
    assert running and all(count <= slots for slots, count in running if slots < 8 and count)


def test_a_judge_that_sleeps_says_the_same(policy, judge):
    judge.reset()
    awake = JudgeQueue(judge, 8, 1)
    _, said, _ = together(policy, awake)
    judge.reset()
    weights = HostWeights(judge)
    assert judge.device.params is None and judge.device.state is None
    queue = SleepingJudgeQueue(judge, 8, 5, weights)
    _, heard, _ = together(policy, queue)
    assert lab.same_bits(said, heard) and judge.device.params is None
    again = SleepingJudgeQueue(judge, 8, 50, weights)
    for one in QUESTIONS:
        again.ask(one)
    assert lab.same_bits(said, replies(again))
    weights.wake()


def test_purposes_of_one_engine_take_turns(policy):
    """Evaluation first, then questions, then training; each on a clock of its own, and with its own bits."""
    policy.reset()
    alone = lab.run(policy, ASKED[:6]) | {}
    policy.reset()
    policy.submit([*ASKED[:6], *QUESTIONS[:4]])
    order, found = [], {}
    while policy.pending:
        for rollout in policy.step():
            order.append(rollout.id.purpose)
            found[rollout.id] = rollout
    assert order[:4] == ["judge"] * 4 and policy.clock > 0
    assert lab.same_bits(alone, {id: one for id, one in found.items() if id.purpose == "train"})
