"""Forms of tests of programs, from the data sets that have them, and what is refused because it tests nothing."""

from __future__ import annotations

import base64
import json
import pickle
import zlib

import pytest
from test_rewards_pool import FORKS

from jaxrl_post.rewards import Overrun, code, program_runs, program_tests
from jaxrl_post.rewards.environments.code_tool import CodeTool
from jaxrl_post.rewards.sandbox.examiner import ProgramTest

pytestmark = FORKS
ADD = "def add(a, b):\n    return a + b\n"
METHOD = (
    "class Solution:\n    def add(self, a: int, b: int) -> int:\n        x: List[int] = [a, b]\n        return sum(x)\n"
)
READS = "a, b = map(int, input().split())\nprint(a + b)\n"
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
STDIN_CASES = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}, {"input": "3 4", "output": "7"}]
CASES = [
    {"input": "1\n2", "output": "3", "testtype": "functional"},
    {"input": "3\n4", "output": "7", "testtype": "functional"},
]
NAMED = {"metadata": json.dumps({"func_name": "add"})}
ASSERTS = ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(3, 4) == 7\n"
FORMS = {
    "APPS, stdin": (json.dumps(PAIRS), {}, READS),
    "verl, stdin": (PAIRS | {"fn_name": None}, {}, READS),
    "lists of lines": ({"inputs": [["1 2"], ["3 4"]], "outputs": [["3"], ["7"]]}, {}, READS),
    "code contests": ({"input": PAIRS["inputs"], "output": PAIRS["outputs"]}, {}, READS),
    "LiveCodeBench, stdin": (STDIN_CASES, {}, READS),
    "APPS, call": (json.dumps(CALLS), {}, ADD),
    "APPS, wrapped": (CALLS | {"outputs": [[3], [7]]}, {}, ADD),
    "prime_code, call": (CALLS | {"inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"]}, {}, ADD),
    "LeetCode": (CALLS, {}, METHOD),
    "LiveCodeBench, functional": (json.dumps(CASES), NAMED, METHOD),
    "functional, a function": (CASES, {"metadata": {"func_name": "add"}}, ADD),
    "rllm": ([case | {"metadata": {"func_name": "add"}} for case in CASES], {}, ADD),
    "assert_case": (json.dumps({"assert_case": ASSERTS}), {}, ADD),
    "MBPP": (json.dumps(ASSERTS), {}, ADD),
    "MBPP, a column": ("", {"test_list": json.dumps(ASSERTS)}, ADD),
    "HumanEval": ("", {"test": CHECK, "entry_point": "add", "prompt": "def add(a, b):\n"}, "    return a + b\n"),
    "HumanEval, an object": (json.dumps({"test": CHECK, "entry_point": "add"}), {}, ADD),
}


def score(text, truth, extra=None, limit_s=1.0):
    try:
        return code.tests("d", text, truth, {**(extra or {}), "rollout": {"limit_s": limit_s}})["score"]
    except Overrun as error:
        return error.args[0]["score"]


@pytest.mark.parametrize("form", FORMS)
def test_forms_accept_a_right_program_and_no_other(form):
    truth, extra, right = FORMS[form]
    assert program_tests.refusal(truth, extra) == "" and len(program_tests.read(truth, extra)) in (1, 2)
    assert score(right, truth, extra) == 1.0
    assert score("print('banana')", truth, extra) == 0.0
    assert score(right.replace("a + b", "3").replace("sum(x)", "3"), truth, extra) == 0.0  # it knows the first example


