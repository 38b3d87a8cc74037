"""A batch script for Slurm: one task a node, which has all of the node's GPUs.

After exit code 42, or a task that a signal killed, the script puts its job back into the queue, at most `restarts` times.
Slurm itself does so where a node was lost.
"""

from __future__ import annotations

import math
import re
import shlex

from jaxrl_post.json_text import shown
from jaxrl_post.launch.jobs.request import Rendered, Request

FILE = "job.sbatch"
SCRIPT = """#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log
#SBATCH --signal=TERM@{grace_s}
{more}set -uo pipefail
{secrets}{variables}code=0
srun --kill-on-bad-exit=0 --export=ALL \\
  {words} || code="$?"
if ((code == 42 || code > 128)) && ((${{SLURM_RESTART_COUNT:-0}} < {restarts})); then
  echo "{name}: exit code $code, back into the queue" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


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
    more = [f"#SBATCH --partition={request.partition}"] if request.partition else []
    more += [f"#SBATCH --account={request.account}"] if request.account else []
    more += [f"#SBATCH --time={math.ceil(60 * request.hours)}"] if request.hours else []
    secrets = "".join(f'{name}="$(<{file})"\nexport {name}\n' for name, file in request.secrets.items())
    variables = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in request.variables.items())
    script = SCRIPT.format(
        name=request.name,
        nodes=where.hosts,
        gpus=where.devices // where.hosts,
        grace_s=request.grace_s,
        more="".join(f"{line}\n" for line in more),
        secrets=secrets,
        variables=variables,
        words=shlex.join(request.words),
        restarts=request.restarts,
    )
    return Rendered(files={FILE: script}, calls=(("sbatch", "{folder}/" + FILE),))
