"""What the environment says of a job: how many processes its launcher started, and how they can be joined.

Three variables place a process in a job: VARIABLES. In an indexed job of Kubernetes, the index that Kubernetes sets stands
for the third. Without any of the three a launcher is detected.

Launchers are read in the order in which jax detects them: Open MPI, Slurm, TPU hosts of GKE, TPU hosts of GCE. Launchers
that jax does not detect are read last. Their processes need the three variables.
"""

from __future__ import annotations

import importlib.util
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Kubernetes sets the first in each pod of an indexed job. Manifests of XPK and MaxText set the others, for a JobSet.
_INDEX, _JOB, _IN_JOB = "JOB_COMPLETION_INDEX", "JOB_INDEX", "PROCESSES_IN_JOB"
_LOCAL = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_LOCALID")
# Launchers that jax joins by their own means only, or not at all: the number of processes, and the number of this one.
_OTHERS = (("PMI_SIZE", "PMI_RANK"), ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"), ("WORLD_SIZE", "RANK"))
_METADATA_S = 3.0


@dataclass(frozen=True, kw_only=True)
class DetectedJob:
    """A job of several processes.

    `processes`: how many the environment names. `by`: the variables that say so. `obstacle`: why jax cannot join them;
    empty where it can. `local_devices`: the GPUs of this process, or None for those that jax chooses."""

    processes: int
    by: str
    obstacle: str = ""
    local_devices: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """The place of a process in a job of `processes`. `coordinator`: host:port of process 0. `index`: of this process.

    `detection`: jax's way to find the GPU of this process, as cluster_detection_method of jax.distributed.initialize."""

    coordinator: str
    processes: int
    index: int
    detection: str | None


def place(environment: Mapping[str, str]) -> ProcessPlace | None:
    """Returns the place that VARIABLES give this process, or None where none of them is set.

    Raises:
      ValueError: some are missing or are no whole numbers, the address has no port, or the index is not below the number of
        processes.
    """
    given = [name for name in VARIABLES if environment.get(name)]
    if not given:
        return None
    indexed = VARIABLES[2] not in given and bool(environment.get(_INDEX))
    missing = [name for name in VARIABLES if name not in given and not (indexed and name == VARIABLES[2])]
    if missing:
        raise ValueError(
            f"environment: {', '.join(given)} set but {', '.join(missing)} not: set all three of "
            f"{', '.join(VARIABLES)}, or none for a single process"
        )
    address, count = environment[VARIABLES[0]], number(environment, VARIABLES[1])
    if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdecimal():
        raise ValueError(
            f"environment: {VARIABLES[0]}={address!r} must be host:port, such as {address.strip(':')}:1234"
        )
    index, by = _index_of_pod(environment) if indexed else (number(environment, VARIABLES[2]), VARIABLES[2])
    if index >= count:
        raise ValueError(f"environment: {by}={index} must be at least 0 and below {VARIABLES[1]}={count}")
    # beyond the GPU of a task jax would find nothing here, and would warn in Kubernetes that it cannot ask there
    asks = any(environment.get(name) for name in _LOCAL)
    return ProcessPlace(coordinator=address, processes=count, index=index, detection=None if asks else "deactivate")


def _index_of_pod(environment: Mapping[str, str]) -> tuple[int, str]:
    """Returns the index of a pod among all of its job, or of all jobs of its JobSet, and what it was read from."""
    index, given = number(environment, _INDEX), [name for name in (_JOB, _IN_JOB) if environment.get(name)]
    if not given:
        return index, _INDEX
    if len(given) == 1:
        missing = _IN_JOB if given == [_JOB] else _JOB
        raise ValueError(
            f"environment: {given[0]} set but {missing} not: a JobSet of several jobs needs both, and one job neither"
        )
    job_index, size = (number(environment, name) for name in (_JOB, _IN_JOB))
    if index >= size:
        raise ValueError(f"environment: {_INDEX}={index} must be at least 0 and below {_IN_JOB}={size}")
    return job_index * size + index, f"{_JOB} * {_IN_JOB} + {_INDEX}"


def job(environment: Mapping[str, str], *, has_tpu: bool | None = None) -> DetectedJob | None:
    """Returns the job of several processes that the environment describes, or None for a process by itself.

    Args:
      has_tpu: whether this machine has TPU chips; None: look.

    Raises:
      ValueError: a variable that must be a whole number is none.
    """
    found = _open_mpi(environment) or _slurm(environment) or _tpu(environment, has_tpu) or _other(environment)
    return found if found and found.processes > 1 else None


def _open_mpi(environment: Mapping[str, str]) -> DetectedJob | None:
    name = "OMPI_COMM_WORLD_SIZE"
    if not environment.get(name):
        return None
    version_5 = "OMPI_MCA_orte_hnp_uri" not in environment
    obstacle = "Open MPI 5 needs the package mpi4py" if version_5 and not _installed("mpi4py") else ""
    return DetectedJob(processes=number(environment, name), by=f"{name}={environment[name]}", obstacle=obstacle)


def _slurm(environment: Mapping[str, str]) -> DetectedJob | None:
    if not (environment.get("SLURM_NTASKS") and environment.get("SLURM_PROCID")):
        return None
    missing = [name for name in _SLURM if not environment.get(name)]
    by = f"SLURM_NTASKS={environment['SLURM_NTASKS']} with SLURM_PROCID={environment['SLURM_PROCID']}"
    return DetectedJob(
        processes=number(environment, "SLURM_NTASKS"),
        by=by,
        obstacle=f"{', '.join(missing)} missing, which srun sets" if missing else "",
        local_devices=_gpus_of_a_lone_task(environment),
    )


def _gpus_of_a_lone_task(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Returns all GPUs of a node that runs one task. By itself jax gives every task of Slurm one GPU."""
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "").partition("(")[0]
    if tasks != "1" or not environment.get("SLURM_GPUS_ON_NODE"):
        return None
    return tuple(range(number(environment, "SLURM_GPUS_ON_NODE")))


def _tpu(environment: Mapping[str, str], has_tpu: bool | None) -> DetectedJob | None:
    """Reads the variables of GKE and of several slices, and on a machine with TPU chips the metadata of GCE."""
    by = next((name for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES") if environment.get(name)), "")
    slices = number(environment, "MEGASCALE_NUM_SLICES") if environment.get("MEGASCALE_NUM_SLICES") else 1
    file = environment.get("TPU_PROCESS_ADDRESSES_PATH", "")
    chips = _tpu_chips(environment) if has_tpu is None else has_tpu
    if file:
        by = "TPU_PROCESS_ADDRESSES_PATH"
        try:
            hosts = Path(file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ValueError(f"environment: {by}={file}: cannot be read: {error.strerror}") from error
    elif by:
        hosts = environment[by]
    elif chips and not environment.get("TPU_SKIP_MDS_QUERY"):
        by = "worker-network-endpoints of the metadata server"
        hosts = _metadata("worker-network-endpoints", environment)
        slices = max(slices, _slices(_metadata("tpu-env", environment)))
    else:
        hosts = ""
    count = max(sum(map(bool, hosts.split(","))), 1)
    said = [f"{by} naming {count} hosts"] if count > 1 else []
    said += [f"MEGASCALE_NUM_SLICES={slices}"] if slices > 1 else []
    obstacle = "" if chips else "no TPU chips or no libtpu found here"
    return DetectedJob(processes=count * slices, by=" and ".join(said), obstacle=obstacle) if said else None


def _tpu_chips(environment: Mapping[str, str]) -> bool:
    """Returns whether jax can use TPU chips of this machine, or is told by JAX_FORCE_TPU_INIT to take it for their host."""
    if "JAX_FORCE_TPU_INIT" in environment:
        return True
    there = any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    return there and _installed("libtpu") and environment.get("JAX_PLATFORMS", "tpu") != "cpu"


def _metadata(key: str, environment: Mapping[str, str]) -> str:
    """Returns an attribute of this machine from the metadata server of GCE, empty where there is none."""
    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/{key}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_METADATA_S) as answer:
            return answer.read().decode()
    except (OSError, UnicodeDecodeError):
        return ""


def _slices(tpu_env: str) -> int:
    """Returns the number of slices that the attribute tpu-env names: lines such as MEGASCALE_NUM_SLICES: '2'."""
    pairs = (line.partition(":")[::2] for line in tpu_env.splitlines())
    texts = [value.strip().strip("'") for name, value in pairs if name.strip() == "MEGASCALE_NUM_SLICES"]
    return int(texts[-1]) if texts and texts[-1].isdigit() else 1


def _other(environment: Mapping[str, str]) -> DetectedJob | None:
    for size, rank in _OTHERS:
        if environment.get(size) and environment.get(rank):
            by = f"{size}={environment[size]} with {rank}={environment[rank]}"
            return DetectedJob(
                processes=number(environment, size), by=by, obstacle="jax has no detection for that launcher"
            )
    return _indexed(environment)


def _indexed(environment: Mapping[str, str]) -> DetectedJob | None:
    """Reads the index of a pod. It tells of other pods where it is above 0, and never how many there are."""
    index = number(environment, _INDEX) if environment.get(_INDEX) else 0
    more = "or more: an indexed job of Kubernetes says not how many"
    return DetectedJob(processes=index + 1, by=f"{_INDEX}={index}", obstacle=more)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def number(environment: Mapping[str, str], name: str) -> int:
    """Returns a variable of the environment that must be a whole number.

    Raises:
      ValueError: it is none.
    """
    text = environment[name]
    if not text.isdecimal():
        raise ValueError(f"environment: {name}={text!r} must be a whole number")
    return int(text)
