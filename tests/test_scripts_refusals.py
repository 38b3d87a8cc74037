"""The judge of mistakes: it notices each way to break the promise, and the cases have its form."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import refusals  # noqa: E402

SAYS = "import sys, os; {}; print('error: a sentence', file=sys.stderr); sys.exit(1)"


def judged(tmp_path, program, **more):
    case = {"name": "n", "files": {"a/kept.txt": "kept"}, "argv": ["-c", program], "says": "a sentence"}
    return refusals.wrong(case | more, tmp_path)


def test_what_keeps_the_promise(tmp_path):
    assert judged(tmp_path, SAYS.format("pass")) is None
    assert judged(tmp_path, SAYS.format("open('.lock', 'w')"), may_appear=[".lock"]) is None
    before = [["-c", "open('made.txt', 'w').write('x')"], ["-c", "import os; os.mkdir('empty')"]]
    program = SAYS.format("assert open('made.txt').read() == 'x' and not os.path.exists('a')")
    assert judged(tmp_path, program, before=before, lost=["a"]) is None
    assert (
        judged(tmp_path, SAYS.format("print('warning', file=sys.stderr)").replace("exit(1)", "exit(3)"), code=3) is None
    )


@pytest.mark.parametrize(
    "program, more, found",
    [
        (SAYS.format("open('a/kept.txt', 'w')"), {}, "it changed or removed ['a/kept.txt']"),
        (SAYS.format("os.remove('a/kept.txt')"), {}, "it changed or removed ['a/kept.txt']"),
        (SAYS.format("open('new', 'w')"), {"may_appear": ["other"]}, "it left ['new']"),
        (SAYS.format("os.mkdir('new')"), {}, "it left ['new/']"),
        (SAYS.format("pass"), {"says": "another"}, "it says 'error: a sentence', not 'another'"),
        (SAYS.format("pass").replace("exit(1)", "exit(0)"), {}, "exit code 0"),
        (SAYS.format("print('error: more', file=sys.stderr)"), {}, "2 lines begin with 'error: '"),
        ("1 / 0", {}, "a traceback"),
        ("raise SystemExit(1)", {}, "0 lines begin"),
        (SAYS.format("pass"), {"before": [["-c", "1 / 0"]]}, "before: exit code 1"),
        (SAYS.format("pass"), {"sayz": ""}, "unknown keys ['sayz']"),
    ],
)
def test_what_breaks_it(tmp_path, program, more, found):
    assert str(judged(tmp_path, program, **more)).startswith(found)


def test_commands_of_the_package_run_in_forks_of_one_process():
    says = "^error: unknown command 'optionz'; nearest is 'options'"
    cases = [
        {"name": "n", "files": {}, "says": says, "argv": ["-m", "jaxrl_post", *words]}
        for words in (["optionz"], ["options"])
    ]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "refusals.py")],
        input="".join(json.dumps(case) + "\n" for case in cases),
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    kept, broken = map(json.loads, done.stdout.splitlines())
    assert kept is None and broken.startswith("exit code 0; it said: ")


def test_every_case_has_a_name_of_its_own_and_a_sentence():
    for file in sorted((ROOT / "scripts" / "mistakes").glob("*.py")):
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        names = [case["name"] for case in module.CASES]
        assert names and len(set(names)) == len(names), file
        for case in module.CASES:
            assert set(case) <= refusals.KEYS and {"name", "files", "argv", "says"} <= set(case), case["name"]
            assert len(re.sub(r"\W", "", case["says"])) >= 5, case["name"]
