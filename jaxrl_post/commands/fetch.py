"""python -m jaxrl_post fetch gs://BUCKET/NAME FOLDER

Copies the run of a bucket to a new folder, as its newest whole commit has it. The run may still be going on. The folder
serves every command on a run. It is a run of its own, too: --resume there goes on without the bucket.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxrl_post.commands.arguments import Command
from jaxrl_post.config import refuse_url
from jaxrl_post.config.command_line import Flag
from jaxrl_post.runs import bucket_run

_FLAGS = (Flag("RUN", "gs://BUCKET/NAME, where the run is"), Flag("FOLDER", "a new folder"))


def _fetched(flags: argparse.Namespace) -> int:
    refuse_url(flags.folder, "FOLDER")
    step = bucket_run.fetch(flags.run, Path(flags.folder))
    print(f"{flags.folder}: the run of {flags.run}, {f'saved up to step {step}' if step else 'without a saved step'}")
    return 0


main = Command("fetch", __doc__, _FLAGS, _fetched)
