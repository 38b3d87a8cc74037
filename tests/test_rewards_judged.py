"""A judge's queue over a scripted engine: order, slots, equal questions and batches, and its verdicts in a reward pool."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from test_rewards_pool import Log, joined, pool, rollout
from test_rewards_pool import graders as graders

from jaxrl_post.rewards import modelled
from jaxrl_post.rewards.modelled import VERDICT, Judged, JudgeQueue, SleepingJudgeQueue
from jaxrl_post.rewards.question import Question
from jaxrl_post.ring.types import Finish, Prompt, Request, Rollout, RolloutId, Sampling
from jaxrl_post.runs.journal import Journaled


class Engine:
    """Answers each question after as many dispatches as its token says; a reply holds the same token."""

    def __init__(self):
        self.here: dict[RolloutId, tuple[Request, int]] = {}
        self.asked: list[int] = []
        self.most = 0

    def submit(self, requests):
        for request in requests:
            assert request.purpose == "judge" and request.rollout_id not in self.here
            self.here[request.rollout_id] = request, int(request.prompt.tokens[0])
            self.asked.append(int(request.prompt.tokens[0]))
        self.most = max(self.most, len(self.here))

    def park(self, ids):
        for id in ids:
            del self.here[id]

    def step(self):
        self.here = {id: (request, left - 1) for id, (request, left) in self.here.items()}
        done = [request for request, left in self.here.values() if left == 0]
        for request in done:
            del self.here[request.rollout_id]
        return [Rollout.written(one.rollout_id, one.prompt, one.prompt.tokens, Finish.EOS) for one in done]


def question(length: int) -> Request:
    id = RolloutId(0, "judge", 0, f"q{length}", 0)
    return Request(
        rollout_id=id,
        prompt=Prompt(id=id.prompt_id, tokens=[length]),
        seed=id.seed(),
        max_tokens=1,
        sampling=Sampling(),
    )


def test_questions_begin_in_order_in_as_many_slots_as_are_free():
    engine = Engine()
    queue = JudgeQueue(engine, most=4, batch=1)
    for length in (3, 1, 2, 5, 4, 6):
        queue.ask(question(length))
    queue.work(0)
    assert engine.asked == [] and queue.metrics()["perf/judge_dispatches"] == 0
    queue.work(2)
    assert engine.asked == [3, 1]
    queue.work(1)  # one still runs, so that none begins
    assert engine.asked == [3, 1] and set(engine.here) == {question(3).rollout_id}
    queue.work(99)  # at most four at a time
    assert engine.asked == [3, 1, 2, 5, 4] and engine.most == 4
    queue.answer([question(6).rollout_id])
    assert engine.asked[-1] == 6 and not engine.here
    assert [queue.take(question(n).rollout_id).tokens.tolist() for n in (6, 1)] == [[6], [1]]


def test_a_batch_begins_where_it_waits_and_its_slots_are_free():
    engine = Engine()
    queue = JudgeQueue(engine, most=8, batch=2)
    for length, slots, begun in ((4, 9, []), (5, 1, []), (6, 2, [4, 5]), (7, 3, [4, 5]), (8, 4, [4, 5, 6, 7])):
        queue.ask(question(length))
        queue.work(slots)
        assert engine.asked == begun
    queue.answer([question(8).rollout_id])  # whoever waits for one waits for no batch
    assert engine.asked == [4, 5, 6, 7, 8]


def test_equal_questions_are_asked_once_and_withdrawn_by_the_last():
    engine = Engine()
    queue = JudgeQueue(engine, most=4, batch=1)
    for _ in range(3):
        queue.ask(question(2))
    queue.work(4)
    assert engine.asked == [2]
    queue.withdraw(question(2).rollout_id)
    assert len(engine.here) == 1
    queue.answer([question(2).rollout_id])
    assert len(queue.take(question(2).rollout_id)) == len(queue.take(question(2).rollout_id)) == 1
    queue.ask(question(2))  # nobody wants the reply of before
    queue.work(4)
    assert engine.asked == [2, 2]
    queue.withdraw(question(2).rollout_id)
    assert not engine.here


class Weights(list):
    def wake(self):
        self.append("wake")

    def rest(self):
        self.append("rest")


def test_a_sleeping_judge_wakes_for_a_whole_batch_or_where_the_ring_waits():
    engine, weights = Engine(), Weights()
    queue = SleepingJudgeQueue(engine, 2, 3, weights)
    for length in (1, 2):
        queue.ask(question(length))
        queue.work(8)
    assert weights == []
    queue.ask(question(3))
    queue.work(0)
    assert weights == []
    queue.work(1)
    assert weights == ["wake", "rest"] and engine.asked == [1, 2, 3] and engine.most == 2
    queue.answer([question(2).rollout_id])
    assert len(weights) == 2
    queue.ask(question(4))
    queue.answer([question(4).rollout_id])
    assert weights == ["wake", "rest"] * 2 and not engine.here


def test_the_seconds_of_a_sleeping_judge_include_the_way_of_its_weights(monkeypatch):
    now = [0.0]

    class Slow:
        def wake(self):
            now[0] += 5.0

        def rest(self):
            now[0] += 0.5

    class Timed(Engine):
        def step(self):
            now[0] += 2.0
            return super().step()

    monkeypatch.setattr(modelled, "time", SimpleNamespace(monotonic=lambda: now[0]))
    queue = SleepingJudgeQueue(Timed(), 2, 1, Slow())
    queue.ask(question(3))
    queue.work(1)
    assert queue.metrics() == {"perf/judge_dispatches": 3.0, "timing_s/judge": 3 * 2.0 + 5.5}


# ---- in a pool


class Court:
    """What asks about a rollout: a reply says the number of its text, or no verdict. Texts of 9 have no question."""

    def __init__(self):
        self.engine = Engine()
        self.queue = JudgeQueue(self.engine, most=2, batch=1)

    def request(self, one: Rollout):
        return None if one.tokens[0] == 9 else question(int(one.tokens[0]))

    def judged(self, alone: bool, weight: float = 0.5) -> Judged:
        form = Question(text="{answer}", low=0.0, high=7.0)
        return Judged(
            self.queue, self.request, lambda reply: f"so\nVERDICT: {reply.tokens[0]}", form, weight, alone=alone
        )


def _rollouts(*numbers: int, prompt: str = "a") -> list[Rollout]:
    made = [rollout(str(n), place, prompt=prompt) for place, n in enumerate(numbers)]
    return [Rollout.written(one.id, one.prompt, [n], Finish.EOS) for one, n in zip(made, numbers)]


def _unread(tokens, before=(), skip_special=True) -> str:
    """The text of a rollout that only the judge reads."""
    return ""


def test_verdicts_alone_are_journaled_counted_and_not_asked_for_again():
    court, log, rollouts = Court(), Log(), _rollouts(3, 8, 9, 3)
    with pool("", decode=_unread, timeout_s=5.0, journal=log, beside=court.judged(True)) as rewards:
        found, counts = joined(rewards, *rollouts), rewards.metrics()
    assert found.scored.tolist() == [True, False, False, True]  # 8 is out of range, 9 has no question
    np.testing.assert_array_equal(found.rewards[[0, 3]], [1.5, 1.5])
    np.testing.assert_array_equal(found.components[VERDICT][[0, 3]], [3, 3])
    assert court.engine.asked == [3, 8]  # equal questions once
    assert (counts["judge/questions"], counts["judge/reply_tokens"], counts["reward/unscored"]) == (4, 3, 2)
    assert [record["verdict"] for record in log] == [3.0, None, None, 3.0] and log[0]["reply"] == "so\nVERDICT: 3"
    again, silent = Log(), Court()
    with pool(
        "", decode=_unread, timeout_s=5.0, journal=again, journaled=Journaled(log), beside=silent.judged(True)
    ) as rewards:
        found = joined(rewards, *rollouts)
        assert rewards.metrics() == {**counts, "timing_s/reward_wait": pytest.approx(0, abs=5)}
    assert silent.engine.asked == [] and again == log and found.scored.tolist() == [True, False, False, True]


@pytest.mark.parametrize("finish, scored", [(Finish.LENGTH, False), (Finish.STOP, True)])
def test_a_reply_that_is_cut_off_has_no_verdict(finish, scored):
    """VERDICT: 0.25 cut after 0.2 would be another verdict."""
    judged, (one,) = Court().judged(True), _rollouts(3)
    judged.queue._engine.step = lambda: [Rollout.written(question(3).rollout_id, one.prompt, [3], finish)]
    record = {"scored": False, "reward": 0.0, "components": {}, "counts": {}}
    (found,) = judged.added([one], [record])
    assert (found["scored"], found["verdict"]) == (scored, 3.0 if scored else None) and found["reply"].endswith("3")
    assert found["counts"].get("unscored", 0) == (not scored)


def test_a_verdict_is_added_to_the_sum_of_functions_where_they_score(graders):
    court, log = Court(), Log()
    texts = {1: "0.5", 2: "no number", 3: "2"}
    how = dict(journal=log, beside=court.judged(False), decode=lambda tokens, **how: texts[int(tokens[0])])
    with pool(graders, "number", **how) as rewards:
        found = joined(rewards, *_rollouts(1, 2, 3))
    assert found.scored.tolist() == [True, False, True]
    np.testing.assert_allclose(found.rewards[[0, 2]], [0.5 + 0.5, 2 + 1.5])
    np.testing.assert_array_equal(found.components["acc"][[0, 2]], [0.5, 2])
    assert "verdict" not in log[1]
    queue = court.queue  # the question about the rollout without a score was taken back
    assert not court.engine.here and not queue._wanted and not queue._waiting and not queue._replies


def test_a_rollout_that_is_started_again_is_asked_about_again():
    court = Court()
    judged = court.judged(True)
    first, second = _rollouts(2), _rollouts(5)
    judged.start(first[0])
    court.queue.work(1)
    judged.start(second[0])  # the same id with other tokens, as after a resume
    record = {"scored": False, "reward": 0.0, "components": {}, "counts": {}}
    assert [one["verdict"] for one in judged.added(second, [record])] == [5.0]
    assert court.engine.asked == [2, 5] and not court.queue._wanted
