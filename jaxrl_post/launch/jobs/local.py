"""A job of several processes on this machine, joined by jax.distributed, which starts again after exit code 42.

Several processes share the machine's CPU: each has its part of the mesh as forced devices. One process has whatever jax
sees. `job.json` holds what launch/local_job.py is called with.

Invariant: nothing here loads jax. This module runs the job, and a process with jax's threads must not fork.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxrl_post.json_text import shown
from jaxrl_post.launch import local_job
from jaxrl_post.launch.jobs.request import Rendered, Request

FILE = "job.json"


def render(request: Request, devices: int) -> Rendered:
    """Renders the arguments of `local_job.run_job`.

    Args:
      devices: of the mesh.

    Raises:
      ValueError: a slice, a secret, or devices that the processes cannot divide.
    """
    if request.where is not None:
        raise ValueError(
            f"--target=local runs on this machine, and --slice={shown(request.where.name, 40)} is elsewhere: leave it out"
        )
    if request.secrets:
        raise ValueError(
            "--secret: a local job has this process's environment: set the variable there and leave it out"
        )
    if devices % request.processes:
        near = max(count for count in range(1, request.processes + 1) if devices % count == 0)
        raise ValueError(
            f"--nodes={request.processes} processes cannot divide the mesh's {devices} devices; the nearest valid value "
            f"is {near}"
        )
    call = [sys.executable, "-m", "jaxrl_post.launch.jobs.local", "{folder}/" + FILE]
    job = {
        "command": [sys.executable, *request.words[1:]],
        "environments": [_environment(request, at, devices) for at in range(request.processes)],
        "most_restarts": request.restarts,
    }
    return Rendered(files={FILE: json.dumps(job, indent=2) + "\n"}, calls=(tuple(call),))


def _environment(request: Request, index: int, devices: int) -> Mapping[str, str]:
    """Returns the variables of a process beside those of this one."""
    if request.processes == 1:
        return dict(request.variables) | {"JAX_NUM_PROCESSES": "1"}
    own = devices // request.processes
    return dict(request.variables) | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={own}",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{request.port}",
        "JAX_NUM_PROCESSES": str(request.processes),
        "JAX_PROCESS_ID": str(index),
    }


def _is_free(port: int) -> bool:
    """Returns whether nothing listens at a port of this machine: else processes would join that."""
    with socket.socket() as one:
        return one.connect_ex(("localhost", port)) != 0


def main(arguments: Sequence[str]) -> int:
    """Runs the job of a file, and returns its last exit code. It is 1 where another job has the job's port."""
    job = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    address = job["environments"][0].get("JAX_COORDINATOR_ADDRESS", "")
    if address and not _is_free(int(address.rpartition(":")[2])):
        print(f"error: {address} is taken, perhaps by another local job: end it, or write --port=N", file=sys.stderr)
        return 1
    return local_job.run_job(job["command"], job["environments"], job["most_restarts"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
