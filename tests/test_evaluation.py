"""Evaluation's figures against hand-computed numbers, and its independence of order and of training."""

import numpy as np
import pytest
from toy_ring import SAMPLING, ToyEngine, ToyPrompts, ToyRewards

from jaxrl_post.launch.parts.evaluation import Evaluation, evaluate
from jaxrl_post.ring.types import Finish, Group, Prompt, Request, Rollout, RolloutId, Sampling

PROMPTS = ToyPrompts(6).prompts


def go(engine, accuracy=lambda r: float(r.tokens.sum() % 2), **changed):
    rewards = ToyRewards(accuracy)
    settings = dict(samples=4, run_seed=3, sampling=SAMPLING, max_tokens=6, replicas=1)
    return evaluate(engine, rewards, PROMPTS, **(settings | changed)), rewards


def test_answers_are_the_same_in_every_order_and_at_every_evaluation():
    first, _ = go(ToyEngine(order=1, slots=3))
    second, _ = go(ToyEngine(order=2, slots=30))
    for a, b in zip(first.sampled + first.greedy, second.sampled + second.greedy):
        assert [r.id for r in a.rollouts] == [r.id for r in b.rollouts]
        assert all(np.array_equal(x.tokens, y.tokens) for x, y in zip(a.rollouts, b.rollouts))
    assert first.figures() == second.figures() and first.metrics() == second.metrics()
    assert [g.prompt.id for g in first.sampled] == [p.id for p in PROMPTS] == [g.prompt.id for g in first.greedy]
    assert [r.id for r in first.sampled[0].rollouts] == [RolloutId(3, "eval", 0, "p0", s, 0) for s in range(4)]
    assert [r.id for r in first.greedy[0].rollouts] == [RolloutId(3, "eval", 0, "p0", 0, 1)]
    # The toy answers 1, 2, 3... when greedy: the temperatures arrived.
    assert all(r.tokens.tolist() == list(range(1, len(r) + 1)) for g in first.greedy for r in g.rollouts)
    assert any(r.tokens.tolist() != list(range(1, len(r) + 1)) for g in first.sampled for r in g.rollouts)


def test_the_sampled_rollouts_have_the_law_that_is_asked_for():
    class Noting(ToyEngine):
        def submit(self, requests):
            self.laws = [(request.rollout_id.attempt, request.sampling) for request in requests]
            super().submit(requests)

    engine = Noting()
    go(engine, temperature=0.5, top_p=0.9)
    laws = {(attempt, law.temperature, law.top_p, law.top_k) for attempt, law in engine.laws}
    assert laws == {(0, 0.5, 0.9, 0), (1, 0.0, 1.0, 0)}
    go(engine)
    assert {(attempt, law.temperature, law.top_p) for attempt, law in engine.laws} == {(0, 1.0, 1.0), (1, 0.0, 1.0)}


def test_training_rollouts_wait_and_the_clock_stands():
    engine = ToyEngine()
    id = RolloutId(3, "train", 0, "p0", 0)
    engine.submit([Request(rollout_id=id, prompt=PROMPTS[0], seed=id.seed(), max_tokens=6, sampling=SAMPLING)])
    _, rewards = go(engine)
    assert engine.clock == 0 and engine.pending == 1 and id not in rewards.started


def test_an_engine_that_runs_dry_is_an_error():
    class Losing(ToyEngine):
        def submit(self, requests):
            super().submit(requests[1:])

    with pytest.raises(RuntimeError, match="idle with 1 of 30 rollouts missing"):
        go(Losing())
    with pytest.raises(ValueError, match="at least one prompt, got 0"):
        evaluate(ToyEngine(), ToyRewards(None), [], samples=1, run_seed=0, sampling=SAMPLING, max_tokens=1, replicas=1)


def group(name, source, marks, lengths, scored=None, finish=Finish.EOS):
    prompt = Prompt(id=name, tokens=[1], source=source)
    ids = [RolloutId(0, "eval", 0, name, sample) for sample in range(len(lengths))]
    return Group(
        prompt=prompt,
        rollouts=tuple(Rollout.written(id, prompt, np.zeros(n), finish) for id, n in zip(ids, lengths)),
        rewards=np.array(marks) * 5.0,
        scored=np.ones(len(marks), bool) if scored is None else scored,
        components={"acc": marks},
    )


