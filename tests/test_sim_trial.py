"""A trial of a scheduler against seconds computed by hand, and lengths read from files."""

import json

import numpy as np
import pytest
from config_arms import TAIL, given

from jaxrl_post import config
from jaxrl_post.engine.step_cost import DecodeCost, StepCost, TableCost
from jaxrl_post.scheduler.forecast import ReplicaCapacity
from jaxrl_post.simulate import observed, trial, workloads

SECOND = DecodeCost(weights_s=1.0, token_s=0.0, row_s=0.0)  # a step takes a second, whatever it computes
CAP, PROMPTS, GROUP = 64, 4, 2
BASE = (f"scheduler.prompts={PROMPTS}", f"scheduler.group_size={GROUP}", f"sampling.max_tokens={CAP}")
LENGTHS = tuple((40, 40) if prompt % 5 == 0 else (10, 10) for prompt in range(20))  # one prompt in five is long


def resolved(*overrides: str) -> config.Config:
    return config.resolve(given(), [*BASE, *overrides])


def job(*, slots: int = 64, lengths=LENGTHS, **more) -> trial.TrialInputs:
    replica = ReplicaCapacity(slots=slots, kv_tokens=1 << 20, cost=SECOND)
    about = {"prompts": 20, "prompt_tokens": 4, "token_s": 0.0} | more
    return trial.TrialInputs(lengths=lengths, replica=replica, **about)


def drawn(count: int) -> list[int]:
    """The lengths of the first groups, in the order in which they are admitted."""
    order = workloads.SimPrompts(20, tokens=4, seed=0)
    return [LENGTHS[int(order.at(place)[1].id)][0] for place in range(count)]


def test_a_synchronous_round_lasts_as_long_as_its_longest_rollout():
    found = trial.run(resolved(), job(), rounds=5)
    longest = [max(drawn(20)[PROMPTS * i : PROMPTS * (i + 1)]) for i in range(5)]
    assert found.ends == tuple(np.cumsum(longest)) and found.oldest == 0
    assert 10 < found.ends[-1] / 5 <= 40


def test_seconds_of_training_are_added_on_shared_devices():
    """A round has 8 rollouts with prompts of 4 tokens."""
    plain, trained = (trial.run(resolved(), job(token_s=s, step_s=10 * s), rounds=5) for s in (0.0, 0.5))
    tokens = [GROUP * sum(4 + n for n in drawn(20)[PROMPTS * i : PROMPTS * (i + 1)]) for i in range(5)]
    assert np.allclose(np.diff(trained.ends) - np.diff(plain.ends), [5 + 0.5 * n for n in tokens[1:]])


def test_a_period_of_tail_batching_by_hand():
    """Five groups race in each of four short rounds, and the last one is deferred with the tokens that it has. The long
    round generates what is missing of the four."""
    found = trial.run(resolved(*TAIL, "scheduler.prefix_mode=recompute"), job(), rounds=5)
    times, missing = [], []
    for i in range(4):
        race = drawn(20)[5 * i : 5 * (i + 1)]
        times.append(sorted(race)[3])
        missing.append(max(race) - times[-1])
    assert sum(n > 10 for n in drawn(20)) >= 4 and max(missing) > 0
    assert found.ends[:4] == tuple(np.cumsum(times))
    assert found.ends[4] - found.ends[3] == pytest.approx(max(missing), abs=1)  # whole groups are deferred too
    assert found.oldest == 4  # tokens of the first round, four optimizer steps later


def test_a_pipeline_computes_what_full_slots_can():
    """Eight slots give eight tokens a second."""
    found = trial.run(
        resolved("scheduler.name=pipeline", "scheduler.max_staleness=4", "scheduler.ahead=8"), job(slots=8), rounds=40
    )
    tokens = GROUP * sum(drawn(40 * PROMPTS)[PROMPTS * 5 : PROMPTS * 35])
    assert found.ends[34] - found.ends[4] == pytest.approx(tokens / 8, rel=0.1)
    assert 1 <= found.oldest <= 4


def test_a_learner_apart_trains_while_the_next_round_is_generated():
    """Eight rounds of 10 s and steps of 25 s: all rounds but the first are hidden behind the steps."""
    found = trial.run(resolved("mesh.engine=1"), job(lengths=((10, 10),) * 20, step_s=25.0), rounds=8)
    assert found.ends[-1] == pytest.approx(10 + 8 * 25) and found.oldest == 1


def test_trials_repeat_themselves_and_leave_loans_and_filters_out():
    one = trial.run(resolved(*TAIL), job(drift=0.01), rounds=5)
    assert one == trial.run(resolved(*TAIL), job(drift=0.01), rounds=5)
    filtered = resolved("scheduler.filter_groups=true", "scheduler.max_waves=3")
    assert trial.run(filtered, job(), rounds=3) == trial.run(resolved(), job(), rounds=3)
    streamed = ("scheduler.stream=1", "mesh.data=2", "batch.rows=8")
    lent, kept = (trial.run(resolved(*streamed, *more), job(), rounds=3) for more in (["scheduler.lend=0.4"], []))
    assert lent == kept


def test_a_step_costs_what_its_compiled_size_costs():
    table = TableCost(table=StepCost((1, 64, 128), (1.0, 2.0, 4.0), "made"))
    sized = trial.InSizes(cost=table, sizes=(128, 64))
    rows = np.array([0, 1, 63, 64, 65, 128, 192])
    assert sized(rows, 0 * rows).tolist() == [0.0, 2.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert (sized.prefill_s, sized.source) == (table.prefill_s, "made")


# ---- lengths


def test_lengths_of_a_trace_are_cut_and_grouped_by_prompt(tmp_path):
    records = [("a", 3), ("b", 90), ("a", 5), ("b", 0), ("c", 7)]
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps({"prompt": p, "output_length": n}) + "\n" for p, n in records))
    found = observed.read(str(file), 50)
    assert found.lengths == ((3, 5), (50,), (7,)) and found.source == str(file)
    told = found.told
    assert (told["rollouts"], told["prompts"], told["mean"], told["median"], told["longest"]) == (4, 3, 16.2, 6.0, 50)
    file.write_text('{"output_length": 3}\n{"output_length": 4}\n')
    assert observed.read(str(file), 50).lengths == ((3, 4),)
    assert observed.read(str(file), 50).told["digest"] != told["digest"]


def test_the_prior_is_the_fitted_workload_in_the_scale_of_the_longest_rollout():
    """Its median is 587 of 8,192 tokens."""
    for cap in (8192, 1024):
        told = observed.prior(cap).told
        assert told["median"] == pytest.approx(587 * cap / 8192, rel=0.15)
        assert told["longest"] == cap and told["rollouts"] == 2048


def test_no_lengths_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="scheduler.auto_history=.*: no trace and no rollout log is there"):
        observed.read(str(tmp_path), 50)
    (tmp_path / "x.parquet").write_text("")
    with pytest.raises(ValueError, match="must be a file that ends in .jsonl"):
        observed.read(str(tmp_path / "x.parquet"), 50)


def test_a_limit_of_evaluations_does_not_stop_a_trial():
    """A trial has no evaluation, so that an option which only evaluations read would be refused as ignored."""
    plain, limited = resolved("eval.prompts=8"), resolved("eval.prompts=8", "watchdog.evaluate_s=3600.0")
    found = [trial.run(config, job(lengths=((10, 10),) * 20), rounds=3) for config in (plain, limited)]
    assert found[0] == found[1] and len(found[0].ends) == 3
