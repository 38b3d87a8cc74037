"""Reward functions of a program: they score in another process as here, and their hash tells one from another."""

import functools
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from test_rewards_pool import joined

from jaxrl_post.rewards import carried
from jaxrl_post.rewards.format import required
from jaxrl_post.rewards.pool import Graders, Pool
from jaxrl_post.ring.types import Finish, Prompt, Rollout, RolloutId

ROOT = Path(__file__).resolve().parents[1]
FACTOR = 2.0


def times(text):
    return FACTOR * len(text)


def lengths(completions, **columns):
    return [times(text) for text in completions]


class Counter:
    def __init__(self, letter):
        self.letter = letter

    def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return float(solution_str.count(self.letter))


def offset(more, data_source, solution_str, ground_truth, extra_info):
    return more + len(solution_str)


def test_functions_of_every_kind_score_in_another_process():
    space = {}
    exec("def typed(data_source, solution_str, ground_truth, extra_info):\n    return 7.0", space)
    functions = [
        lengths,
        lambda data_source, solution_str, ground_truth, extra_info: float(solution_str == ground_truth),
        lambda data_source, solution_str, ground_truth, extra_info: 5.0,
        Counter("b"),
        functools.partial(offset, 10.0),
        space["typed"],
    ]
    given = carried.carried(functions, "python:")
    prompt = Prompt(id="p", tokens=[1], answer="abb")
    rollout = Rollout.written(RolloutId(0, "train", 0, "p", 0), prompt, np.zeros(3), Finish.EOS)
    with Pool(
        Graders(functions=given.names, code=given.code, workers=1, timeout_s=20.0), lambda ids, **how: "abb"
    ) as pool:
        group = joined(pool, rollout)
    assert group.scored.all() and group.rewards[0] == 6.0 + 1.0 + 5.0 + 2.0 + 13.0 + 7.0
    assert len(set(given.names)) == 6 and given.names[1:3] == ("python:<lambda>", "python:<lambda>_2")


def test_a_function_that_can_be_imported_goes_by_its_path():
    given = carried.carried([required, "some.module:fn"], "python:")
    assert given.names == ("jaxrl_post.rewards.format:required", "some.module:fn") and not given.code


def test_what_no_other_process_can_have_is_one_sentence():
    lock = threading.Lock()

    def locked(data_source, solution_str, ground_truth, extra_info):
        with lock:
            return 1.0

    with pytest.raises(ValueError, match="rewards: locked cannot go to a reward process: cannot pickle"):
        carried.carried([locked], "python:")
    with pytest.raises(ValueError, match="'7' is a int, neither a function nor a path"):
        carried.carried([7], "python:")


HASHED = """
import sys, linecache
from jaxrl_post.rewards import carried
text = sys.argv[1]
space = {"__name__": "__main__"}
linecache.cache["cell"] = (len(text), None, text.splitlines(True), "cell")
exec(compile(text, "cell", "exec"), space)
print(carried.digest(space["score"]))
"""
SCORE = """
import re
FACTOR, UNUSED, WORDS = 2, 1, {"b", "a"}
def inner(text):
    return len(re.findall("a", text)) * FACTOR
def other(text):
    return 3
def score(completions, power=1, **columns):
    return [inner(text) ** power + len(WORDS) for text in completions]
"""


def hashed(text, seed="0"):
    done = subprocess.run(
        [sys.executable, "-c", HASHED, text],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    return done.stdout


def test_a_hash_is_that_of_what_a_function_uses():
    first = hashed(SCORE)
    assert hashed(SCORE, seed="7") == first
    for same in (("UNUSED, WORDS = 2, 1", "UNUSED, WORDS = 2, 9"), ("return 3", "return 4")):
        assert same[0] in SCORE and hashed(SCORE.replace(*same)) == first
    changes = {
        "FACTOR, UNUSED, WORDS = 2": "FACTOR, UNUSED, WORDS = 3",
        '"a", text': '"b", text',
        "power=1": "power=2",
        '{"b", "a"}': '{"c", "a"}',
    }
    for old, new in changes.items():
        assert old in SCORE and hashed(SCORE.replace(old, new)) != first
