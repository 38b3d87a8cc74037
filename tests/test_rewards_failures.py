"""A reward function that fails: one sentence for each kind of failure, without a logger's name and without a word twice."""

from __future__ import annotations

import logging

import pytest

from jaxrl_post.launch import own_process
from jaxrl_post.rewards.printed import Failures

REASON = "ValueError: no number in 'x#46'"
TRACE = f'  File "r.py", line 2, in score\n    return int(text)\n{REASON}\n'
LINES = [
    "warning: reward function r.py:score failed at r.py:2 on a rollout: ValueError: no number in 'x#46'; further failures like "
    "this one are counted, not shown",
    '  File "r.py", line 2, in score',
    "    return int(text)",
]


@pytest.fixture
def loggers():
    """Takes back what a program does to loggers at its begin."""
    own, root = logging.getLogger("jaxrl_post"), logging.getLogger()
    before = own.handlers[:], own.propagate, root.handlers[:]
    yield
    own.handlers[:], own.propagate, root.handlers[:] = before


def test_two_pools_show_one_failure_once(loggers, capsys):
    logging.getLogger().addHandler(logging.StreamHandler())  # another library has a format for all loggers
    own_process.begun()
    shown = Failures()  # of the pools of training and of evaluation
    for sample in range(4):
        shown.tell("r.py:score", "a rollout", f"ValueError: no number in 'x#{46 + sample}'", "r.py:2", TRACE)
    said = capsys.readouterr().err
    assert said.splitlines() == LINES and len(shown.told) == 1
    shown.tell("r.py:score", "a rollout", "TimeoutError: 5 s", "", "")
    assert len(capsys.readouterr().err.splitlines()) == 1 and len(shown.told) == 2
