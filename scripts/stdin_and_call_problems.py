"""Labelled programs of 60 problems for the show of verdicts: 30 that read stdin and 30 that are called.

Each problem has a right program and one with a fault of its own. Others are made from the right one: one crashes at its end,
one prints a line first, one knows the first example alone. Some problems have one that never ends.
Problems are in scripts/tables/*_problems.txt. Their outputs come from references that were written apart from the programs. Forms of
ground truths are those of APPS, verl, LiveCodeBench and their JSON text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TABLES = Path(__file__).with_name("tables")


class Labelled(NamedTuple):
    """One program: the kind of problem ("stdin" or "call"), what is wrong with it, its prompt's columns, and its score."""

    name: str
    kind: str
    fault: str
    program: str
    truth: Any
    extra: dict
    right: float


class Problem(NamedTuple):
    """A problem of a table: what it is called, inputs and outputs of each example, and both programs."""

    name: str
    inputs: list
    outputs: list
    right: str
    wrong: str


NEVER_ENDS = ("sum", "gcd", "to the end", "add", "fib", "valid")


def _read(file: Path) -> Iterator[Problem]:
    parts = re.split(r"^=== (.*)\n", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        examples, _, programs = text.partition("--- right\n")
        pairs = [line.split(" -> ") for line in examples.splitlines()]
        inputs, outputs = ([ast.literal_eval(pair[side]) for pair in pairs] for side in (0, 1))
        right, wrong = programs.rstrip("\n").split("\n--- wrong\n")
        yield Problem(name, inputs, outputs, right, wrong)


def problems() -> Iterator[Labelled]:
    """Yields the labelled programs of all problems."""
    for place, (name, inputs, outputs, right, wrong) in enumerate(_read(TABLES / "stdin_problems.txt")):
        truth, extra = _stdin_truth(place, inputs, outputs)
        programs = {
            "": right,
            "wrong": wrong,
            "crash": f"{right}\nraise RuntimeError('at the end')",
            "prints extra": f"print('The answer:')\n{right}",
            "banana": "print('banana')",
            "first example": f"import sys\nsys.stdin.read()\nprint({outputs[0].rstrip()!r})",
        }
        if name == "nothing read":
            del programs["first example"]  # right for every input
        if name in ("main", "leaves", "descriptor"):
            programs["crash"] = f"1 / 0\n{right}"
        if name in NEVER_ENDS:
            programs["never ends"] = f"{right}\nwhile True: pass"
        yield from _labelled(name, "stdin", programs, truth, extra)
    for place, (called, inputs, outputs, *bodies) in enumerate(_read(TABLES / "call_problems.txt")):
        name, arguments = called.rstrip(")").split("(")
        right, wrong = (body.replace("\n", "\n    ") for body in bodies)
        truth, extra, method = _call_truth(place, name, inputs, outputs)
        programs = {
            "": right,
            "wrong": wrong,
            "crash": f"return 1 / 0\n    {right}",
            "first example": f"return {outputs[0]!r}",
        }
        if name in NEVER_ENDS:
            programs["never ends"] = "while True: pass"
        written = {fault: _written(name, arguments, body, method) for fault, body in programs.items()}
        written |= {"no function": f"print({name!r})", "banana": "print('banana')"}
        yield from _labelled(name, "call", written, truth, extra)
        talks = _written(name, arguments, f"print('called')\n    {right}", method)
        yield Labelled(f"{name}: talks", "call", "", f"print('hello')\n{talks}", truth, extra, 1.0)


def _labelled(name: str, kind: str, programs: dict[str, str], truth: Any, extra: dict) -> Iterator[Labelled]:
    for fault, program in programs.items():
        yield Labelled(f"{name}: {fault or 'right'}", kind, fault, program, truth, extra, float(not fault))


def _written(name: str, arguments: str, body: str, method: bool) -> str:
    if not method:
        return f"def {name}({arguments}):\n    {body}\n"
    inside = f"def {name}(self, {arguments}):\n    {body}".replace("\n", "\n    ")
    return f"class Solution:\n    {inside}\n"


def _stdin_truth(place: int, inputs: list[str], outputs: list[str]) -> tuple[Any, dict]:
    """Returns a ground truth in one of six forms, and columns beside it."""
    cases = [{"input": i, "output": o, "testtype": "stdin"} for i, o in zip(inputs, outputs, strict=True)]
    pairs = {"inputs": inputs, "outputs": outputs}
    forms = [
        json.dumps(pairs),
        pairs,
        json.dumps(cases),
        cases,
        pairs | {"fn_name": None},
        {"inputs": [i.splitlines() for i in inputs], "outputs": [o.splitlines() for o in outputs]},
    ]
    return forms[place % len(forms)], {}


def _call_truth(place: int, name: str, inputs: list[list], outputs: list) -> tuple[Any, dict, bool]:
    """Returns a ground truth in one of six forms, columns beside it, and whether the function is a method of Solution."""
    texts = ["\n".join(map(json.dumps, one)) for one in inputs]
    cases = [
        {"input": i, "output": json.dumps(o), "testtype": "functional"} for i, o in zip(texts, outputs, strict=True)
    ]
    pairs = {"fn_name": name, "inputs": inputs, "outputs": outputs}
    asserts = [f"assert {name}(*{one!r}) == {out!r}" for one, out in zip(inputs, outputs, strict=True)]
    listed = any(isinstance(out, list) for out in outputs)  # a tuple for a list is no equal of an assert
    forms: list[tuple[Any, dict, bool]] = [
        (json.dumps(pairs), {}, False),
        (pairs, {}, True),
        (json.dumps(cases), {"metadata": json.dumps({"func_name": name})}, True),
        (cases, {"metadata": {"func_name": name}}, False),
        ({"fn_name": name, "inputs": texts, "outputs": [json.dumps(o) for o in outputs]}, {}, True),
        (pairs, {}, False) if listed else ({"assert_case": asserts}, {}, False),
    ]
    return forms[place % len(forms)]
