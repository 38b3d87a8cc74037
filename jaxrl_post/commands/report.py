"""python -m jaxrl_post report RUN [RUN ...] [--out=FILE]

Writes one page on one or several runs, which may still be going on. It needs no network and no other file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxrl_post.commands.arguments import Command
from jaxrl_post.config import refuse_url
from jaxrl_post.config.command_line import Flag
from jaxrl_post.telemetry.page import document

_FLAGS = (Flag("RUN ...", "a run's folder"), Flag("--out=FILE", "the page; RUN/report.html of the first run"))


def _written(flags: argparse.Namespace) -> int:
    for name in (*flags.run, flags.out):
        refuse_url(name, "report")
    out = document.write(flags.run, flags.out or Path(flags.run[0]) / document.NAME)
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")
    return 0


main = Command("report", __doc__, _FLAGS, _written)
