"""Start-up of one process among several, arrays that each of them gets whole, and lines that the job prints once."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.parallel import cluster, exchange, relayout
from jaxrl_post.parallel import mesh as meshes

_LATER_S = 60  # seconds by which jax's own limit lies behind ours


def start(environment: Mapping[str, str], *, limit_s: float = 300.0) -> None:
    """Joins the processes of this job. Call it before any other use of a device.

    JAX_COORDINATOR_ADDRESS (host:port), JAX_NUM_PROCESSES and JAX_PROCESS_ID describe the job. In an indexed job of
    Kubernetes, JOB_COMPLETION_INDEX stands for the third. Without them jax detects a TPU pod, several slices, Slurm or
    Open MPI. JAX_NUM_PROCESSES=1 alone says that the process is alone, whatever else the environment says.

    Args:
      limit_s: seconds to wait for the other processes. Beyond it the process ends with one sentence and exit code 1.

    Raises:
      ValueError: some of the three are missing or are no numbers, or the id is outside [0, number of processes). Or the
        environment names more processes than can be joined.
    """
    given = [name for name in cluster.VARIABLES if environment.get(name)]
    if given == ["JAX_NUM_PROCESSES"] and environment["JAX_NUM_PROCESSES"] == "1":
        return
    place = cluster.place(environment)
    if place is None:
        job = cluster.job(environment)
        if job is not None:
            _join_detected(job, limit_s)
        return
    with _limited(f"JAX_NUM_PROCESSES={place.processes}", place.processes, limit_s):
        jax.distributed.initialize(
            place.coordinator,
            num_processes=place.processes,
            process_id=place.index,
            cluster_detection_method=place.detection,
            initialization_timeout=int(limit_s) + _LATER_S,
        )


def _join_detected(job: cluster.DetectedJob, limit_s: float) -> None:
    """Joins the processes of a job by jax's own detection.

    Raises:
      ValueError: they cannot be joined, or fewer joined than the environment names.
    """
    if job.obstacle:
        raise ValueError(_apart(job.by, job.processes, job.obstacle))
    try:
        with _limited(job.by, job.processes, limit_s):
            jax.distributed.initialize(
                local_device_ids=job.local_devices, initialization_timeout=int(limit_s) + _LATER_S
            )
    except (ValueError, RuntimeError, OSError, ImportError, KeyError) as error:
        raise ValueError(_apart(job.by, job.processes, f"{type(error).__name__}: {error}")) from error
    if (joined := exchange.place()[1]) < job.processes:
        raise ValueError(_apart(job.by, job.processes, f"only {joined} joined"))


@contextlib.contextmanager
def _limited(by: str, processes: int, limit_s: float) -> Iterator[None]:
    """Ends the process with a sentence where the body takes longer than `limit_s`.

    jax's own limit aborts with a stack trace of C++, so it lies behind this one. Nothing is lost: the run has no folder.
    """

    def end() -> None:
        print(f"error: {_apart(by, processes, f'not all came within {limit_s:g} s')}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _apart(by: str, processes: int, why: str) -> str:
    """Returns the sentence that refuses a lone run in a job of several processes."""
    return (
        f"environment: {by} says that this is one of {processes} processes, and they could not be joined ({why}): start all "
        f"of them, or set {', '.join(cluster.VARIABLES)} in each, or JAX_NUM_PROCESSES=1 alone for a run of this process by itself"
    )


def gathered(leaf: Any, dtype: Any) -> np.ndarray:
    """Returns one leaf as a host array of `dtype`, on every process. It is cast before it moves.

    With several processes each host gets it once, split over its devices as far as they divide it.
    """
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf).astype(dtype, copy=False)
    if leaf.is_fully_addressable:
        there = jnp.array(leaf, dtype, copy=True)  # jax keeps host values of an array as long as the array
    else:
        home = meshes.on_each_host(leaf.sharding.mesh, leaf.shape)
        there = relayout.relaid([leaf], [home], jnp.dtype(dtype))[0]
    parts = {relayout.bounds(shard.index, leaf.shape): shard for shard in there.addressable_shards}
    if len(parts) == 1:
        return np.asarray(next(iter(parts.values())).data)
    out = np.empty(leaf.shape, there.dtype)
    for part in parts.values():
        out[part.index] = np.asarray(part.data)
    return out


def say(text: str) -> None:
    """Prints the text once per job."""
    if jax.process_index() == 0:
        print(text, flush=True)
