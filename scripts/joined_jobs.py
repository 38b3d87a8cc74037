"""Runs of one job under the variables that launchers give to its processes, which all run on this machine.

Every host is this one, by a loopback address of its own. JAX_COORDINATOR_PORT is jax's own way to name a free port.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from http_clients import free_port

CPU = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
# jax takes this machine for a host with TPU chips. It asks a metadata server for variables that are not there at all.
_TPU = {
    "JAX_FORCE_TPU_INIT": "1",
    "MEGASCALE_NUM_SLICES": "",
    "MEGASCALE_SLICE_ID": "",
    "MEGASCALE_COORDINATOR_ADDRESS": "",
}

# A log for each process. The shell becomes the command, so its number is that of the process.
_TO_LOG = ["sh", "-c", 'exec "$@" >> "$PROCESS_LOG" 2>&1', "sh"]

SMALL = [  # of configs/demo/sharded.py: a job whose processes take seconds, and save after every step
    "--config.scheduler.prompts=8",
    "--config.scheduler.group_size=4",
    "--config.engine.slots=8",
    "--config.engine.prompt_rows=0",
    "--config.eval.prompts=4",
    "--config.eval.every=0",
    "--config.eval.samples=1",
    "--config.checkpoint.every=1",
]

Variables = dict[str, str]


def started(
    root: Path,
    launcher: str,
    processes: int,
    place: Path,
    options: Sequence[str],
    cache: Path,
    run_dir: str = "",
    variables: Variables | None = None,
) -> tuple[list[str], list[Variables]]:
    """Returns a job: the command of its processes, `python -m jaxrl_post.main --run-dir=PLACE --resume`, and variables of each.

    What process K says is added to PLACE.K.log.

    Args:
      options: more arguments of the command.
      cache: the compilation cache of all processes.
      run_dir: of the run, instead of PLACE.
      variables: of all processes.
    """
    more = {"JAX_COMPILATION_CACHE_DIR": str(cache), "PYTHONPATH": str(root)} | (variables or {})
    given = [
        own | more | {"PROCESS_LOG": f"{place}.{index}.log"}
        for index, own in enumerate(environments(launcher, processes))
    ]
    command = [sys.executable, "-m", "jaxrl_post.main", *options, f"--run-dir={run_dir or place}", "--resume"]
    return [*_TO_LOG, *command], given


def run(job: tuple[list[str], list[Variables]], most_restarts: int = 0) -> int:
    from jaxrl_post.launch.jobs import local

    return local.run_job(*job, most_restarts)


def said(place: Path) -> str:
    """Returns the ends of what the processes of a job said."""
    return "\n".join(
        f"{file.name}:\n{file.read_text()[-2000:]}" for file in sorted(place.parent.glob(f"{place.name}.*.log"))
    )


def kill(place: Path, kills: Sequence[tuple[int, int]], seconds: list[float]) -> None:
    """Kills processes of a job by SIGKILL, one in each attempt.

    Args:
      kills: a process, and the checkpoint that is whole before it is killed.
      seconds: gets the seconds from each kill until no other process of the attempt was there.
    """
    from jaxrl_post.runs import attempts

    for number, (lost, step) in enumerate(kills, start=1):
        saved = place / "checkpoints" / f"step_{step:06d}"
        while not (saved.is_dir() and (there := attempts.status(place).attempts) and there[-1].number == number):
            time.sleep(0.02)
        numbers = {one.index: one.pid for one in there[-1].processes}
        os.kill(numbers.pop(lost), signal.SIGKILL)
        begun = time.monotonic()
        while any(map(is_there, numbers.values())):
            time.sleep(0.02)
        seconds.append(time.monotonic() - begun)


def is_there(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def environments(launcher: str, processes: int) -> list[Variables]:
    """Returns what each of `processes` processes gets beside the variables of this process, for CPU devices.

    Args:
      launcher: one of LAUNCHERS.
      processes: an even number, as slices and jobs of a JobSet are two.
    """
    port = str(free_port())
    return [CPU | LAUNCHERS[launcher](index, processes, port) for index in range(processes)]


def _explicit(index: int, processes: int, port: str) -> Variables:
    return _of_all(processes, port) | {"JAX_PROCESS_ID": str(index)}


def _of_all(processes: int, port: str) -> Variables:
    return {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(processes)}


def _kubernetes(index: int, processes: int, port: str) -> Variables:
    """An indexed job: the manifest names process 0 and how many there are, and Kubernetes sets the index."""
    pod = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "JOB_COMPLETION_INDEX": str(index)}
    return _of_all(processes, port) | pod


def _jobset(index: int, processes: int, port: str) -> Variables:
    """Two jobs of a JobSet, as manifests of XPK and MaxText number their pods."""
    job, inside = divmod(index, processes // 2)
    place = {"JOB_INDEX": str(job), "PROCESSES_IN_JOB": str(processes // 2)}
    return _kubernetes(inside, processes, port) | place


def _slurm(index: int, processes: int, port: str) -> Variables:
    """One node, as srun sets them."""
    return {
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(processes),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
        "JAX_COORDINATOR_PORT": port,
    }


def _open_mpi(index: int, processes: int, port: str) -> Variables:
    """One node, as mpirun of Open MPI 4 sets them."""
    return {
        "OMPI_COMM_WORLD_SIZE": str(processes),
        "OMPI_COMM_WORLD_RANK": str(index),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(index),
        "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp://127.0.0.1,10.1.1.1:34911",
        "JAX_COORDINATOR_PORT": port,
    }


def _gke_tpu(index: int, processes: int, port: str) -> Variables:
    """Hosts of one TPU slice, as GKE sets them in their pods."""
    return _TPU | {
        "TPU_WORKER_HOSTNAMES": ",".join(_hosts(1, processes)),
        "TPU_WORKER_ID": str(index),
        "JAX_COORDINATOR_PORT": port,
    }


def _multislice(index: int, processes: int, port: str) -> Variables:
    """Hosts of two TPU slices, as GKE sets them in the pods of a JobSet."""
    inside = processes // 2
    slice_id, worker = divmod(index, inside)
    return _TPU | {
        "TPU_WORKER_HOSTNAMES": ",".join(_hosts(1 + slice_id * inside, inside)),
        "TPU_WORKER_ID": str(worker),
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": str(slice_id),
        "MEGASCALE_COORDINATOR_ADDRESS": next(_hosts(1, 1)),
        "JAX_COORDINATOR_PORT": port,
    }


def _hosts(first: int, count: int) -> Iterator[str]:
    """Yields loopback addresses, one for each host."""
    return (f"127.0.0.{number}" for number in range(first, first + count))


LAUNCHERS: dict[str, Callable[[int, int, str], Variables]] = {
    "explicit": _explicit,
    "kubernetes": _kubernetes,
    "jobset": _jobset,
    "slurm": _slurm,
    "open_mpi": _open_mpi,
    "gke_tpu": _gke_tpu,
    "multislice": _multislice,
}