WHOLE = {
    "main": ("if __name__ == '__main__':\n    print(sum(map(int, input().split())))", 1),
    "descriptor": ("import os\nos.write(1, b'%d' % sum(map(int, os.read(0, os.fstat(0).st_size).split())))", 1),
    "opened": ("print(sum(map(int, open(0).read().split())))", 1),
    "buffer": ("import sys\nsys.stdout.buffer.write(b'%d' % sum(map(int, sys.stdin.buffer.read().split())))", 1),
    "exit": (f"{READS}exit()", 1),
    "leaves": (f"import os\n{READS}os.sys.stdout.flush()\nos._exit(0)", 1),
    "thread": (
        "import threading\ndef f():\n    print(sum(map(int, input().split())))\n"
        "t = threading.Thread(target=f)\nt.start()\nt.join()",
        1,
    ),
    "number": ("print(float(sum(map(int, input().split()))))", 1),
    "says more": (f"print('The sum:')\n{READS}", 0),
    "asks": ("a, b = map(int, input('Numbers? ').split())\nprint(a + b)", 0),
    "raises at its end": (f"{READS}1 / 0", 0),
    "fails at its end": (f"import sys\n{READS}sys.exit(1)", 0),
    "ends hard": (f"import os\n{READS}os.abort()", 0),
    "unflushed": (f"import os\n{READS}os._exit(0)", 0),
    "stderr": ("import sys\nprint(sum(map(int, input().split())), file=sys.stderr)", 0),
    "never ends": (f"{READS}while True: pass", 0),
    "prints for ever": ("while True: print(3)", 0),
    "no syntax": ("print(", 0),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_programs(name):
    program, right = WHOLE[name]
    assert score(f"```python\n{program}\n```", PAIRS, limit_s=0.5) == right


OUTPUTS = [
    ("3 \n\n", "3\n", True),
    ("a\r\nb", "a\nb\n", True),
    ("3.0", "3", True),
    ("0.3333333333", "0.333333", True),
    ("1e3", "1000.0", True),
    ("Case #1: 3.50", "Case #1: 3.5", True),
    ("1  2", "1 2", True),
    ("3.001", "3.0", False),
    ("1000001", "1000000", False),
    ("101", "00101", False),
    ("a  b", "a b", False),
    ("*", "  *", False),
    ("1\n2", "1 2", False),
    ("1\n\n2", "1\n2", False),
    ("yes", "YES", False),
    ("nan", "inf", False),
    ("", "3", False),
    ("3\n3", "3", False),
]


@pytest.mark.parametrize("printed, expected, same", OUTPUTS)
def test_outputs_are_compared_by_line_and_number(printed, expected, same):
    assert program_runs.same_output(printed, expected) is same


RESULTS = [
    ("return (1, [2, (3,)])", [[1, [2, [3]]]], 1),
    ("return {1: 'a'}", [{"1": "a"}], 1),
    ("return 0.1 + 0.2", [0.3], 1),
    ("return None", [None], 1),
    ("return '3'", [3], 0),
    ("return [1, 2, 3]", [[1, 2]], 0),
    ("return 0.31", [0.3], 0),
    ("class A:\n        __eq__ = lambda *a: True\n    return A()", [3], 0),
]


@pytest.mark.parametrize("body, outputs, right", RESULTS)
def test_results_of_calls(body, outputs, right):
    assert score(f"def f():\n    {body}\n", {"fn_name": "f", "inputs": [[]], "outputs": outputs}) == right


def test_a_call_gets_its_arguments_as_they_were_meant():
    truth = {"fn_name": "count", "inputs": [[{"1": [2]}, "x"]], "outputs": [True]}
    assert score("def count(d, s): return d == {1: [2]} and s == 'x'", truth) == 1.0
    assert score("from itertools import count", truth) == 0.0


IDLE = {
    "a number": "42",
    "true": True,
    "a dict": {"target": 24},
    "nested lists": [[1, 2], [3]],
    "a dict as text": "{'inputs': 1}",
    "its own names": "x = 1\nassert x == 1",
    "a module's": "assert math.pi > 3",
    "no assert": "add(1, 2) == 3\nadd",
    "a solution": ADD,
    "a test that nobody calls": "def test_add():\n    assert add(1, 2) == 3\n",
    "one of two": ["assert add(1, 2) == 3", "assert 1"],
    "no output": {"inputs": ["1\n"], "outputs": ["\n"]},
}
LACKING = {
    "counts": (PAIRS | {"outputs": ["3\n"]}, {}, "2 inputs and 1 outputs"),
    "no name": (CASES, {}, "needs the function's name"),
    "calls without a name": ({"inputs": [[1, 2]], "outputs": [3]}, {}, "name the function"),
    "another kind": ([{"input": "1", "output": "1", "testtype": "file"}], {}, "neither 'stdin' nor 'functional'"),
    "no arguments": (CALLS | {"inputs": ["x y", "z"], "outputs": ["1", "2"]}, {}, "is no JSON"),
    "no Python": ("add(1, 2) is 3?", {}, "neither JSON nor Python"),
    "no check": ("", {"test": "assert add(1, 2) == 3", "entry_point": "add"}, "tests nothing"),
    "an idle check": ("", {"test": "def check(f):\n    pass\n", "entry_point": "add"}, "tests nothing"),
    "nothing": ("", {}, "needs tests"),
}


@pytest.mark.parametrize("name", IDLE)
def test_what_tests_nothing_is_refused_and_nothing_passes_it(name):
    assert "tests nothing of the program" in program_tests.refusal(IDLE[name], {})
    if name not in ("one of two", "no output"):
        assert score("x = 1", IDLE[name]) == score("print('banana')", IDLE[name]) == 0.0


@pytest.mark.parametrize("name", LACKING)
def test_forms_that_lack_a_part_say_which(name):
    truth, extra, words = LACKING[name]
    assert words in program_tests.refusal(truth, extra)


def test_a_pickle_is_refused_and_never_opened():
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(STDIN_CASES)))).decode()
    for truth in (packed, json.dumps(packed), [packed]):
        assert "it holds a pickle, which is never opened" in program_tests.refusal(truth, {}), truth


