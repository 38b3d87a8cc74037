"""python -m jaxrl_post report RUN [RUN ...] [--out=FILE]

Writes one page on one or several runs, which may still be going on. It needs no network and no other file. Without --out
it is RUN/report.html, of the first run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxrl_post.commands.arguments import Arguments, answered
from jaxrl_post.config import refuse_url
from jaxrl_post.telemetry.page import document


def main(arguments: Sequence[str]) -> int:
    """Writes the page. Exit code 1, with one sentence, where a run cannot be read or the page cannot be written."""
    return answered(lambda: _written(_read(arguments)))


def _read(arguments: Sequence[str]) -> argparse.Namespace:
    words = Arguments("report", str(__doc__))
    words.add_argument("runs", nargs="+", metavar="RUN", help=argparse.SUPPRESS)
    words.add_argument("--out", default="", help=argparse.SUPPRESS)
    flags = words.read(arguments)
    for name in (*flags.runs, flags.out):
        refuse_url(name, "report")
    return flags


def _written(flags: argparse.Namespace) -> int:
    out = document.write(flags.runs, flags.out or Path(flags.runs[0]) / document.NAME)
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")
    return 0
