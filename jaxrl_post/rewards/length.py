"""Scorers of a rollout's length. All take verl's arguments.

The pool adds extra_info["rollout"], with the rollout's number of tokens and its finish. `overlong` and `brevity` read
their bounds from the prompt's columns, so prompts of one run may have different bounds.
"""

from __future__ import annotations

from jaxrl_post.rewards import needs_no_truth


@needs_no_truth
def finished(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Returns 1.0 if the rollout ended by itself (end token or stop string), 0.0 if it was cut at its token limit."""
    return float(extra_info["rollout"]["finish"] != "length")


@needs_no_truth
def brevity(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Returns 1 for no words, falling linearly to 0 at `length_limit` words (a column of the prompt) and beyond."""
    return max(0.0, 1.0 - len(solution_str.split()) / extra_info["length_limit"])


@needs_no_truth
def overlong(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Returns DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), in tokens.

    The columns are `length_limit` (L_max) and `length_buffer` (L_cache). The score is 0 up to L_max - L_cache. Then it
    falls linearly to -1 at L_max, and stays there.
    """
    return punishment(extra_info["rollout"]["tokens"], extra_info["length_limit"], extra_info["length_buffer"])


def punishment(tokens: int, limit: int, buffer: int) -> float:
    """Computes `overlong` from numbers.

    Raises:
      ValueError: not 0 < buffer <= limit.
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"length_buffer must be above 0 and at most length_limit={limit}, got {buffer}")
    return -min(1.0, max(0.0, (tokens - (limit - buffer)) / buffer))
