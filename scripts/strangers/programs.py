"""Programs, ground truths and tool calls as strangers write them: F01, F03, F06, F12, F18 and A14.

Programs of tests are built here with the verdict that follows from how each is built. Fences and tool calls are put
together from parts, so the right value is the part that was put in.
"""

from __future__ import annotations

import base64
import itertools
import json
import pickle
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from jaxrl_post.data import files, tool_calls
from jaxrl_post.data.columns import Columns
from jaxrl_post.rewards import Overrun, code, program_tests
from strangers import Members

ADD = "def add(a, b):\n    return a + b\n"
READS = "a, b = map(int, input().split())\nprint(a + b)\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
PAIRS = {"inputs": ["1 2\n", "2 2\n"], "outputs": ["3\n", "4\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [3, 4]}


def _score(text: str, truth: Any, extra: dict) -> float:
    try:
        return code.tests("d", text, truth, {**extra, "rollout": {"limit_s": 2.0}})["score"]
    except Overrun as error:
        return error.args[0]["score"]


def _members(cases: list[tuple[str, Any, Any]]) -> Members:
    """Returns the members of (what, got, right)."""
    return Members(
        len(cases), tuple(f"{what}: wants {right!r}, got {got!r}" for what, got, right in cases if got != right)
    )


def judged() -> Members:
    """Forms of ground truths, each as a value and as its JSON text, with right and wrong programs; and what is no test."""
    cases = []
    for (truth, extra, right), as_text in itertools.product(_forms(), (False, True)):
        given = json.dumps(truth) if as_text else truth
        what = f"{given!r:.60}"
        cases.append((f"right for {what}", _score(right, given, extra), 1.0))
        for wrong in ("print('banana')", right.replace("a + b", "3"), "x = 1", f"1 / 0\n{right}"):
            cases.append((f"{wrong!r:.30} for {what}", _score(wrong, given, extra), 0.0))
    cases += [(f"{one!r:.60} is refused", bool(program_tests.refusal(one, {})), True) for one in _idle()]
    return _members(cases)


def _forms() -> list[tuple[Any, dict, str]]:
    """Returns ground truths, columns beside them, and a right program of each."""
    stdin = [{"input": i, "output": o, "testtype": "stdin"} for i, o in zip(PAIRS["inputs"], PAIRS["outputs"])]
    functional = [
        {"input": "\n".join(map(json.dumps, i)), "output": json.dumps(o), "testtype": "functional"}
        for i, o in zip(CALLS["inputs"], CALLS["outputs"])
    ]
    method = f"class Solution:\n    {ADD.replace('(a', '(self, a').replace(chr(10), chr(10) + '    ')}"
    return [
        (PAIRS, {}, READS),
        (stdin, {}, READS),
        ({"input": PAIRS["inputs"], "output": PAIRS["outputs"]}, {}, READS),
        ({"inputs": [["1 2"], ["2 2"]], "outputs": [["3"], ["4"]]}, {}, READS),
        (CALLS, {}, ADD),
        (CALLS, {}, method),
        (CALLS | {"outputs": [[3], [4]]}, {}, ADD),
        (functional, {"metadata": {"func_name": "add"}}, method),
        (functional, {"metadata": '{"func_name": "add"}'}, ADD),
        ({"assert_case": ASSERTS}, {}, ADD),
        (ASSERTS, {}, ADD),
        ("\n".join(ASSERTS), {}, ADD),
    ]


def _idle() -> list[Any]:
    """Returns ground truths that test nothing of a program, or lack something of their form."""
    functional = [{"input": "1", "output": "1", "testtype": "functional"}]
    idle = [
        0,
        42,
        -1.5,
        True,
        False,
        {"a": 1},
        {"target": 24, "numbers": [1]},
        [[1, 2]],
        [["1", "2"]],
        [1, 2],
        "42",
        "true",
    ]
    idle += ["{'a': 1}", "x = 1\nassert x", "assert True", "assert 1 == 1", "import math\nassert math.pi > 3", ADD]
    idle += [
        "def test():\n    assert add(1, 2) == 3",
        "add(1, 2) == 3",
        "pass",
        "'a text'",
        ["assert 1"],
        [*ASSERTS, "assert 1"],
    ]
    idle += [
        base64.b64encode(zlib.compress(pickle.dumps(list(range(50))))).decode(),
        PAIRS | {"outputs": ["3\n"]},
        "no Python!",
    ]
    idle += [
        {"inputs": [[1, 2]], "outputs": [3]},
        {"inputs": ["1\n"], "outputs": [""]},
        functional,
        {"assert_case": ["assert 1"]},
    ]
    return idle


def fences() -> Members:
    """A program between words, in fences of all kinds, with other blocks around it."""
    cases = []
    infos = ("python", "Python", "python3", "py", " python", "py title=a.py", "{.python}", "PYTHON", "python {1,2}", "")
    marks = ("```", "~~~", "`````")
    behind = ("", "\nIt adds.\n", "\nOutput:\n```\n3\n```\n", "\n```bash\npython a.py\n```\n", "\n~~~text\n3\n~~~\n")
    for info, mark, after in itertools.product(infos, marks, behind):
        if info == "" and "```\n3" in after:
            continue  # two blocks without a language: the last one is the program
        text = f"Here it is:\n{mark}{info}\n{ADD}{mark}{after}"
        cases.append((repr(text[:60]), code.code(text), ADD))
    for indent in (1, 2, 3):
        pad = " " * indent
        text = "".join(f"{pad}{line}\n" for line in f"```python\n{ADD}```".split("\n"))
        cases += [
            (f"indented by {indent}", code.code(text), ADD),
            (f"without end, {indent}", code.code(text[: -4 - indent]), ADD),
        ]
    for head in ("- ", "1. ", "> ", "10. "):
        pad = "> " if head == "> " else " " * len(head)
        lines = f"Code:\n\n```python\n{ADD}```".split("\n")
        text = "\n".join((head if place == 0 else pad) + line for place, line in enumerate(lines))
        cases.append((f"in {head!r}", code.code(text), ADD))
    cases.append(("no fence", code.code(ADD), ADD))
    return _members(cases)


def truths() -> Members:
    """Values of JSON as ground truths, from JSONL, Parquet and Python: a function gets each as it is."""
    values = [
        3,
        -1,
        0,
        0.5,
        1e-05,
        True,
        False,
        ["1/2", "0.5"],
        [1, 2],
        {"target": 24, "numbers": [2, 3]},
        {"a": {"b": [None]}},
    ]
    values += ["3", "[1]", '{"a": 1}', "null", [["1"], ["2"]], [{"a": 1}], ["x"], 10**15, "1/2"]
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for value in values:
            given = {"prompt": "p", "reward_model": {"ground_truth": value}}
            (Path(folder) / "f.jsonl").write_text(json.dumps(given) + "\n")
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([given]), Path(folder) / "f.parquet")
            rows = [given, *(one for name in ("f.jsonl", "f.parquet") for _, one in files.objects(Path(folder) / name))]
            for row, where in zip(rows, ("Python", "JSONL", "Parquet"), strict=True):
                found = Columns().row("here", row)
                got = found.get("value", found["answer"])
                cases.append((f"{value!r} of {where}", (type(got), got), (type(value), value)))
    return _members(cases)


def calls() -> Members:
    """Calls around thinking, with both names of the arguments, closed and not, in three families."""
    cases = []
    written: dict[str, Callable[[str, str], str]] = {
        "hermes": lambda key, name: f'<tool_call>\n{{"name": "{name}", "{key}": {{"a": "<b>"}}}}\n</tool_call>',
        "llama3": lambda key, name: f'{{"name": "{name}", "{key}": {{"a": "<b>"}}}}',
        "mistral": lambda key, name: f'[TOOL_CALLS][{{"name": "{name}", "{key}": {{"a": "<b>"}}}}]',
    }
    for parser, key in itertools.product(written, ("arguments", "parameters")):
        one, other = written[parser](key, "f"), written["hermes"](key, "g")
        right = [("f", {"a": "<b>"})]
        texts = [(one, right), (f"<think>x</think>\n{one}", right), (f"<think>{other}</think>{one}", right)]
        texts += [(f"so {other}</think>\n{one}", right), (f"<think>{one}", []), (f"<think>{other}</think>done", [])]
        texts += [(f"[THINK]{other}[/THINK]{one}", right), (one.replace(key, "args"), []), (one[:-20], [])]
        if parser == "hermes":
            unclosed = one.removesuffix("\n</tool_call>")
            texts += [
                (unclosed, right),
                (f"{unclosed}\n", right),
                (f"{unclosed}\n{one}", right * 2),
                (f"{one}\nwords", right),
            ]
            texts += [(f"words {one} words {one}", right * 2), (f"{one}<think>{other}</think>", right)]
        for text, wanted in texts:
            told = tool_calls.message(text, parser).get("tool_calls", [])
            got = [(call["function"]["name"], call["function"]["arguments"]) for call in told]
            cases.append((f"{parser}: {text!r:.80}", got, wanted))
    return _members(cases)


def columns() -> Members:
    """Tests of a row in columns, as lists and as the JSON text of lists, with and without a setup."""
    cases = []
    more = [[f"assert add({a}, {b}) == {a + b}" for a in range(n)] for n, b in itertools.product((1, 2, 3), (1, 4))]
    for tests, setup in itertools.product([ASSERTS, *more], ("", "import math")):
        for given in (tests, json.dumps(tests), tuple(tests)):
            extra = {"test_list": given, "test_setup_code": setup}
            cases.append((f"{given!r:.60}", [test.source for test in program_tests.read("", extra)], list(tests)))
    cases += [("right", _score(ADD, "", {"test_list": json.dumps(ASSERTS)}), 1.0)]
    cases += [("wrong", _score("def add(a, b): return 3", "", {"test_list": json.dumps(ASSERTS)}), 0.0)]
    return _members(cases)


def brought() -> Members:
    """Modules, predicates and setups that a program brings itself, which must decide no test."""
    cases = []
    yes = "lambda *a, **k: True"
    for module, name in (
        ("np", "isclose"),
        ("np", "allclose"),
        ("numpy", "array_equal"),
        ("math", "isclose"),
        ("re", "match"),
        ("operator", "eq"),
    ):
        text = f"class {module}:\n    {name} = {yes}\ndef f(): return 4\n"
        cases.append((f"{module}.{name}", _score(text, f"assert {module}.{name}(f(), 3)", {}), 0.0))
    for name in ("isclose", "allclose", "array_equal"):
        cases.append((name, _score(f"{name} = {yes}\ndef f(): return 4\n", f"assert {name}(f(), 3)", {}), 0.0))
    cases.append(
        (
            "Counter",
            _score("from collections import Counter\ndef f(): return 'ab'", "assert Counter(f()) == Counter('ba')", {}),
            1.0,
        )
    )
    for name in (
        "isdigit",
        "isalpha",
        "isupper",
        "islower",
        "startswith",
        "endswith",
        "issubset",
        "isdisjoint",
        "is_integer",
    ):
        text = f"class A:\n    {name} = {yes}\ndef f(): return A()\n"
        cases.append((name, _score(text, f"assert f().{name}()", {}), 0.0))
    for setup in (
        "def solve(n): return n * n",
        "solve = lambda n: n * n",
        "import math\ndef solve(n): return math.prod([n, n])",
    ):
        row = {"test_list": ["assert f(3) == solve(3)"], "test_setup_code": setup}
        cases.append((setup, _score("def f(n): return solve(n)", "", row), 0.0))
        cases.append((setup, _score("def f(n): return n * n", "", row), 1.0))
    return _members(cases)


KINDS = {"F01": judged, "F03": fences, "F06": truths, "F12": calls, "F18": columns, "A14": brought}
