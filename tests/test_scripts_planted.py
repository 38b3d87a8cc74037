"""Faults are found by their tokens and nowhere else, the list fits the tree, and the runner tells caught, survived and stale."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import planted  # noqa: E402
from faults.fault import Fault, Mismatch, place, plant  # noqa: E402
from faults.fault import planted as with_it  # noqa: E402

SOURCE = '''"""A module."""


def outer(a, b):
    def inner(x):
        return {
            "low": x < a,  # a comment
            'high': x > b,
        }

    return inner(a + b)


class Box:
    def low(self, x, a):
        if x < a:
            return f"{x} is low"
        return x < a - 1
'''
FAULT = Fault(id="m.f", file="m.py", where="", before="", after="", why="", tests=())


def changed(before, after, where=""):
    """The lines that a fault changes: old and new."""
    out = with_it(SOURCE, dataclasses.replace(FAULT, before=before, after=after, where=where))
    old, new = Counter(SOURCE.splitlines()), Counter(out.splitlines())
    return sorted(line.strip() for line in old - new), sorted(line.strip() for line in new - old)


@pytest.mark.parametrize(
    "before",
    ["x > b", "x>b", "x  # whatever\n  > b", '"high": x > b', "'high' : x > b,", '{"low": x < a, "high": x > b}'],
)
def test_layout_comments_quotes_and_trailing_commas_do_not_count(before):
    old, new = changed(before, "NEW" if before[0] in "x{" else "'high': NEW")
    assert len(old) == (4 if before[0] == "{" else 1) and any("NEW" in line for line in new)


def test_a_function_may_be_named():
    assert changed("x < a", "x <= a", "outer.inner")[1] == ['"low": x <= a,  # a comment']
    assert changed("if x < a", "if x <= a", "Box.low")[1] == ["if x <= a:"]
    assert changed("inner(a + b)", "inner(a - b)", "outer") == (["return inner(a + b)"], ["return inner(a - b)"])


def test_further_lines_are_indented_like_the_first():
    out = with_it(SOURCE, dataclasses.replace(FAULT, before="return inner(a + b)", after="a = 1\nreturn a"))
    assert "    a = 1\n    return a\n" in out


@pytest.mark.parametrize(
    "before, after, where, words",
    [
        ("x < a", "x", "", "occurs 3 times in m.py, it must occur once"),
        ("x < a", "x", "Box.low", "occurs 2 times in Box.low of m.py"),
        ("x < c", "x", "", "occurs 0 times"),
        ("x < a", "x", "outer.other", "has 0 times a function or class 'outer.other'"),
        ("return inner(a + b)", "return inner(a + )", "", "is no Python"),
        ("return inner(a + b)", "return  inner(a + b)", "", "it changes nothing"),
        ("inner(a + b", "inner(a", "", "balanced brackets"),
    ],
)
def test_what_does_not_fit_is_said(before, after, where, words):
    with pytest.raises(Mismatch, match=r"(?s).*") as said:
        changed(before, after, where)
    assert words in str(said.value)


def test_a_file_that_moved_is_named(tmp_path):
    (tmp_path / "jaxrl_post" / "room").mkdir(parents=True)
    (tmp_path / "jaxrl_post" / "room" / "n.py").write_text(SOURCE)
    with pytest.raises(Mismatch, match="there is no file m.py; its tokens are in jaxrl_post/room/n.py"):
        plant(tmp_path, dataclasses.replace(FAULT, before="inner(a + b)", after="inner(a)"))


def test_every_fault_of_the_list_fits_the_tree_and_names_tests_that_are_there():
    faults, tests = planted.known(), planted.Selection(ROOT)
    assert max(Counter(fault.id for fault in faults).values()) == 1 and len(faults) >= 120
    stale = []
    for fault in faults:
        try:
            place((ROOT / fault.file).read_text(), fault) if (ROOT / fault.file).is_file() else plant(ROOT, fault)
            assert tests.ids(fault)
        except Mismatch as mismatch:
            stale.append(str(mismatch))
    assert not stale, "\n".join(stale)


def test_names_choose_rooms_files_and_single_faults():
    faults = [
        dataclasses.replace(FAULT, id=id, file=f"jaxrl_post/{room}")
        for id, room in (("a.x", "r/a.py"), ("b.y", "b.py"))
    ]
    assert [planted.chosen(faults, [name]) for name in ("r", "a", "a.x", "b")] == [faults[:1]] * 3 + [faults[1:]]
    assert planted.chosen(faults, []) == faults == planted.chosen(faults, ["b", "r"])
    with pytest.raises(KeyError, match="c"):
        planted.chosen(faults, ["c"])


@pytest.fixture
def tree(tmp_path):
    """A project of one module and two tests."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "sums.py").write_text("def plus(a, b):\n    return a + b\n\n\ndef times(a, b):\n    return a * b\n")
    (tmp_path / "tests" / "test_sums.py").write_text(
        "import sums\n\n\ndef test_plus():\n    assert sums.plus(2, 2) == 4\n\n\n"
        "def test_times():\n    assert sums.times(2, 2) == 4\n"
    )
    unshrunk = tmp_path / "scripts" / "faults" / "unshrunk.py"
    unshrunk.parent.mkdir(parents=True)
    unshrunk.write_text((ROOT / "scripts" / "faults" / "unshrunk.py").read_text())
    return tmp_path


def fault(name, before, after, *tests):
    return Fault(id=f"sums.{name}", file="sums.py", where="", before=before, after=after, why="", tests=tests)


def test_caught_survived_and_stale(tree, capsys):
    """2 + 2 is 2 * 2: the second fault survives. The copy comes back to what it was after each."""
    source = (tree / "sums.py").read_bytes()
    faults = [
        fault("minus", "a + b", "a - b", "test_plus"),
        fault("product", "a + b", "a * b", "test_sums.py"),
        fault("gone", "a / b", "a", "test_plus"),
        fault("untested", "a * b", "a", "test_division"),
        fault("power", "a * b", "a - b", "test_sums.py"),
    ]
    outcomes = planted.tried(faults, root=tree, workers=1)
    verdicts = ["caught", "survived", "not planted", "not planted", "caught"]
    assert [outcome.verdict for outcome in outcomes] == verdicts
    assert [outcomes[i].by for i in (0, 4)] == ["test_sums.py::test_plus", "test_sums.py::test_times"]
    assert "occurs 0 times" in outcomes[2].by and "no test 'test_division'" in outcomes[3].by
    assert (tree / "sums.py").read_bytes() == source
    said = capsys.readouterr().out
    assert all(outcome.fault.id in said for outcome in outcomes) and "without a fault all tests pass" in said


def test_a_test_that_never_ends_has_caught_its_fault_by_the_clock(tree):
    hangs = fault("hangs", "return a * b", "import time\ntime.sleep(600)", "test_times")
    (outcome,) = planted.tried([hangs], root=tree, workers=1, limit_s=0.1, checked=False)
    assert (outcome.verdict, outcome.by) == ("caught", "the clock: no end after 0.1 s")


def test_tests_that_fail_without_a_fault_catch_nothing(tree):
    (tree / "tests" / "test_sums.py").write_text("def test_plus():\n    assert False\n")
    with pytest.raises(planted.Red, match="though nothing is planted"):
        planted.tried([fault("minus", "a + b", "a - b", "test_plus")], root=tree, workers=1)
