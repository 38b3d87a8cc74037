"""A calculator as an environment: the policy works a problem out with the help of one operation at a time.

Rows have a prompt such as "127*48+31=" and the answer "6127" (data task "calculator").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

DIGITS = 12
_OPERATION = re.compile(r"(-?\d+)([+*-])(-?\d+)", re.ASCII)
_NUMBER = re.compile(r"-?\d+")
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}

SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes one operation of two whole numbers: +, - or *.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example 127*48."}},
            "required": ["expression"],
        },
    },
}


def computed(expression: str, most_digits: int = DIGITS) -> str:
    """Returns the result of one operation of two whole numbers, or "?" for anything else, and for longer numbers."""
    found = _OPERATION.fullmatch(expression.replace(" ", ""))
    if found is None or max(len(found[1]), len(found[3])) > most_digits:
        return "?"
    return str(_OPERATORS[found[2]](int(found[1]), int(found[3])))


class Calculator:
    """The policy writes "127*48=" and is told the result, or writes "#6127" and is done. The right result scores 1.

    Args:
      most_digits: of a number that the calculator takes.
    """

    def __init__(self, most_digits: int = DIGITS):
        self._most_digits = most_digits

    def reset(self, row: Mapping) -> list[dict]:
        """Returns the problem."""
        self._answer = str(row["answer"])
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, messages: Sequence[Mapping]) -> tuple[list[dict], float, bool, dict]:
        """Returns the result of an operation, or the score of the policy's own result."""
        text = messages[-1]["content"]
        if text.startswith("#"):
            right = float(text[1:] == self._answer)
            return [], right, True, {"acc": right}
        told = computed(text[:-1], self._most_digits) if text.endswith("=") else "?"
        return [{"role": "tool", "content": told}], 0.0, False, {"acc": 0.0}


class CalculatorTool(Calculator):
    """The same with tool calls by JSON schema. A turn without a call ends it; its last number is the policy's result."""

    tools = (SCHEMA,)

    def step(self, messages: Sequence[Mapping]) -> tuple[list[dict], float, bool, dict]:
        """Returns the result of every call, or the score."""
        calls = messages[-1].get("tool_calls", ())
        if not calls:
            numbers = _NUMBER.findall(messages[-1]["content"])
            right = float(bool(numbers) and numbers[-1] == self._answer)
            return [], right, True, {"acc": right}
        return [self._result(call) for call in calls], 0.0, False, {"acc": 0.0}

    def _result(self, call: Mapping) -> dict:
        """Returns the message that a call gets."""
        function = call["function"]
        if function["name"] != SCHEMA["function"]["name"]:
            told = f"there is no tool {function['name']!r}; use calculator"
        else:
            told = computed(str(function["arguments"].get("expression", "")), self._most_digits)
        return {"role": "tool", "name": function["name"], "tool_call_id": call["id"], "content": told}
