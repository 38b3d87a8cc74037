"""The judge of the show no-silent-mistakes: it notices each way to break the promise, and its cases have their form."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "shows"))

import no_silent_mistakes as refusals  # noqa: E402

SAYS = "import sys, os; {}; print('error: a sentence', file=sys.stderr); sys.exit(1)"


def judged(folder, program, **more):
    case = {"name": "n", "files": {"a/kept.txt": "kept"}, "argv": ["-c", program], "says": "a sentence"}
    return refusals.wrong(case | more, folder)


def test_what_keeps_the_promise(tmp_path):
    before = [["-c", "open('made.txt', 'w').write('x')"], ["-c", "import os; os.mkdir('empty')"]]
    assert judged(tmp_path, SAYS.format("assert open('made.txt').read() == 'x'"), before=before) is None


@pytest.mark.parametrize(
    "program, more, found",
    [
        (SAYS.format("open('a/kept.txt', 'w')"), {}, "it changed or removed ['a/kept.txt']"),
        (SAYS.format("os.remove('a/kept.txt')"), {}, "it changed or removed ['a/kept.txt']"),
        (SAYS.format("open('new', 'w')"), {}, "it left ['new']"),
        (SAYS.format("os.mkdir('new')"), {}, "it left ['new/']"),
        (SAYS.format("pass"), {"says": "another"}, "it says 'error: a sentence', not 'another'"),
        (SAYS.format("pass").replace("exit(1)", "exit(0)"), {}, "exit code 0"),
        (SAYS.format("print('error: more', file=sys.stderr)"), {}, "2 lines begin with 'error: '"),
        ("1 / 0", {}, "a traceback"),
        ("raise SystemExit(1)", {}, "0 lines begin"),
        (SAYS.format("pass"), {"before": [["-c", "1 / 0"]]}, "before: exit code 1"),
    ],
)
def test_what_breaks_it(tmp_path, program, more, found):
    assert str(judged(tmp_path, program, **more)).startswith(found)


def test_every_case_has_a_name_of_its_own_and_a_sentence():
    cases = refusals.cases()
    assert len(cases) >= 40 and len({case["name"] for case in cases}) == len(cases)
    assert all(len(re.sub(r"\W", "", case["says"])) >= 5 for case in cases)
    assert all((ROOT / "tests" / f"{name}.py").is_file() for name in refusals.TESTS)
