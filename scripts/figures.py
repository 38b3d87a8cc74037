"""Fills the figures of docs/performance.md and docs/modes.md from the results files: python scripts/figures.py [--check]

A row of a table that ends in a file and a key, `| what | 1.62 | demo.json | seed_0.seconds |`, gets the value of that figure.
The value keeps as many decimals as its cell has. A key goes into an object with `/`, and into a list with its index. A line
`Measured at commit ... in ... s by ...` above a table names the results file by its command and is filled too.

Between `<!-- modes: auto.json -->` and `<!-- end -->` stands the table of modes, whole. It is written from the figures of
the show `auto`.

Exit codes: 0 the pages are current, or were rewritten; 1 with --check, when one is not current.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
PAGES = (PAGE, ROOT / "docs" / "modes.md")
RESULTS = ROOT / "scripts" / "results"

_ROW = re.compile(r"^\| (?P<what>[^|]+) \| (?P<value>[^|]+) \| `(?P<file>[\w-]+\.json)` \| `(?P<key>[^`]+)` \|$")
_TABLE = re.compile(r"^(<!-- modes: ([\w-]+\.json) -->)$.*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(
    r"^Measured at commit `\w+` in [\d,]+ s by `python scripts/(?P<kind>show|bench)\.py (?P<name>[\w-]+)`(?P<rest>.*)$"
)


def filled(page: str, results: Path = RESULTS) -> str:
    """Returns the page with the figures of the results files.

    Raises:
      ValueError: a row names a file or a key that does not exist.
    """
    page = _TABLE.sub(lambda found: f"{found[1]}\n\n{modes(results / found[2])}\n\n{found[3]}", page)
    return "".join(f"{_line(line, results)}\n" for line in page.splitlines())


def modes(file: Path) -> str:
    """Returns the table of modes: how many times as fast as synchronous rounds each is, by workload and chips.

    Seconds are the mean over the scales of the cost of an engine step. Tail batching is the better of its candidates.

    Raises:
      ValueError: there is no such file.
    """
    if not file.is_file():
        raise ValueError(f"there is no results file {file.name}")
    read = json.loads(file.read_text())["figures"]
    pairs = {name: told for name, told in read.items() if isinstance(told, dict) and "predicted" in told}
    out = ["| lengths | chips | tail batching | pipeline | `auto` chose |", "|---|---|---|---|---|"]
    for name, told in pairs.items():
        lengths, _, chips = name.partition(".")
        scales = [scaled for scaled in told.values() if isinstance(scaled, dict) and scaled is not told["predicted"]]
        seconds = {mode: sum(scaled[mode] for scaled in scales) for mode in scales[0]}
        best = {
            kind: min((one for mode, one in seconds.items() if mode.startswith(kind)), default=0.0)
            for kind in ("tail_batching", "pipeline")
        }
        cells = (f"{seconds['sync'] / one:.2f}" if one else "not allowed" for one in best.values())
        chosen = told["chosen"].replace(" ahead=16", "")
        words = lengths.replace("_", " "), chips.replace(".", ", ")
        out.append(f"| {' | '.join([*words, *cells])} | `{chosen}` |")
    return "\n".join(out)


def _line(line: str, results: Path) -> str:
    if row := _ROW.match(line):
        value = shown(figure(results / row["file"], row["key"]), row["value"])
        return f"| {row['what']} | {value} | `{row['file']}` | `{row['key']}` |"
    if command := _COMMAND.match(line):
        read = json.loads((results / f"{command['name']}.json").read_text())
        return (
            f"Measured at commit `{read['commit'][:7]}` in {read['seconds']:,.0f} s "
            f"by `python scripts/{command['kind']}.py {command['name']}`{command['rest']}"
        )
    return line


def figure(file: Path, key: str) -> Any:
    """Returns a figure of a results file, or a part of one.

    Raises:
      ValueError: the file or the key does not exist.
    """
    if not file.is_file():
        raise ValueError(f"there is no results file {file.name}")
    name, *parts = key.split("/")
    value = json.loads(file.read_text())["figures"]
    for part in (name, *parts):
        index = int(part) if isinstance(value, list) else part
        if (index not in value) if isinstance(value, dict) else not (isinstance(value, list) and index < len(value)):
            raise ValueError(f"{file.name} has no figure {key!r}: {part!r} is missing")
        value = value[index]
    return value


def shown(value: Any, like: str) -> str:
    """Returns a figure as text in the form of `like`: its decimals, thousands separators or exponent."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return str(value)
    decimals = len(re.sub(r"e.*", "", like).partition(".")[2])
    kind = "e" if "e" in like else "f"
    return f"{value:,.{decimals}{kind}}"


def main(arguments: list[str]) -> int:
    code = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        current = filled(text)
        if "--check" in arguments:
            words = "is current" if text == current else "is not current: run python scripts/figures.py"
            print(f"docs/{page.name} {words}")
            code |= text != current
        else:
            page.write_text(current, encoding="utf-8")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
