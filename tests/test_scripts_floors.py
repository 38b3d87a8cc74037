"""The picture of the floors: the committed one is current, and floors, arrows and rooms are those of the imports."""

from __future__ import annotations

import sys
from pathlib import Path

import house
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import floors  # noqa: E402


def test_the_picture_in_the_page_is_current():
    page = (ROOT / floors.PAGE).read_text(encoding="utf-8")
    assert page == floors.placed(page, floors.picture(floors.rooms(house.Tree(ROOT)))), "run python scripts/floors.py"


def planted(root: Path, files: dict[str, str]) -> house.Tree:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return house.Tree(root)


def test_rooms_are_read_from_every_kind_of_import(tmp_path):
    tree = planted(
        tmp_path,
        {
            "jaxrl_post/__init__.py": "",
            "jaxrl_post/__main__.py": "import importlib\nC = {'train': 'jaxrl_post.main', 'x': 'jaxrl_post.gone'}",
            "jaxrl_post/main.py": "from jaxrl_post.engine import rows\nimport numpy",
            "jaxrl_post/engine/__init__.py": "from .rows import x",
            "jaxrl_post/engine/rows.py": "def f():\n    from ..ring import y\n'jaxrl_post.main'",
            "jaxrl_post/ring/__init__.py": "",
            "kernels/attention.py": "import jaxrl_post.ring",
            "configs/demo.py": "from jaxrl_post.ring import types",
            "scripts/shows/x.py": "def f():\n    import jaxrl_post.main, jaxrl_post\n    from models import y",
        },
    )
    graph = floors.rooms(tree)
    assert graph == {
        "__main__": {"main"},
        "configs": {"ring"},
        "engine": {"ring"},
        "kernels": {"ring"},
        "main": {"engine"},
        "scripts": {"main"},
        "ring": set(),
    }
    assert floors.arrows(graph) == 6
    assert floors.floors(graph) == [["ring"], ["configs", "engine", "kernels"], ["main"], ["__main__", "scripts"]]


def test_a_picture_by_hand():
    assert floors.picture({"top": {"left", "low"}, "left": {"low"}, "low": set()}).splitlines()[2:] == [
        "```text",
        "┌" + "─" * 94 + "┐",
        "│ 2   top".ljust(95) + "│",
        "├" + "─" * 94 + "┤",
        "│ 1   left".ljust(95) + "│",
        "├" + "─" * 94 + "┤",
        "│ 0   low".ljust(95) + "│",
        "└" + "─" * 94 + "┘",
        "```",
        "",
        "| floor | room | imports |",
        "|---|---|---|",
        "| 2 | `top` | `left`, `low` |",
        "| 1 | `left` | `low` |",
        "| 0 | `low` | nothing |",
    ]


def test_circles_and_pages_without_marks_are_refused():
    with pytest.raises(ValueError, match="rooms import one another in a circle: a, b"):
        floors.floors({"a": {"b"}, "b": {"a"}, "c": set()})
    with pytest.raises(ValueError, match="must hold <!-- floors:end --> once, got 0"):
        floors.placed(f"x\n{floors.BEGIN}\n", "y")
    marked = f"a\n{floors.BEGIN}\nold\n{floors.END}\nb\n"
    assert floors.placed(marked, "new") == f"a\n{floors.BEGIN}\nnew\n{floors.END}\nb\n"
