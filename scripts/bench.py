"""Measures: `python scripts/bench.py NAME --json FILE [ARGUMENTS]` writes one object of figures under stable keys.

Without a name it lists the benches. A bench is a file scripts/benches/NAME.py, with underscores for hyphens. Its
docstring's first line says what is measured. Its function

    def bench(record: Record) -> None

writes its figures with `record.figure(key, value)` and reads what followed its name in `record.args`. The object has the
shape of a show's result (scripts/record.py).

Exit codes: 0 measured; 1 a bound that the bench set is missed, or the bench failed; 2 wrong usage or missing real inputs.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib.util
import sys
from pathlib import Path

from record import ROOT, Missing, Record, write_json

FOLDER = Path(__file__).resolve().parent / "benches"


def benches(folder: Path) -> dict[str, Path]:
    """Name -> file, sorted by name."""
    return {file.stem.replace("_", "-"): file for file in sorted(folder.glob("*.py"))}


def listing(known: dict[str, Path]) -> str:
    """Returns one line per bench: name and what is measured."""
    width = max(map(len, known), default=0)
    return "\n".join(
        f"{name.ljust(width)}  {(ast.get_docstring(ast.parse(file.read_text())) or '').partition(chr(10))[0]}"
        for name, file in known.items()
    )


def main(argv: list[str], folder: Path = FOLDER) -> int:
    parser = argparse.ArgumentParser(description="Measures and writes one JSON object.", allow_abbrev=False)
    parser.add_argument("name", nargs="?")
    parser.add_argument("--json", type=Path, help="file to write; without it the figures are only printed")
    options, args = parser.parse_known_args(argv)
    known = benches(folder)
    if options.name is None:
        print(listing(known))
        return 0
    if options.name not in known:
        near = difflib.get_close_matches(options.name, known, n=1)
        print(
            f"no bench is called {options.name!r}"
            + (f"; nearest is {near[0]!r}" if near else f"; there are {', '.join(known)}"),
            file=sys.stderr,
        )
        return 2
    file = known[options.name]
    record = Record(
        options.name, ["python", "scripts/bench.py", *argv], args, root=folder.resolve().parents[1], file=file
    )
    spec = importlib.util.spec_from_file_location(f"benches.{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        module.bench(record)
    except (Missing, ValueError) as wrong:
        print(wrong, file=sys.stderr)
        return 2
    if options.json:
        write_json(options.json, record.to_dict())
    print(record.table())
    return 0 if record.ok else 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
