"""python -m jaxrl_post report RUN [RUN ...] [--out=FILE]

Writes one page on one or several runs, which may still be going on. It needs no network and no other file. Without --out
it is RUN/report.html, of the first run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_post.config import refuse_url
from jaxrl_post.telemetry.page import document


class _Words(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f"report: {message}; write python -m jaxrl_post report RUN [RUN ...] [--out=FILE]")


def main(arguments: Sequence[str]) -> int:
    """Writes the page. Exit code 1, with one sentence, where a run cannot be read or the page cannot be written."""
    parser = _Words(prog="python -m jaxrl_post report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run")
    parser.add_argument("--out", default="", help="the page; RUN/report.html of the first run without it")
    try:
        flags = parser.parse_args(arguments)
        for name in (*flags.runs, flags.out):
            refuse_url(name, "report")
        out = document.write(flags.runs, flags.out or Path(flags.runs[0]) / document.NAME)
        print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0
