"""Generation beside training against timings by hand and closed forms; the closed forms against sums by hand."""

from __future__ import annotations

import numpy as np
import pytest
import sim_arms as arms
from models import throughput
from models.pipelinerl import Stream

from jaxrl_post.simulate import length_distributions, workloads
from jaxrl_post.simulate.engine import SimEngine
from jaxrl_post.simulate.pace import LockStep
from jaxrl_post.simulate.texts import SimText, SimTexts


class Constant:
    """All answers have 4 tokens."""

    cap, frozen = 4, True

    def path(self, rollout_id, prompt, spans):
        return SimText(4, (0,), (0,))


def stream(answers, *, slots, group, batch, train, capacity=None, replicas=1):
    engine = SimEngine(answers, replicas=replicas, slots=slots, pace=LockStep(arms.FLAT))
    return Stream(
        engine,
        workloads.SimPrompts(500, tokens=1),
        group=group,
        batch=batch,
        train=train,
        capacity=capacity,
        max_tokens=answers.cap,
    )


def test_equal_answers_by_hand():
    """4 slots of 4 tokens give 4 samples every 4 steps. A learner that takes 3 is through before the next ones come: each
    batch is a step behind where it began, each of its tokens too, but the last of four, which the new version sampled."""
    found = stream(Constant(), slots=4, group=2, batch=4, train=lambda tokens: 3.0).run(warm=3, batches=20)
    assert (
        found.tokens_per_unit == pytest.approx(4.0)
        and found.generated_per_unit == 4.0
        and found.mean_length == 4.0
        and found.dropped == 0.0
    )
    assert found.staleness == 1.0 and found.largest_staleness == 1


def test_a_slow_learner_sets_the_pace_and_the_queue_drops_its_oldest():
    """It takes 6 steps a batch of 4; of 6 samples that come meanwhile 2 are dropped."""
    found = stream(Constant(), slots=4, group=1, batch=4, train=lambda tokens: 6.0, capacity=4).run(warm=10, batches=60)
    assert found.tokens_per_unit == pytest.approx(16 / 6, rel=0.02) and found.generated_per_unit == 4.0
    assert found.dropped == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("queue, ratio", [(1, 0.7), (1, 1.2), (2, 1.3)])
def test_events_agree_with_the_closed_staleness(queue, ratio):
    sigma = length_distributions.spread(1.4, 4)
    law = length_distributions.LogNormal(np.log(40.0) - sigma**2 / 2, sigma)
    found = stream(
        SimTexts(lambda prompt: law, cap=1600),
        slots=32,
        group=4,
        batch=32,
        capacity=32 * queue,
        train=lambda tokens: ratio * 40.0,
    ).run(warm=15, batches=60)
    closed = throughput.staleness(slots=32, batch=32, queue=queue, ratio=ratio, tail=1.4)
    assert found.staleness == pytest.approx(closed, abs=0.15)


def test_a_queue_must_hold_a_batch():
    with pytest.raises(
        ValueError, match="a queue of 3 samples never holds a batch of 4; the nearest valid capacity is 4"
    ):
        stream(Constant(), slots=4, group=1, batch=4, train=lambda tokens: 1.0, capacity=3)


def test_throughput_by_hand():
    """Two steps: 8 and 4 sequences on 2 chips, a step of h costs 10 + h: 12 tokens in 14 + 12 flashes."""
    rates = throughput.conventional(np.array([8.0, 4.0]), chips=2, step=lambda h: 10 + h, train=3.0)
    assert rates.generated == pytest.approx(12 / 26) and rates.trained == pytest.approx(2 / 3)
    assert rates.both == pytest.approx(1 / (26 / 12 + 1.5))
    beside = throughput.pipelined(chips=5, generators=2, slots=10, step=lambda h: 10 + h, train=4.0)
    assert (beside.generated, beside.trained, beside.both) == (1.0, 0.75, 0.75)
    assert throughput.largest_lag(slots=192, generators=44, longest=2.0, mean=1.0, batch=128) == 132
    assert throughput.uniform_alive(6, 3).tolist() == [6.0, 4.0, 2.0]
