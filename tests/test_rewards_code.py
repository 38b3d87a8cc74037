"""Programs judged by tests: right, wrong, slow, hanging and cheating ones, MBPP's own solutions, and the limit that adapts."""

import gzip
import itertools
import json
import random

import numpy as np
import pytest
from test_rewards_pool import FORKS, Log, joined, pool, rollout

from jaxrl_post.rewards import Overrun, code
from jaxrl_post.rewards.limits import Adaptive, Fixed

pytestmark = FORKS
ADD = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nThat is it."
UNFIT = (123, 367, 927)  # of MBPP: one takes 5 s, two name a class that the file lacks
TESTS = {"test_list": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}


def judge(text, limit_s=1.0, **extra):
    return code.tests("src", text, "", {**(extra or TESTS), "rollout": {"limit_s": limit_s}})


def test_a_right_program_and_wrong_ones():
    found = judge(ADD)
    assert {name: found[name] for name in ("score", "acc", "passed")} == {"score": 1.0, "acc": 1.0, "passed": 1.0}
    assert 0 < found["cpu_s"] < 1
    assert judge(ADD.replace("a + b", "abs(a) + b"))["passed"] == 0.5
    for text in (
        "",
        "def add(a, b",
        "def add(a, b): return a - b",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "def add(a, b): raise SystemExit(0)",
        "x = bytearray(1 << 31)",
        "open('/tmp/x', 'w').write('x' * (1 << 22))",
    ):
        assert judge(text)["score"] == 0.0, text


def test_what_goes_beyond_the_limit_is_a_verdict():
    for text in (
        "while True: pass",
        "import signal\nsignal.signal(signal.SIGPROF, signal.SIG_IGN)\nwhile True: pass",
        "import time\ntime.sleep(60)",
    ):
        with pytest.raises(Overrun) as caught:
            judge(text, 0.2)
        assert caught.value.args[0]["score"] == 0.0 and caught.value.args[0]["cpu_s"] < 3


def test_where_tests_come_from():
    assert code.code("no fence") == "no fence" and code.code("```py\na\n```\n```py\nb\n```") == "b\n"
    assert code.tests("s", "x = 3", "assert x == 3", {})["score"] == 1.0
    assert code.tests("s", "x = 3", json.dumps(["assert x == 3", "assert x == 4"]), {})["passed"] == 0.5
    extra = {"prompt": "def twice(n):\n", "test": "def check(f):\n    assert f(2) == 4\n", "entry_point": "twice"}
    assert code.tests("s", "    return 2 * n", "", extra)["score"] == 1.0
    assert code.tests("s", "    return n", "", extra)["score"] == 0.0
    with pytest.raises(ValueError, match="a program needs tests"):
        code.tests("s", "x = 3", "", {})


@pytest.mark.parametrize("mbpp, humaneval", [(10, 5), pytest.param(40, 20, marks=pytest.mark.shown("verdicts"))])
def test_real_tasks_accept_their_own_solutions_and_no_others(data_dir, mbpp, humaneval):
    rows = [json.loads(line) for line in (data_dir / "mbpp" / "mbpp.jsonl").read_text().splitlines()]
    chosen = random.Random(0).sample([row for row in rows if row["task_id"] not in UNFIT], mbpp)
    right = [code.tests("mbpp", row["code"], "", row)["score"] for row in chosen]
    wrong = [code.tests("mbpp", other["code"], "", row)["score"] for row, other in itertools.pairwise(chosen)]
    assert right == [1.0] * mbpp and sum(wrong) == 0
    with gzip.open(data_dir / "humaneval" / "HumanEval.jsonl.gz", "rt") as file:
        tasks = random.Random(0).sample([json.loads(line) for line in file], humaneval)
    assert [code.tests("humaneval", task["canonical_solution"], "", task)["score"] for task in tasks] == [
        1.0
    ] * humaneval
    assert sum(code.tests("humaneval", "    pass\n", "", task)["score"] for task in tasks) == 0


