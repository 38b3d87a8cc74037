"""What a checkpoint belongs to: data, config and code, and how a change of them is refused."""

import json

import numpy as np
import pytest

from jaxrl_post.ring.types import Prompt
from jaxrl_post.runs.checkpoint import identity


def test_every_column_of_the_data_is_in_its_fingerprint():
    given = dict(
        id="1",
        tokens=[1, 2],
        answer="3",
        source="s",
        messages=({"role": "user", "content": "q"},),
        extra={"n": np.int64(4)},
    )
    one = identity.fingerprint("f.jsonl", 0, [Prompt(**given)])
    assert one == identity.fingerprint("f.jsonl", 0, [Prompt(**given)]) and one["length"] == 1
    changes = [("id", "2"), ("tokens", [1, 3]), ("answer", "4"), ("source", "t"), ("messages", ()), ("extra", {"n": 5})]
    digests = {identity.fingerprint("f.jsonl", 0, [Prompt(**given | {k: v})])["digest"] for k, v in changes}
    assert len(digests) == len(changes) and one["digest"] not in digests


def test_a_change_is_refused_field_by_field():
    then = {
        "config": {"steps": 12, "seed": 0, "run_dir": "a", "optimizer": {"lr": 0.1, "b1": 0.9}},
        "data": {"train": {"length": 5}},
        "processes": 1,
        "versions": {"jax": "1"},
    }
    now = json.loads(json.dumps(then))
    now["config"] |= {"steps": 24, "run_dir": "b"}
    now["versions"]["jax"] = "2"
    identity.check_same(then, now, 6)
    now["config"]["optimizer"] = {"lr": 0.2, "b2": 0.9}
    now["data"]["train"]["length"], now["config"]["steps"] = 6, 8
    with pytest.raises(ValueError) as refused:
        identity.check_same(then, now, 6)
    said = str(refused.value)
    for part in (
        'optimizer.b1 0.9 -> "absent"',
        'optimizer.b2 "absent" -> 0.9',
        "optimizer.lr 0.1 -> 0.2",
        "steps 12 -> 8",
        "data.train.length 5 -> 6",
        "step 6 was saved under the first",
    ):
        assert part in said
    assert "seed" not in said and 'run_dir "' not in said and "\n" not in said


def test_a_run_from_before_an_option_goes_on_as_it_was():
    then = {"config": {"steps": 2, "engine": {"slots": 4}}}
    now = json.loads(json.dumps(then))
    now["config"]["engine"]["products"] = "library"
    identity.check_same(then, now, 1)
    now["config"]["engine"]["products"] = "fixed"
    with pytest.raises(ValueError, match='engine.products "absent" -> "fixed"'):
        identity.check_same(then, now, 1)


def test_the_code_of_reward_functions_is_part_of_a_run(tmp_path):
    (tmp_path / "mine.py").write_text("def score(): return 1\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "graders.py").write_text("def fn(): return 1\n")
    functions = (f"{tmp_path}/mine.py:score", "pack.graders:fn", "jaxrl_post.rewards.math:exact", "made.up:fn")
    before = identity.reward_code(functions, ["", str(tmp_path)])
    assert list(before) == list(functions[:2])
    identity.check_same({"reward_code": before}, {"reward_code": dict(before)}, 3)
    (tmp_path / "pack" / "graders.py").write_text("def fn(): return 2\n")
    after = identity.reward_code(functions, ["", str(tmp_path)])
    with pytest.raises(ValueError, match=r"resume refused: reward_code.pack.graders:fn \"[0-9a-f]{32}\" -> "):
        identity.check_same({"reward_code": before}, {"reward_code": after}, 3)
