"""Counting the weight of a tree, by small trees whose numbers are known."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import house
import pytest
import weights

SOURCE = '''"""Text."""
import a


class B:
    """Text."""

    def f(self, x):
        """Text."""
        if x:
            return 1
        return 2
'''


def _tree(root: Path, **files: str) -> house.Tree:
    for name, text in {"__init__": "", **files}.items():
        (root / "jaxrl_post" / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (root / "jaxrl_post" / f"{name}.py").write_text(text)
    return house.Tree(root)


def test_statements_are_counted_without_docstrings():
    assert weights.statements(ast.parse(SOURCE)) == 6  # import, class, def, if, return, return


def test_a_tree_is_weighed_by_place_and_room(tmp_path):
    _tree(tmp_path, main=SOURCE)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.py").write_text("x = 1\n")
    (tmp_path / "jaxrl_post" / "untracked.py").write_text(SOURCE)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "faults.txt").write_text("a = 1\nb = 2\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(
        ["git", "add", "jaxrl_post/__init__.py", "jaxrl_post/main.py", "configs", "scripts"], cwd=tmp_path, check=True
    )
    assert weights.weigh(tmp_path) == {
        "elsewhere": (1, 1, 1),
        "product": (2, 12, 6),
        "room.__init__": (1, 0, 0),
        "room.main": (1, 12, 6),
        "scripts": (1, 2, 0),
    }


@pytest.mark.parametrize(
    "text, lines",
    [
        ("a = 1; b = 2", [1]),
        ("x = 0\nif x: y = 1", [2]),
        ("for x in y:\n    a; b", [2]),
        ("try: a\nexcept E: b", [1, 2]),
        ("def f(): ...", []),
        ("class A: ...", []),
        ("if x:\n    a\nelif y:\n    b\nelse:\n    c", []),
    ],
)
def test_a_line_with_two_statements_is_found(text, lines):
    assert weights.double_lines(ast.parse(text)) == lines


def test_folders_with_many_files_are_found(tmp_path):
    tree = _tree(tmp_path, **{f"x{i}": "" for i in range(25)})
    assert weights.crowded_folders(tree) == {"jaxrl_post": 26}


def test_signatures_with_many_parameters_are_found(tmp_path):
    many, most = ", ".join(f"a{i}" for i in range(13)), ", ".join(f"a{i}" for i in range(12))
    text = f"def f({many}): ...\ndef _g({many}): ...\nclass A:\n    def __init__(self, *, {many}): ...\n"
    text += f"    def h(self, {most}): ...\n"
    assert weights.wide_signatures(_tree(tmp_path, main=text)) == {
        "jaxrl_post.main:f": 13,
        "jaxrl_post.main:A.__init__": 13,
    }


def test_a_helper_with_one_caller_is_found_where_both_fit_into_one_function(tmp_path):
    text = (
        "def f():\n    return _once() + _twice() + _twice() + _long()\n\n"
        "def _once():\n    return 1\n\ndef _twice():\n    return 1\n\n"
        "def _long():\n" + "    x = 1\n" * 58 + "\ntable = {'a': _cell}\n\ndef _cell():\n    return 1\n"
    )
    assert weights.lone_helpers(_tree(tmp_path, main=text)) == {"jaxrl_post.main:_once": "f"}
