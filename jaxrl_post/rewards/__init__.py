"""Rewards: plain functions, run by a pool, with verl's signature or TRL's.

verl's: fn(data_source, solution_str, ground_truth, extra_info) -> float | dict; a dict holds "score", may hold "acc",
and any other number is a named component. TRL's: fn(prompts, completions, completion_ids, **columns) -> list of float |
None. Nothing here imports jax.
"""

from __future__ import annotations


class NoScores(RuntimeError):
    """Not one answer of a whole round, or of a whole evaluation, has a score: to go on would be to train on nothing."""


class Overrun(Exception):
    """Raised by a reward function: the program it judges ran over its limit. That is a verdict, not a failure.

    `Overrun()` scores 0, `Overrun(credit)` scores that much. A reward function that itself runs too long, raises
    anything else or dies has failed: it is tried once more, and then the rollout is left unscored.
    """
