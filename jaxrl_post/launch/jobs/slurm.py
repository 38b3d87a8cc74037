"""A batch script for Slurm: one task a node, which has all of the node's GPUs.

After exit code 42, or a task that a signal killed, the script puts its job back into the queue, at most `restarts` times.
Slurm itself does so where a node was lost.
"""

from __future__ import annotations

import re

from jaxrl_post.launch.jobs.request import Rendered, Request, from_template
from jaxrl_post.ring.json_text import shown

FILE = "job.sbatch"


def render(request: Request) -> Rendered:
    """Renders the script.

    Raises:
      ValueError: no GPUs, or a secret that is no file.
    """
    where = request.where
    if where is None or where.chip.platform != "gpu":
        raise ValueError(
            f"--target=slurm needs nodes with GPUs, and --slice={where.name if where else ''} has none; write "
            "--slice=8xh100"
        )
    for variable, file in request.secrets.items():
        if not file.startswith("/") or not re.fullmatch(r"[\w/.@-]+", file):
            raise ValueError(
                f"--secret={variable}={shown(file, 60)} must be the absolute path of a file that holds the value, for "
                f"example --secret={variable}=/home/me/.secrets/wandb"
            )
    return Rendered(files={FILE: from_template(FILE, request)}, calls=(("sbatch", "{folder}/" + FILE),))
