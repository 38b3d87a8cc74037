"""Sentences of pages, docstrings and comments: how long they are, and which retired words they and identifiers use.

`python tests/prose.py [FILE ...]` prints the findings in files, or in all pages and sources. Nothing here imports the project.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 30  # words of a sentence
SOURCES = ("jaxrl_post", "kernels", "scripts", "configs", "notebooks")
PRODUCT = ("jaxrl_post/", "kernels/")
GLOSSARY = "docs/glossary.md"
KEPT = {  # identifiers with a retired word, and where: options, and fields of a saved state
    "carry_over": "",
    "answers": "jaxrl_post/scheduler/pipeline.py",
}

_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=\S)")
_SHORT = re.compile(r"\b(?:e\.g|i\.e|cf|vs|etc|al|Fig|eq|no|Dr|approx)\.$")
_NUMBERED = re.compile(r"(?:\d+|[A-Z])\.$")
_ITEM = re.compile(r"^([-*+]|\d+\.)\s+")
_ENTRY = re.compile(r"\*{0,2}[\w., ]+:(\s|$)")  # `name: text` of an Args or Raises section
_COLUMN = re.compile(r"(--\S+|\S+( \S+)*?\s{2,}\S)")  # an option, or an entry whose text stands in a column
_SECTION = re.compile(r"\w+:")  # Args:, Raises:
_COMMAND = re.compile(r"(\$ |python |make |sh |cp |kubectl |git |XLA_FLAGS|JAX_|>>>)")


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """One sentence of a file. Inline code counts as one word."""

    path: str
    line: int
    text: str

    @property
    def words(self) -> int:
        return sum(any(letter.isalnum() for letter in word) for word in self.text.split())


def pages(root: Path = ROOT) -> list[Path]:
    """Returns README.md, CONTRIBUTING.md and every page of docs/."""
    top = [root / name for name in ("README.md", "CONTRIBUTING.md")]
    return [path for path in (*top, *sorted((root / "docs").rglob("*.md"))) if path.is_file()]


def sources(root: Path = ROOT) -> list[Path]:
    """Returns the Python files that are shipped."""
    return [path for folder in SOURCES for path in sorted((root / folder).rglob("*.py"))]


def of_page(text: str, path: str = "") -> list[Sentence]:
    """Returns the sentences of a Markdown page: paragraphs, list items, headings and table cells, without code blocks."""
    return [sentence for line, block in _blocks(text) for sentence in _split(block, line, path)]


def of_source(text: str, path: str = "") -> list[Sentence]:
    """Returns the sentences of docstrings and comments of a Python file."""
    found = [(line, block) for line, block in (*_docstrings(ast.parse(text)), *_comments(text))]
    return sorted(
        (sentence for line, block in found for sentence in _split(block, line, path)), key=lambda one: one.line
    )


def of_file(file: Path, root: Path = ROOT) -> list[Sentence]:
    """Returns the sentences of a page or a source."""
    read = of_page if file.suffix == ".md" else of_source
    return read(file.read_text(encoding="utf-8"), file.relative_to(root).as_posix())


# ---- from text to blocks


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yields (first line, text) of each paragraph, item, heading or cell of a page."""
    lines, start, fenced = [], 1, False
    for number, raw in enumerate([*re.sub(r"<!--.*?-->", _blank, text, flags=re.DOTALL).splitlines(), ""], 1):
        line = raw.strip()
        fence = line.startswith("```")
        alone = line.startswith(("#", "|")) or not line or fence or _ITEM.match(line) or line.startswith("!!!")
        if lines and (alone or fenced):
            yield start, " ".join(lines)
            lines = []
        if fence:
            fenced = not fenced
        elif not fenced and line.startswith("|"):
            yield from ((number, cell.strip()) for cell in re.split(r"(?<!\\)\|", line.strip("|")))
        elif not fenced and line.startswith(("#", "!!!")):
            yield number, line.lstrip("#! ")
        elif not fenced and line:
            start = start if lines else number
            lines.append(_ITEM.sub("", line) if _ITEM.match(line) else line.lstrip("> "))


def _blank(match: re.Match) -> str:
    return "\n" * match[0].count("\n")


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            yield from _paragraphs(inspect.cleandoc(node.body[0].value.value).splitlines(), node.body[0].lineno)


