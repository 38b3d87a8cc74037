r"""Scorers of a rollout's format: 1.0 if it has the format, else 0.0, whatever its content.

All take verl's arguments. For another format, write a function of these arguments that returns
`matches(pattern, solution_str)` in a file and name it `file.py:fn`. Use them with a small weight beside a score of
correctness. A policy that is rewarded for format alone learns format alone.
"""

from __future__ import annotations

import re

from jaxrl_post.rewards import needs_no_truth
from jaxrl_post.rewards.math_reading import last_boxed

_THINKING = re.compile(
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*"
    r"<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*",
    re.DOTALL,
)
_HASHES = re.compile(r"#### -?[0-9][0-9.,]*\s*$")


@needs_no_truth
def thinking(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Returns 1.0 if the text is <think>...</think><answer>...</answer>, each tag once (arXiv 2501.12948, table 1).

    A <think> with which the prompt ends, because its template opens it, counts as the text's first tag.
    """
    end = extra_info.get("rollout", {}).get("prompt_end", "").rstrip()
    return matches(_THINKING, ("<think>" if end.endswith("<think>") else "") + solution_str)


@needs_no_truth
def hashes(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Returns 1.0 if the text has "#### number" once, at its end (GSM8K's format)."""
    return float(solution_str.count("####") == 1 and _HASHES.search(solution_str) is not None)


@needs_no_truth
def boxed(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    r"""It has exactly one \boxed{...}, with balanced braces and something inside."""
    return float(solution_str.count("\\boxed") == 1 and bool((last_boxed(solution_str) or "").strip()))


@needs_no_truth
def required(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """The share of the substrings in the prompt's column `required` (a list) that the solution has."""
    wanted = extra_info["required"]
    return sum(part in solution_str for part in wanted) / len(wanted)


def matches(pattern: str | re.Pattern, text: str) -> float:
    """1.0 if the whole text matches."""
    return float(re.compile(pattern).fullmatch(text) is not None)
