"""Scorers of an answer's length. All take verl's arguments; the pool adds extra_info["rollout"]: its tokens and finish.

`overlong` and `brevity` read their bounds from the prompt's columns, so one run may hold prompts of several bounds.
"""

from __future__ import annotations


def finished(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """1.0 if the answer ended by itself (end of text or a stop string), 0.0 if it was cut at its token limit."""
    return float(extra_info["rollout"]["finish"] != "length")


def brevity(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """1 at no words, falling linearly to 0 at `length_limit` words (a column of the prompt) and beyond."""
    return max(0.0, 1.0 - len(solution_str.split()) / extra_info["length_limit"])


def overlong(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13) on tokens, of the columns `length_limit` (L_max)
    and `length_buffer` (L_cache): 0 up to L_max - L_cache, then linearly down to -1 at L_max and beyond."""
    return punishment(extra_info["rollout"]["tokens"], extra_info["length_limit"], extra_info["length_buffer"])


def punishment(tokens: int, limit: int, buffer: int) -> float:
    """The formula of `overlong`. ValueError unless 0 < buffer <= limit."""
    if not 0 < buffer <= limit:
        raise ValueError(f"length_buffer must be above 0 and at most length_limit={limit}, got {buffer}")
    return -min(1.0, max(0.0, (tokens - (limit - buffer)) / buffer))
