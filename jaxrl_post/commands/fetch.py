"""python -m jaxrl_post fetch gs://BUCKET/NAME FOLDER

Copies the run of a bucket to a new folder, as its newest whole commit has it. The run may still be going on. The folder
serves every command on a run. It is a run of its own, too: --resume there goes on without the bucket.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxrl_post.commands.arguments import Arguments, answered
from jaxrl_post.config import refuse_url
from jaxrl_post.launch import bucket_run


def main(arguments: Sequence[str]) -> int:
    """Copies the run. Exit code 1, with one sentence, where there is none or the folder is not new."""
    return answered(lambda: _fetched(_read(arguments)))


def _read(arguments: Sequence[str]) -> argparse.Namespace:
    words = Arguments("fetch", str(__doc__))
    words.add_argument("run", metavar="gs://BUCKET/NAME", help=argparse.SUPPRESS)
    words.add_argument("folder", metavar="FOLDER", help=argparse.SUPPRESS)
    flags = words.read(arguments)
    refuse_url(flags.folder, "FOLDER")
    return flags


def _fetched(flags: argparse.Namespace) -> int:
    step = bucket_run.fetch(flags.run, Path(flags.folder))
    print(f"{flags.folder}: the run of {flags.run}, {f'saved up to step {step}' if step else 'without a saved step'}")
    return 0
