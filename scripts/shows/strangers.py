"""Strangers' inputs meet no silent mistake: of every kind at least 20 members, each with its right value.

The members of a kind are made by scripts/strangers: tables, or generated with a fixed seed. A name after the show's
runs one file of that folder: `python scripts/show.py strangers answers`.
"""

from __future__ import annotations

import importlib

MINUTES = 30.0
PLATFORM = "cpu"
SOURCES = ("scripts/strangers/*.py",)
LEAST = 20
EXAMPLES = 3  # of the wrong ones, in the results


def show(record) -> None:
    files = sorted(file.stem for file in (record.root / "scripts" / "strangers").glob("[!_]*.py"))
    for name in record.args or files:
        for kind, members in importlib.import_module(f"strangers.{name}").KINDS.items():
            found = members()
            record.figure(f"{name}.{kind}.tried", found.tried, at_least=LEAST)
            record.figure(f"{name}.{kind}.wrong", len(found.wrong), equals=0)
            record.figure(f"{name}.{kind}.wrong_examples", list(found.wrong[:EXAMPLES]))
