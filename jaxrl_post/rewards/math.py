r"""Scorers of short results: exact text, the last number, "#### n", \boxed{...}. Each returns 1.0 or 0.0.

All take verl's arguments (data_source, solution_str, ground_truth, extra_info).

- Of a ground truth with "####" (GSM8K's whole solution), the text after the last one counts.
- A ground truth may be a number, or a list: then a solution is right if any member is.
- rewards/math_reading.py finds the result in a text. rewards/math_values.py compares results.
- `math` also compares expressions by math-verify (rewards/math_algebra.py). No input can hang the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from jaxrl_post.rewards import math_algebra
from jaxrl_post.rewards.math_reading import last_boxed, last_number, readings
from jaxrl_post.rewards.math_values import same

Truth = str | float | list  # a list holds alternatives
_STRICT = re.compile(r"#### (-?[0-9.,]+)")


def exact(data_source: str, solution_str: str, ground_truth: Truth, extra_info: dict) -> float:
    """Returns 1.0 if the solution, or its text after the last "#", is the ground truth to the character.

    Whitespace around the solution does not count. So "12+30=42#42" and "42" are both right for "42". "042" and "42."
    are not. Nothing is right for an empty ground truth.
    """
    text = solution_str.strip()
    return float(any(gold and gold in (text, text.rpartition("#")[2].strip()) for gold in _golds(ground_truth)))


def strict(data_source: str, solution_str: str, ground_truth: Truth, extra_info: dict) -> float:
    """Returns 1.0 if verl's strict GSM8K rule finds the ground truth.

    The rule takes the last match of `#### (-?[0-9.,]+)` in the last 300 characters. Here it is compared as a number,
    in verl as text. So "72.0" and "72." are right for "72" here. As in verl, what follows the number is not read, and
    "#### $1,080", "#### +5" and a number further from the end are not found.
    """
    found = strict_number(solution_str)
    return float(found is not None and _same(found, ground_truth))


def flexible(data_source: str, solution_str: str, ground_truth: Truth, extra_info: dict) -> float:
    """Returns 1.0 if the last number anywhere is the ground truth: "$1,080", "-3", "0.5", "3/4".

    A minus after a digit is a subtraction, not a sign. By definition it may be an operand: the 3 of "29-(53-2)/3".
    """
    found = last_number(solution_str)
    return float(found is not None and _same(found, ground_truth))


def boxed(data_source: str, solution_str: str, ground_truth: Truth, extra_info: dict) -> float:
    r"""Returns 1.0 if the content of the last \boxed{...} or \fbox{...} is the ground truth, 0.0 without a box."""
    found = last_boxed(solution_str)
    return float(found is not None and _same(found, ground_truth))


def math(data_source: str, solution_str: str, ground_truth: Truth, extra_info: dict) -> float:
    r"""Returns 1.0 if the first of these that the solution has is the ground truth:

    1. the last \boxed{...}
    2. the text after the last "####"
    3. the first expression after the last "answer is" or "answer:", also in Chinese, Japanese and Korean
    4. the last formula or expression

    An expression that equals the ground truth is right: 2+2 for 4.
    """
    return _right(solution_str, ground_truth, math_algebra.equal)


def rules(data_source: str, solution_str: str, ground_truth: Truth, extra_info: dict) -> float:
    """Returns what `math` returns without math-verify: texts that are not numbers must be the same."""
    return _right(solution_str, ground_truth, None)


math.prepare = math_algebra.prepare


def strict_number(solution: str) -> str | None:
    """Returns the number that `strict` compares, or None where its rule finds none."""
    found = _STRICT.findall(solution[-300:])
    return (found[-1].rstrip(".,") or None) if found else None


def answer(solution: str) -> str | None:
    """Returns the text that `math` compares first, or None if the solution has none of its forms."""
    return next(iter(readings(solution)), None)


def _same(found: str, truth: Truth) -> bool:
    return any(same(found, gold) for gold in _golds(truth))


def _right(solution: str, truth: Truth, expressions: Callable[[str, str], bool] | None) -> float:
    found = readings(solution)
    return float(any(same(one, gold, expressions) for gold in _golds(truth) for one in found))


def _golds(truth: Truth) -> list[str]:
    """Returns the texts of which a solution must equal one.

    A list is one of alternatives, and so is a text that is a JSON list of texts or of one number. "[1, 2]" is an interval.

    Raises:
      TypeError: the truth is neither a text, a number nor a list of these.
    """
    if isinstance(truth, list | tuple):
        return [gold for one in truth for gold in _golds(one)]
    if isinstance(truth, bool):
        return ["true" if truth else "false"]  # as JSON writes it
    if isinstance(truth, int | float):
        return [str(int(truth)) if float(truth).is_integer() else repr(float(truth))]
    if not isinstance(truth, str):
        raise TypeError(
            f"ground truth {truth!r} is a {type(truth).__name__}: math graders take a text, a number, or a list of "
            "alternatives; for other truths write a function of verl's signature"
        )
    members = _json_list(truth)
    return [truth.rpartition("####")[2].strip()] if members is None else _golds(members)


def _json_list(text: str) -> list | None:
    if not text.lstrip().startswith("["):
        return None
    try:
        members = json.loads(text)
    except ValueError:
        return None
    texts = all(isinstance(one, str) for one in members)
    single = len(members) == 1 and isinstance(members[0], int | float)
    return members if texts or single else None
