r"""Scorers of short results: exact text, the last number, "#### n", \boxed{...}. Each returns 1.0 or 0.0.

All take verl's arguments (data_source, solution_str, ground_truth, extra_info).

- Of a ground truth with "####" (GSM8K's whole solution), the text after the last one counts.
- rewards/math_reading.py finds the result in a text. rewards/math_values.py compares results.
- `math` also compares expressions by math-verify where it is installed (rewards/math_algebra.py).
- No input can hang a scorer that does without math-verify.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from jaxrl_post.rewards import math_algebra
from jaxrl_post.rewards.math_reading import last_boxed, last_expression, last_number
from jaxrl_post.rewards.math_values import is_text, same

_TAIL = 20_000  # characters of a solution that are read
_STRICT = re.compile(r"#### (-?[0-9.,]+)")


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Returns 1.0 if the solution, or its text after the last "#", is the ground truth to the character.

    Whitespace around the solution does not count. So "12+30=42#42" and "42" are both right for "42". "042" and "42."
    are not. Nothing is right for an empty ground truth.
    """
    text, gold = solution_str.strip(), _gold(ground_truth)
    return float(gold != "" and gold in (text, text.rpartition("#")[2].strip()))


def strict(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Returns 1.0 if verl's strict GSM8K rule finds the ground truth.

    The rule takes the last match of `#### (-?[0-9.,]+)` in the last 300 characters. Here it is compared as a number,
    in verl as text. So "72.0" and "72." are right for "72" here. As in verl, what follows the number is not read.
    """
    found = _STRICT.findall(solution_str[-300:])
    return float(bool(found) and same(found[-1].rstrip(".,"), _gold(ground_truth)))


def flexible(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Returns 1.0 if the last number anywhere is the ground truth: "$1,080", "-3", "0.5", "3/4".

    A minus after a digit is a subtraction, not a sign. By definition it may be an operand: the 3 of "29-(53-2)/3".
    """
    found = last_number(solution_str)
    return float(found is not None and same(found, _gold(ground_truth)))


def boxed(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    r"""Returns 1.0 if the content of the last \boxed{...} or \fbox{...} is the ground truth, 0.0 without a box."""
    found = last_boxed(solution_str)
    return float(found is not None and same(found, _gold(ground_truth)))


def math(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    r"""Returns 1.0 if the first of these that the solution has is the ground truth:

    1. the last \boxed{...}
    2. the text after the last "####"
    3. the text after the last "answer is" or "answer:" on its line
    4. the last expression

    Where math-verify is installed, an expression that equals the ground truth is right: 2+2 for 4. Otherwise it is not.
    """
    return _right(solution_str, ground_truth, math_algebra.expressions())


def rules(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Returns what `math` returns where math-verify is not installed."""
    return _right(solution_str, ground_truth, None)


math.prepare = math_algebra.expressions


def answer(solution: str) -> str | None:
    """Returns the text that `math` compares, or None if the solution has none of its forms."""
    found = last_boxed(solution)
    if found is not None:
        return found
    tail = solution[-_TAIL:]
    if "####" in tail:
        return tail.rpartition("####")[2].strip().split("\n")[0]
    said = re.findall(r"(?i)\banswer(?: is|:)[:\s]*([^\n]{1,200})", tail)
    if not said:
        return last_expression(solution)
    text = said[-1].strip().rstrip(".")
    return (last_expression(text) or text) if is_text(text) else text


def _right(solution: str, truth: str, expressions: Callable[[str, str], bool] | None) -> float:
    found = answer(solution)
    return float(found is not None and same(found, _gold(truth), expressions))


def _gold(ground_truth: str) -> str:
    return str(ground_truth).rpartition("####")[2].strip()
