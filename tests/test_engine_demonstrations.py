"""The engine of worked solutions satisfies the engine's contract."""

import numpy as np
import pytest
from toy_ring import SAMPLING, ToyLearner, ToyObserver, ToyPrompts, ToyRewards, observed, publish, scheduler_of

from jaxrl_post.engine.demonstrations import Demonstrations
from jaxrl_post.launch.parts.evaluation import evaluate
from jaxrl_post.ring.loop import run
from jaxrl_post.ring.types import Capacity, Finish, Request, RolloutId, Sampling
from jaxrl_post.scheduler.rounds.rounds import Sync

PROMPTS = ToyPrompts(5).prompts


def write(prompt, seed):
    return [int(prompt.tokens[-1])] * (1 + int(seed[0]) % 3) + [0]


def request(index, purpose="train", sample=0, **changed):
    id = RolloutId(0, purpose, 0, PROMPTS[index].id, sample)
    return Request(
        **(dict(rollout_id=id, prompt=PROMPTS[index], seed=id.seed(), max_tokens=4, sampling=SAMPLING) | changed)
    )


def test_a_rollout_is_what_the_data_wrote():
    engine = Demonstrations(write, slots=4, version=2)
    engine.submit([request(2), request(0)])
    assert engine.pending == 2 and engine.capacity == Capacity(slots=(2,), pages=(2,))
    first, second = engine.step()
    assert [first.prompt.id, second.prompt.id] == ["p0", "p2"]
    assert first.tokens.tolist() == write(PROMPTS[0], request(0).seed)
    assert first.sampled.all() and not first.logprobs.any() and not first.entropies.any() and not first.drafted.any()
    assert first.versions.tolist() == [2] * len(first) and first.finish is Finish.EOS
    assert engine.clock == 1 == first.finish_clock and engine.pending == 0 and engine.step() == [] and engine.clock == 1
    assert engine.metrics() == {"rows/num_demonstrated_tokens": len(first) + len(second)}
    assert engine.metrics() == {"rows/num_demonstrated_tokens": 0}


def test_tokens_that_are_only_shown_are_not_sampled():
    mask = [True, False, True]
    engine = Demonstrations(lambda prompt, seed: [4, 5, 0], slots=4, trained={PROMPTS[1].id: mask})
    engine.submit([request(0), request(1)])
    whole, part = engine.step()
    assert whole.sampled.all() and part.sampled.tolist() == mask and part.tokens.tolist() == [4, 5, 0]
    engine.submit([request(1)])
    assert len(engine.park([request(1).rollout_id])[0]) == 0


def test_finishes():
    engine = Demonstrations(lambda prompt, seed: prompt.tokens, slots=4)
    ends, stops = Sampling(eos_ids=(3,)), Sampling(stop_ids=(4,))
    engine.submit([request(0, sampling=ends), request(1, sampling=stops), request(2)])
    assert [rollout.finish for rollout in engine.step()] == [Finish.EOS, Finish.STOP, Finish.LENGTH]


def test_evaluation_goes_first_and_alone():
    engine = Demonstrations(write, slots=4)
    engine.submit([request(0), request(1, "eval"), request(2)])
    assert engine.pending == 1
    assert [rollout.id.purpose for rollout in engine.step()] == ["eval"]
    assert engine.clock == 0 and engine.pending == 2
    scored = evaluate(
        engine, ToyRewards(lambda r: 1.0), PROMPTS, samples=2, run_seed=0, sampling=SAMPLING, max_tokens=4, replicas=1
    )
    assert scored.figures()["mean_at_2"] == 1.0 and engine.clock == 0 and engine.pending == 2


def test_park_and_unknown_ids():
    engine = Demonstrations(write, slots=4)
    engine.submit([request(i) for i in range(4)])
    engine.park([request(0).rollout_id, request(4).rollout_id])
    parked = engine.park([request(3).rollout_id, request(1).rollout_id, request(4).rollout_id])
    assert [(p.prompt.id, p.finish, len(p)) for p in parked] == [("p1", Finish.PARKED, 0), ("p3", Finish.PARKED, 0)]
    assert [rollout.prompt.id for rollout in engine.step()] == ["p2"]


def test_refusals_queue_nothing():
    engine = Demonstrations(write, slots=4)
    longest = len(write(PROMPTS[1], request(1).seed))
    with pytest.raises(ValueError, match=f"prompt 'p1': its demonstration has {longest} tokens.*max_tokens=1"):
        engine.submit([request(0), request(1, max_tokens=1)])
    prefix = Demonstrations(write, slots=1)
    prefix.submit([request(0)])
    with pytest.raises(ValueError, match="do not continue a prefix"):
        engine.submit([request(0, prefix=prefix.step()[0])])
    assert engine.pending == 0
    with pytest.raises(ValueError, match="version 0 must be greater than the current 0"):
        engine.swap(None, 0)
    with pytest.raises(ValueError, match="not finite"):
        engine.swap(None, 1, np.bool_(False))
    assert engine.version == 0
    engine.swap(None, 1, np.bool_(True))
    assert engine.version == 1


def test_the_loop_learns_from_it():
    learner = ToyLearner()
    given = dict(run_seed=0, max_tokens=4, prompts=3, group_size=1, max_waves=1)
    scheduler = scheduler_of(Sync, ToyPrompts(5), steps=2, **given)
    engine = Demonstrations(write, slots=1)
    run(observed(ToyObserver()), engine, scheduler, ToyRewards(lambda r: 1.0), learner, publish, 2)
    order, want = ToyPrompts(5), []
    for position in range(6):
        epoch, prompt = order.at(position)
        seed = RolloutId(0, "train", epoch, prompt.id, 0).seed()
        want.append((epoch, prompt.id, [write(prompt, seed)]))
    assert list(learner.batches) == [want[:3], want[3:]]
    assert engine.version == 2 and np.isfinite(learner.params)
