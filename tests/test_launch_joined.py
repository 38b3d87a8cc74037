"""Four real processes of one job, under the variables of launchers: equal decisions, and restarts after a kill."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from jax._src.clusters import ClusterEnv, cloud_tpu_cluster
from resumed_runs import here  # noqa: F401  (a fixture)

from jaxrl_post.parallel import cluster
from jaxrl_post.runs import attempts

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import joined_jobs  # noqa: E402
import killed  # noqa: E402

STEPS = 3
OPTIONS = (
    f"--config.steps={STEPS}",
    "--config.mesh.data=2",
    "--config.mesh.fsdp=2",
    "--config.checkpoint.every=1",
    "--config.eval.prompts=2",
    "--config.eval.samples=1",
)


def run(folder: Path, launcher: str, place: Path, most_restarts: int = 0) -> int:
    options = [f"--config={folder / 'toy.py'}", *OPTIONS]
    job = joined_jobs.started(ROOT, launcher, 4, place, options, place.parent / "cache")
    return joined_jobs.run(job, most_restarts)


@pytest.mark.shown("joined")
@pytest.mark.slow  # twelve starts of a process, four at a time
def test_four_processes_join_and_a_killed_one_changes_no_bit(here, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # the programs of both jobs are the same
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert run(here, "gke_tpu", whole) == 0, joined_jobs.said(whole)
    decided = {(whole / f"process_{index}" / "scheduler_log.jsonl").read_bytes() for index in range(4)}
    assert len(decided) == 1 and len(decided.pop().splitlines()) > STEPS

    left: list[float] = []
    threading.Thread(target=joined_jobs.kill, args=(again, [(2, 1)], left), daemon=True).start()
    assert run(here, "jobset", again, most_restarts=1) == 0, joined_jobs.said(again)
    first, last = attempts.status(again).attempts
    assert [one.code for one in first.processes] == [42, 42, None, 42]
    assert {one.why for one in first.processes if one.code} == {"process 2 of 4 is lost: its connection ended"}
    assert len(left) == 1 and left[0] < 30
    assert [one.code for one in last.processes] == [0] * 4
    assert killed.differences(whole, again, STEPS) == []


@pytest.mark.parametrize("launcher", joined_jobs.LAUNCHERS)
def test_a_launcher_gives_each_process_its_place(launcher, monkeypatch):
    """What this project reads of the variables is what jax's own detection reads, where it has one."""
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)  # as JAX_FORCE_TPU_INIT does at its import
    places = set()
    for index, environment in enumerate(joined_jobs.environments(launcher, 4)):
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "TPU_", "JAX_COORD"))]:
                patch.delenv(name)
            for name, value in {**environment, "TPU_SKIP_MDS_QUERY": "1"}.items():  # jax sets it without chips
                patch.setenv(name, value)
            place, job = cluster.place(environment), cluster.job(environment)
            if place is None:
                assert (job.processes, job.obstacle) == (4, "")
                found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 5)
            else:
                found = (place.coordinator, place.processes, place.index)
        assert found[1:3] == (4, index)
        places.add(found[0])
    (coordinator,) = places
    assert coordinator.rpartition(":")[0] in ("127.0.0.1", "localhost")
