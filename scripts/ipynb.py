"""Writes the notebooks of notebooks/ from their Python sources, runs them, and renders them as pages.

    python scripts/ipynb.py               writes NAME.ipynb beside each NAME.py that has cells, without outputs
    python scripts/ipynb.py --check       writes nothing; exits 1 where a notebook is not what its source gives
    python scripts/ipynb.py --html=FILE   runs the demo in a kernel of its own and writes it with its outputs as a page

A source has cells marked by "# %%" (jupytext's py:percent). Notebooks are generated: edit the source.

Needs jupytext, nbclient and nbconvert, of the extra `test`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import jupytext
import nbclient
import nbconvert
import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
DEMO = FOLDER / "jaxrl_post_demo.py"
LIMIT_S = 1800.0  # of one cell
METADATA = {
    "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
    "language_info": {"name": "python"},
}


def sources(folder: Path = FOLDER) -> list[Path]:
    """Returns the Python files that are notebooks."""
    return [file for file in sorted(folder.glob("*.py")) if file.read_text(encoding="utf-8").startswith("# %%")]


def read(source: Path) -> NotebookNode:
    """Returns the notebook of a source, without outputs. Its cells are named by their place, so that it is made equal again."""
    notebook = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for place, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{place}", nbformat.from_dict({})
    nbformat.validate(notebook)
    return notebook


def text(notebook: NotebookNode) -> str:
    """Returns the content of a notebook's file."""
    return f"{nbformat.writes(notebook).rstrip()}\n"


def run(notebook: NotebookNode, folder: Path, environment: Mapping[str, str] | None = None) -> NotebookNode:
    """Runs all cells in a new kernel of this interpreter, in `folder`, and returns the notebook with its outputs.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
    """
    client = nbclient.NotebookClient(
        notebook, timeout=int(LIMIT_S), kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    return client.execute(env={**os.environ, **(environment or {})})


def page(notebook: NotebookNode) -> str:
    """Returns a notebook with its outputs as one HTML file that loads nothing from elsewhere.

    Formulas need a script of another host, and a badge an image. The notebook has no formula, and a badge is its text.
    """
    html, _ = nbconvert.HTMLExporter(template_name="lab").from_notebook_node(notebook)
    html = re.sub(r'<script[^>]*\bsrc="https?://[^"]*"[^>]*>\s*</script>', "", html)
    return re.sub(r'<img alt="([^"]*)" src="https?://[^>]*>', r"\1", html)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Writes, checks or runs the notebooks.", allow_abbrev=False)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--html", type=Path)
    given = parser.parse_args(arguments)
    if given.html is not None:
        given.html.parent.mkdir(parents=True, exist_ok=True)
        given.html.write_text(page(run(read(DEMO), FOLDER)), encoding="utf-8")
        print(given.html)
        return 0
    differ = 0
    for source in sources():
        file, made = source.with_suffix(".ipynb"), text(read(source))
        same = file.is_file() and file.read_text(encoding="utf-8") == made
        differ += not same
        if given.check and not same:
            print(f"{file.relative_to(ROOT)} is not what {source.name} gives: run python scripts/ipynb.py")
        elif not given.check:
            file.write_text(made, encoding="utf-8")
    return 1 if given.check and differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
