"""Rewards: plain functions, run by a pool, with verl's signature or TRL's.

verl's: fn(data_source, solution_str, ground_truth, extra_info) -> float | dict; a dict holds "score", may hold "acc",
and any other number is a named component. TRL's: fn(prompts, completions, completion_ids, **columns) -> list of float |
None. Nothing here imports jax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable)


def needs_no_truth(function: _Function) -> _Function:
    """Marks a reward function that does without the ground truth: of form, of length. Rows may then have none.

    It sets the attribute `needs_truth` to False, which a function in a file of one's own may also do itself.
    """
    function.needs_truth = False
    return function


class NoScores(RuntimeError):
    """No rollout of a whole round, or of a whole evaluation, has a score. Training would have nothing to train on."""


class Overrun(Exception):
    """Raised by a reward function when the program that it judges runs over its limit. This is a verdict, not a
    failure.

    `Overrun()` scores 0 and `Overrun(credit)` scores `credit`. A reward function fails if it runs too long itself,
    raises anything else or dies. It is tried once more, and then the rollout is left unscored.
    """