def test_figures_by_hand():
    evaluation = Evaluation(
        sampled=(
            group("a", "x", [1, 0, 0, 0], [2, 9, 9, 9]),
            group("b", "x", [1, 1, 0, 1], [4, 6, 9, 40]),
            group("c", "y", [0, 1, 0, 0], [9, 30, 9, 9], scored=[0, 1, 1, 1], finish=Finish.LENGTH),
        ),
        greedy=(group("a", "x", [1], [1]), group("b", "x", [0], [1]), group("c", "y", [1], [1], scored=[0])),
    )
    figures = evaluation.figures()
    means = [1 / 4, 3 / 4, 1 / 3]
    assert figures["n"] == 3 and figures["greedy"] == 0.5 and figures["num_unscored"] == 2
    assert figures["mean_at_4"] == pytest.approx(sum(means) / 3, abs=1e-12)
    assert figures["mean_at_4_se"] == pytest.approx(np.std(means, ddof=1) / 3**0.5, abs=1e-12)
    # Of a and b (c lacks a score): pass@1 = mean(1/4, 3/4); pass@2 = mean(1 - 3/6, 1 - 0); pass@4 = 1.
    assert (figures["pass_at_1"], figures["pass_at_2"], figures["pass_at_4"]) == (0.5, 0.75, 1.0)
    # Right answers have 2, 4, 6, 40 and 30 tokens.
    assert figures["num_correct"] == 5
    assert (figures["correct_length_p50"], figures["correct_length_p99"]) == (6, 40)
    assert figures["correct_length_tail"] == pytest.approx(40 / 6)
    assert figures["length_mean"] == (2 + 27 + 4 + 6 + 9 + 40 + 27 + 30) / 12 and figures["length_max"] == 40
    assert figures["clip_ratio"] == pytest.approx(1 / 3)
    metrics = evaluation.metrics()
    assert metrics["val-core/x/acc/mean@4"] == 0.5 and metrics["val-core/y/acc/mean@4"] == pytest.approx(1 / 3)
    assert metrics["val-aux/x/acc/greedy"] == 0.5 and "val-aux/y/acc/greedy" not in metrics
    assert metrics["val-aux/x/acc/pass@2"] == 0.75 and "val-aux/y/acc/pass@2" not in metrics


def test_an_unscored_answer_is_never_right():
    """Its component says 1 all the same: it counts neither in means, nor in pass@k, nor among the right ones."""
    sampled = (group("a", "x", [1, 0], [3, 4]), group("b", "x", [1, 1], [5, 6], scored=[1, 0]))
    figures = Evaluation(sampled=sampled, greedy=(group("a", "x", [1], [3], scored=[0]),)).figures()
    assert figures["mean_at_2"] == (0.5 + 1) / 2 and figures["greedy"] is None and figures["num_unscored"] == 2
    assert (figures["pass_at_1"], figures["pass_at_2"]) == (0.5, 1.0)  # of a alone
    assert figures["num_correct"] == 2 and figures["correct_length_p99"] == 5


def test_nothing_right_is_never_a_pass_and_has_no_lengths():
    figures = Evaluation(sampled=(group("a", "x", [0, 0], [3, 4]),), greedy=(group("a", "x", [0], [3]),)).figures()
    assert figures["mean_at_2"] == 0.0 and figures["mean_at_2_se"] is None
    assert figures["pass_at_1"] == figures["pass_at_2"] == 0.0
    assert figures["correct_length_p50"] is figures["correct_length_p99"] is figures["correct_length_tail"] is None


def test_replicas_alternate_and_the_temperature_given_is_not_used():
    class Watching(ToyEngine):
        def submit(self, requests):
            self.requests = list(requests)
            super().submit(requests)

    engine = Watching()
    law = Sampling(temperature=0.3, top_k=7, top_p=0.5, eos_ids=(0,), stop_strings=("x",))
    go(engine, samples=2, sampling=law, replicas=2)
    assert [r.replica for r in engine.requests] == [0, 0, 0, 1, 1, 1] * 3
    assert [r.sampling.temperature for r in engine.requests[:3]] == [1.0, 1.0, 0.0]
    assert all(r.sampling.stop_strings == ("x",) and r.sampling.eos_ids == (0,) for r in engine.requests)
    assert {(r.sampling.top_k, r.sampling.top_p) for r in engine.requests} == {(0, 1.0)}