QUOTE = '"'
BODY = "def add(a, b):\n    return a + b\n"
FENCES = {
    "capital": f"```Python\n{BODY}```\nIt adds.",
    "number": f"~~~ python3.12\n{BODY}~~~",
    "words behind": f"```py title=add.py\n{BODY}```",
    "class": f"````{{.python .numberLines}}\n{BODY}````",
    "list": "1. Code:\n   ```python\n"
    + BODY.replace("def", "   def").replace("    return", "       return")
    + "   ```\n",
    "quote": "> ```python\n> def add(a, b):\n>     return a + b\n> ```\n",
    "without end": f"So:\n```python\n{BODY}",
    "output behind": f"```python\n{BODY}```\nOutput:\n```\n3\n```\n",
    "shell behind": f"```python\n{BODY}```\n```bash\npython add.py\n```\n",
    "in tags": f"<answer>\n```python\n{BODY}```\n</answer>",
    "no language": f"Input:\n```json\n1\n```\n```\n{BODY}```\nDone.",
    "behind words": f"Sure: ```python\n{BODY}\n\n```\nThat is it.",
    "end behind code": "```python\ndef add(a, b):\n    return a + b```\nDone.\n",
    "windows": f"```python\n{BODY}```\n".replace("\n", "\r\n"),
    "fence in a text": f"```python\ndef add(a, b):\n    {3 * QUOTE}\n    ```\n    1\n    ```\n    {3 * QUOTE}\n    return a + b\n```\n",
}


@pytest.mark.parametrize("form", FENCES)
def test_the_program_in_a_text_of_markdown(form):
    space = {}
    exec(code.code(FENCES[form]), space)
    assert space["add"](1, 2) == 3


def test_a_shell_block_alone_is_no_program():
    assert code.code("```bash\nls\n```") == "```bash\nls\n```"


def test_the_limit_adapts_by_hand():
    """RollPacker's T = min(max(2, 1.5 x slowest right one), 30)."""

    def record(prompt_id, cpu_s, acc=1.0):
        return {"prompt_id": prompt_id, "cpu_s": cpu_s, "components": {"acc": acc}}

    limits = Adaptive(30.0, [record("a", 0.5)])
    assert limits.of("a") == 2.0 and limits.of("b") == 30.0
    for cpu_s, acc, want in ((4.0, 1.0, 6.0), (9.0, 0.0, 6.0), (3.0, 1.0, 6.0), (28.0, 1.0, 30.0)):
        limits.scored(record("a", cpu_s, acc))
        assert limits.of("a") == want
    limits.scored({"prompt_id": "b", "components": {"acc": 1.0}})  # a grader that tells no seconds
    assert limits.of("b") == 30.0 and Fixed(7.0).of("a") == 7.0


GRADER = """
def timed(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "limit": extra_info["rollout"]["limit_s"], "cpu_s": float(solution_str)}
"""


def test_the_pool_tells_the_limit_and_journals_it_with_what_was_taken(tmp_path):
    (tmp_path / "graders.py").write_text(GRADER)
    journal, out = Log(), []
    with pool(str(tmp_path / "graders.py"), "timed", journal=journal, limits=Adaptive(30.0)) as rewards:
        for text in ("4.0", "1.0", "10.0", "1.0"):
            out.append(joined(rewards, rollout(text)))
    assert [list(one.components) for one in out] == [["acc", "limit"]] * 4
    np.testing.assert_array_equal([one.components["limit"][0] for one in out], [30.0, 6.0, 6.0, 15.0])
    assert [(record["limit_s"], record["cpu_s"]) for record in journal] == [
        (30.0, 4.0),
        (6.0, 1.0),
        (6.0, 10.0),
        (15.0, 1.0),
    ]
    again = Adaptive(30.0, journal)
    assert again.of("p") == 15.0