def _paragraphs(lines: list[str], first: int) -> Iterator[tuple[int, str]]:
    """Yields blocks of a docstring. Each item and each entry of a section is a block; commands and code are left out."""
    block, start, depth = [], first, 0
    for number, raw in enumerate([*lines, ""], first):
        line, indent = raw.strip(), len(raw) - len(raw.lstrip())
        new = (
            not line
            or line.startswith("|")
            or _ITEM.match(line)
            or (_ENTRY.match(line) and indent <= depth)
            or indent < depth
        )
        new = new or _COLUMN.match(line) or (len(block) == 1 and _SECTION.fullmatch(block[0]))
        if block and new:
            yield start, " ".join(block)
            block = []
        if line.startswith("|"):
            yield from ((number, cell.strip()) for cell in line.strip("|").split("|"))
        if not line or line.startswith("|") or _COMMAND.match(line):
            continue
        if not block:
            start, depth = number, indent
        block.append(_ITEM.sub("", line))
    if block:
        yield start, " ".join(block)


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Yields blocks of comments: consecutive lines that hold nothing else, or one comment behind code."""
    block, start, last = [], 0, -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, alone = token.start[0], not token.line[: token.start[1]].strip()
        words = re.sub(r"^#+!?\s?(-{2,}\s)?", "", token.string).strip()
        if re.match(r"(noqa|type:|fmt:|pragma)", words) or not words:
            continue
        if block and not (alone and line == last + 1):
            yield start, " ".join(block)
            block = []
        start = start if block else line
        block.append(re.sub(r"\s*# noqa.*", "", words))
        last = line if alone else -1
    if block:
        yield start, " ".join(block)


def _split(block: str, line: int, path: str) -> Iterator[Sentence]:
    """Yields the sentences of a block."""
    text = re.sub(r"``?([^`]+)``?", _code, block)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+", "address", text)
    held = ""
    for piece in _END.split(text):
        held = f"{held} {piece}".strip()
        if not (_SHORT.search(held) or _NUMBERED.fullmatch(held)):
            yield Sentence(path=path, line=line, text=held)
            held = ""
    if held:
        yield Sentence(path=path, line=line, text=held)


def _code(match: re.Match) -> str:
    """One word for inline code, so that its spaces and full stops count for nothing."""
    return f"<{re.sub(r'[^A-Za-z0-9]', '', match[1])[:20] or 'code'}>"


# ---- findings


def retired(root: Path = ROOT) -> dict[str, str]:
    """Returns retired word -> its replacement, from the table under "Retired words" in the glossary.

    Raises:
      ValueError: the glossary has no such table.
    """
    _, _, rest = (root / GLOSSARY).read_text(encoding="utf-8").partition("## Retired words")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in rest.splitlines() if line.startswith("|")]
    words = {word.strip(): row[1] for row in rows[2:] for word in row[0].split(",")}
    if not words:
        raise ValueError(f"{GLOSSARY} has no table under the heading 'Retired words'")
    return words


def findings(sentences: list[Sentence], words: dict[str, str], limit: int = LIMIT) -> list[str]:
    """Returns a line for each sentence above the limit and for each retired word."""
    out = []
    patterns = {word: re.compile(rf"(?<![\w<]){re.escape(word)}(?![\w>])", re.IGNORECASE) for word in words}
    for one in sentences:
        if one.words > limit:
            out.append(f"{one.path}:{one.line}: {one.words} words: {one.text}")
        out += [
            f"{one.path}:{one.line}: retired word {word!r}, use {words[word]}: {one.text}"
            for word, pattern in patterns.items()
            if pattern.search(one.text)
        ]
    return out


def of_identifiers(text: str, words: dict[str, str], path: str = "") -> list[str]:
    """Returns a line for each identifier of a Python file that has a retired word among its parts."""
    patterns = {word: re.compile(f"_{re.sub('[- ]', '_', word)}_") for word in words}
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.NAME or KEPT.get(token.string.strip("_"), "nowhere") in ("", path):
            continue
        parts = f"_{re.sub('(?<=[a-z0-9])(?=[A-Z])', '_', token.string).lower()}_"
        for word, pattern in patterns.items():
            if pattern.search(parts):
                line = f"{path}:{token.start[0]}: {token.string} has the retired word {word!r}, use {words[word]}"
                found.setdefault((token.string, word), line)
    return list(found.values())


def of_pages(root: Path = ROOT) -> list[str]:
    """Returns the findings in all pages; the glossary's own table of retired words is not searched for them."""
    out = []
    for file in pages(root):
        text = file.read_text(encoding="utf-8")
        name = file.relative_to(root).as_posix()
        kept = text.partition("## Retired words")[0] if name == GLOSSARY else text
        out += findings(of_page(kept, name), retired(root))
    return out


def unclean(root: Path = ROOT) -> dict[str, list[str]]:
    """Returns source -> its findings, of the sources that have some."""
    words = retired(root)
    found = {}
    for file in sources(root):
        text, name = file.read_text(encoding="utf-8"), file.relative_to(root).as_posix()
        found[name] = findings(of_source(text, name), words)
        if name.startswith(PRODUCT):
            found[name] += of_identifiers(text, words, name)
    return {name: lines for name, lines in found.items() if lines}


def main(arguments: list[str]) -> int:
    if arguments:
        words = retired()
        lines = [line for name in arguments for line in findings(of_file(Path(name).resolve()), words)]
    else:
        lines = [*of_pages(), *(line for some in unclean().values() for line in some)]
    print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
