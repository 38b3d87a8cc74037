"""Which rollouts a page shows: the rule holds, and a planted rollout of the first group is always among them."""

from __future__ import annotations

import made_run
import pytest

from jaxrl_post.data import tokenizer
from jaxrl_post.runs.run_logs import opened
from jaxrl_post.telemetry.page import rollouts
from jaxrl_post.telemetry.page.curves import evenly, parts

WORDS = tokenizer.characters(made_run.ALPHABET)


def groups(count: int, size: int, length: int):
    return [made_run.group(WORDS, f"p{k}", "ask", ["a" * (length - 1)] * size) for k in range(count)]


def test_steps_are_evenly_spaced_with_both_ends():
    assert evenly(range(100), 4) == [0, 33, 66, 99] and evenly([5, 7], 9) == [5, 7] and evenly([], 2) == []
    assert evenly(range(17), 16)[-1] == 16 and len({*evenly(range(1000), 120)}) == 120
    with pytest.raises(ValueError, match="most=1"):
        evenly([1], 1)


def test_parts_hold_everything_once():
    assert [list(part) for part in parts([1, 2, 3, 4, 5], 2)] == [[1, 2], [3, 4, 5]]
    assert [list(part) for part in parts([1, 2], 5)] == [[1], [2]] and parts([], 3) == []


def test_whole_groups_up_to_the_bound_of_a_step():
    found = [(group.prompt.id, i) for group, i in rollouts.sampled(groups(64, 8, 5), 10_000)]
    assert found == [(f"p{k}", i) for k in (0, 21, 42, 63) for i in range(8)] and len(found) == rollouts.OF_STEP


def test_tokens_bound_a_step_and_one_rollout_always_comes():
    assert len([*rollouts.sampled(groups(4, 4, 10), 35)]) == 3
    assert [i for _, i in rollouts.sampled(groups(4, 4, 100), 35)] == [0]
    assert [*rollouts.sampled([], 10)] == []


def test_a_long_rollout_is_cut_and_says_its_length(tmp_path):
    run = made_run.make(tmp_path / "run", steps=1, planted="x" * 40)
    told, rule = rollouts.rollouts(opened(run), lambda ids, before=(): [str(i) for i in ids], most=20)
    assert [one["length"] for one in told] == [41] and len(told[0]["text"]) == len(told[0]["logprobs"]) == 20
    assert rule["shown"] == {"training": 1, "evaluation": 0} and rule["all"]["training"] == 4


def test_a_planted_rollout_of_the_last_step_is_shown_in_a_long_run(tmp_path):
    run = made_run.make(tmp_path / "run", steps=40, groups=20, planted="needle")
    told, _ = rollouts.rollouts(opened(run), lambda ids, before=(): [WORDS.decode([i]) for i in ids])
    assert len({one["step"] for one in told}) == rollouts.STEPS
    assert [one["step"] for one in told if "".join(one["text"]).startswith("needle")] == [40]


def test_versions_are_told_where_they_change(tmp_path):
    prompt = groups(1, 1, 2)[0].prompt
    rollout = made_run.rollout(prompt, 0, [1, 2, 3, 4, 0], versions=[3, 3, 5, 5, 6])
    told = rollouts._by_token(rollout, slice(None))
    assert told["versions"] == [[0, 3], [2, 5], [4, 6]]
    assert told["logprobs"] == [0, -0.25, -0.5, -0.75, -1] and told["entropies"][-1] == 0.5
