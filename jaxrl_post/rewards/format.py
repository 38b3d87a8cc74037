r"""Scorers of an answer's form: 1.0 when it has it, 0.0 when not, whatever the answer says.

All take verl's arguments. For a form of your own write a function of these arguments that returns
`matches(pattern, solution_str)` in a file and name it `file.py:fn`. They are meant to be summed with a score of
correctness, at a small weight: a policy paid for form alone learns form alone.
"""

from __future__ import annotations

import re

from jaxrl_post.rewards.math import last_boxed

_THINKING = re.compile(
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*"
    r"<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*",
    re.DOTALL,
)
_HASHES = re.compile(r"#### -?[0-9][0-9.,]*\s*$")


def thinking(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """The whole text is <think>...</think><answer>...</answer>, each tag once (arXiv 2501.12948, table 1)."""
    return matches(_THINKING, solution_str)


def hashes(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """It says "#### number" once, at its end (GSM8K's form)."""
    return float(solution_str.count("####") == 1 and _HASHES.search(solution_str) is not None)


def boxed(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    r"""It has exactly one \boxed{...}, with balanced braces and something inside."""
    return float(solution_str.count("\\boxed") == 1 and bool((last_boxed(solution_str) or "").strip()))


def required(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """The share of the substrings in the prompt's column `required` (a list) that the solution has."""
    wanted = extra_info["required"]
    return sum(part in solution_str for part in wanted) / len(wanted)


def matches(pattern: str | re.Pattern, text: str) -> float:
    """1.0 if the whole text matches."""
    return float(re.compile(pattern).fullmatch(text) is not None)