def test_a_program_that_knows_the_pairs_passes_them():
    for truth in (PAIRS, CALLS):
        assert score(program_tests.gold(truth, {}), truth) == 1.0
    assert program_tests.gold(ASSERTS, {}) == ""


def test_the_environment_judges_every_form_and_refuses_what_tests_nothing():
    tool = CodeTool(1.0)
    tool.reset({"prompt": "Add.", "answer": PAIRS})
    seen, reward, over, _ = tool.step([{"role": "assistant", "content": "print(3)"}])
    assert (reward, over) == (0.0, False) and seen[0]["content"] == "Test 2 of 2 fails: stdin '3 4\\n' prints '7\\n'"
    assert tool.step([{"role": "assistant", "content": READS}])[1:3] == (1.0, True)
    with pytest.raises(ValueError, match="tests nothing of the program"):
        tool.reset({"prompt": "Add.", "answer": 3})


CHEATS = {
    "a module that is not imported": ("assert np.isclose(f(), 3)", "class np:\n    isclose = lambda *a: True\n"),
    "a member that is not imported": ("assert isclose(f(), 3)", "isclose = lambda *a: True\n"),
    "a predicate": ("assert f().isdigit()", "class A:\n    isdigit = lambda self: True\n"),
    "keys that are no numbers": ("assert len(f()) == 1", "nan = float('nan')\n"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_what_a_program_brings_decides_no_test(name):
    test, names = CHEATS[name]
    returned = {"a predicate": "A()", "keys that are no numbers": "{nan: 1, float('nan'): 2}"}.get(name, "4")
    assert score(f"{names}def f(): return {returned}\n", test) == 0.0


def test_a_setup_lends_a_program_its_imports_and_classes_alone():
    setup = "import math\nclass Node:\n    pass\ndef solve(n): return n * n\nsquare = 9\n"
    test = {"test_list": ["assert f(3) == solve(3)"], "test_setup_code": setup}
    assert score("def f(n): return int(math.pow(n, 2)) if Node() else 0", "", test) == 1.0
    assert score("def f(n): return solve(n)", "", test) == score("def f(n): return square", "", test) == 0.0


def test_what_reads_a_name_of_the_program():
    for source in (
        "assert f(1)",
        "x = f(1)\nassert x",
        "def t():\n    assert f(1)\nt()",
        "try:\n    f()\nexcept ValueError: pass",
    ):
        assert program_tests.tests_something(ProgramTest(source)), source
