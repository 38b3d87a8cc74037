"""The fuzzer: it notices each kind of fault, and its cases repeat."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from fuzz import KINDS, children, mutations
from fuzz.commands import WANTED
from fuzz.kind import Outcome

TRIED = ("rows", "config", "cost_table", "model_config", "tokenizer", "llama2c", "safetensors")


@pytest.mark.parametrize("kind", TRIED)
def test_thirty_malformed_inputs_are_read_or_refused_in_one_sentence(tmp_path, kind):
    cases, found = KINDS[kind](tmp_path), []
    cases.valid()
    for index in range(1000, 1030):
        what, action = cases.case(index, random.Random(index))
        with Outcome() as outcome:
            action()
        assert outcome.error is None or cases.refuses(outcome.error), (what, repr(outcome.error)[:500])
        found.append(outcome.error is None)
    assert not all(found)


def test_mutations_repeat_and_change_something():
    data, tree = bytes(range(256)), {"a": [1, {"b": None}], "c": "d"}
    for seed in range(200):
        first, again = (mutations.damaged(random.Random(seed), data) for _ in range(2))
        assert first == again
        assert mutations.damaged_json(random.Random(seed), tree) == mutations.damaged_json(random.Random(seed), tree)
    changed = [mutations.damaged(random.Random(seed), data)[1] != data for seed in range(200)]
    assert sum(changed) > 190 and tree == {"a": [1, {"b": None}], "c": "d"}


@pytest.mark.extended
def test_a_planted_fault_of_each_kind_is_noticed():
    found = children.run("planted", 0, 0, len(WANTED))
    assert found.counts == {outcome: WANTED.count(outcome) for outcome in children.OUTCOMES}
    assert [row["outcome"] for row in found.bad] == [outcome for outcome in WANTED if outcome in children.BAD]
