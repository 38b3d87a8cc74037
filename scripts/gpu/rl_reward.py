"""A reward that random weights can raise."""

from __future__ import annotations

from jaxrl_post.rewards import needs_no_truth


@needs_no_truth
def digits(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Returns the share of digits among the characters, and 0 for no character."""
    return sum(letter.isdigit() for letter in solution_str) / max(len(solution_str), 1)
