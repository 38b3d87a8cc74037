"""What the environment says of a job, and that a process never runs alone where it names several."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest

from jaxrl_post.parallel import cluster, processes

SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp://127.0.0.1,10.1.1.1:34911",
}
ROOT = str(Path(__file__).parents[1])


@pytest.mark.parametrize(
    "environment, count",
    [
        ({**SLURM, "SLURM_PROCID": "1"}, 2),
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, 4),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "1"}, 2),
        ({**OPEN_MPI, "SLURM_NTASKS": "9", "SLURM_PROCID": "1"}, 2),  # mpirun within Slurm starts the processes
        ({"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "1"}, 4),
        ({"TPU_PROCESS_ADDRESSES": "a:1,b:1", "TPU_WORKER_HOSTNAMES": "a"}, 2),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "3"}, 6),
        ({"MEGASCALE_NUM_SLICES": "2"}, 2),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JOB_COMPLETION_INDEX": "1"}, 2),  # GKE sets both in a pod with TPU chips
    ],
)
def test_a_job_of_several_processes(environment, count):
    job = cluster.job(environment | {"TPU_SKIP_MDS_QUERY": "1"}, has_tpu=True)
    assert (job.processes, job.obstacle) == (count, "")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_NTASKS": "8"},  # a shell of salloc: no task
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        {"TPU_WORKER_HOSTNAMES": ""},
        {"MEGASCALE_NUM_SLICES": "1"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "4"},
        {"JOB_COMPLETION_INDEX": "0"},  # an indexed job of one pod has it, too
    ],
)
def test_a_process_by_itself(environment):
    assert cluster.job(environment | {"TPU_SKIP_MDS_QUERY": "1"}, has_tpu=True) is None


def test_a_file_of_addresses(tmp_path):
    (tmp_path / "hosts").write_text("a,b,c\n")
    there = {"TPU_PROCESS_ADDRESSES_PATH": str(tmp_path / "hosts"), "TPU_WORKER_HOSTNAMES": "a"}
    assert cluster.job(there, has_tpu=True).processes == 3
    with pytest.raises(ValueError, match="TPU_PROCESS_ADDRESSES_PATH=/nowhere: cannot be read: No such file"):
        cluster.job({"TPU_PROCESS_ADDRESSES_PATH": "/nowhere"})


@pytest.mark.parametrize(
    "attributes, count",
    [
        ({"worker-network-endpoints": "x:y:10.0.0.1,x:y:10.0.0.2"}, 2),
        ({"worker-network-endpoints": "10.0.0.1,10.0.0.2", "tpu-env": "A: 'b'\nMEGASCALE_NUM_SLICES: '3'\n"}, 6),
        ({"worker-network-endpoints": "10.0.0.1"}, None),
        ({}, None),
    ],
)
def test_the_metadata_of_a_tpu_host(attributes, count):
    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            text = attributes.get(self.path.rpartition("/attributes/")[2])
            assert self.headers["Metadata-Flavor"] == "Google"
            self.send_response(404 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked = {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"}
        job = cluster.job(asked, has_tpu=True)
        assert (job and job.processes) == count
        assert cluster.job(asked, has_tpu=False) is None  # no chips: the server is not asked
        server.shutdown()


def test_a_lone_task_of_a_node_has_all_its_gpus():
    """By itself jax gives a task of Slurm one GPU."""
    node = {**SLURM, "SLURM_PROCID": "1", "SLURM_GPUS_ON_NODE": "4"}
    assert cluster.job({**node, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}).local_devices == (0, 1, 2, 3)
    assert cluster.job({**node, "SLURM_STEP_TASKS_PER_NODE": "2"}).local_devices is None
    assert cluster.job({**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}).local_devices is None


@pytest.mark.parametrize(
    "environment, why",
    [
        (
            {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
            r"SLURM_NTASKS=2 with SLURM_PROCID=1 says .* 2 processes, .* \(SLURM_JOB_ID, SLURM_STEP_NODELIST, SLURM_LOCALID "
            r"missing, which srun sets\)",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, r"OMPI_COMM_WORLD_SIZE=2 .* \(Open MPI 5 needs"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, r"TPU_WORKER_HOSTNAMES naming 2 hosts .* \(no TPU chips or no libtpu"),
        ({"WORLD_SIZE": "4", "RANK": "1"}, r"WORLD_SIZE=4 with RANK=1 says .* \(jax has no detection for that"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, r"PMI_SIZE=2 .* \(jax has no detection"),
        (
            {"JOB_COMPLETION_INDEX": "2"},
            r"JOB_COMPLETION_INDEX=2 says .* one of 3 processes.*\(or more: an indexed job",
        ),
        ({**SLURM, "SLURM_NTASKS": "two", "SLURM_PROCID": "1"}, "SLURM_NTASKS='two' must be a whole number"),
    ],
)
def test_what_cannot_be_joined_is_one_sentence(environment, why, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: pytest.fail("it was joined"))
    monkeypatch.setattr(cluster, "_installed", lambda package: False)
    with pytest.raises(ValueError, match=why):
        processes.start(environment)
    processes.start(environment | {"JAX_NUM_PROCESSES": "1"})  # a run by itself is meant


EXPLICIT = {"JAX_COORDINATOR_ADDRESS": "jobs-0.jobs:1234", "JAX_NUM_PROCESSES": "6"}
POD = {**EXPLICIT, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    "environment, index, detection",
    [
        ({**EXPLICIT, "JAX_PROCESS_ID": "5"}, 5, "deactivate"),
        ({**EXPLICIT, "JAX_PROCESS_ID": "5", "SLURM_LOCALID": "1"}, 5, None),  # jax gives each task its GPU
        ({**POD, "JOB_COMPLETION_INDEX": "4"}, 4, "deactivate"),
        ({**POD, "JOB_COMPLETION_INDEX": "4", "JAX_PROCESS_ID": "1"}, 1, "deactivate"),
        ({**POD, "JOB_INDEX": "0", "PROCESSES_IN_JOB": "3", "JOB_COMPLETION_INDEX": "2"}, 2, "deactivate"),
        ({**POD, "JOB_INDEX": "1", "PROCESSES_IN_JOB": "3", "JOB_COMPLETION_INDEX": "0"}, 3, "deactivate"),
    ],
)
def test_a_place_that_the_environment_gives(environment, index, detection, monkeypatch):
    asked = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda address, **named: asked.update(named, address=address))
    processes.start(environment)
    assert asked.pop("initialization_timeout") > 300
    assert asked == {
        "address": "jobs-0.jobs:1234",
        "num_processes": 6,
        "process_id": index,
        "cluster_detection_method": detection,
    }


@pytest.mark.parametrize(
    "changed, why",
    [
        ({}, "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES set but JAX_PROCESS_ID not"),
        (
            {"JAX_NUM_PROCESSES": "", "JOB_COMPLETION_INDEX": "1"},
            "JAX_COORDINATOR_ADDRESS set but JAX_NUM_PROCESSES not",
        ),
        ({"JOB_COMPLETION_INDEX": "6"}, "JOB_COMPLETION_INDEX=6 must be at least 0 and below JAX_NUM_PROCESSES=6"),
        ({"JOB_COMPLETION_INDEX": "one"}, "JOB_COMPLETION_INDEX='one' must be a whole number"),
        (
            {"JOB_COMPLETION_INDEX": "1", "JOB_INDEX": "1"},
            "JOB_INDEX set but PROCESSES_IN_JOB not: a JobSet of several",
        ),
        ({"JOB_COMPLETION_INDEX": "1", "PROCESSES_IN_JOB": "3"}, "PROCESSES_IN_JOB set but JOB_INDEX not"),
        (
            {"JOB_COMPLETION_INDEX": "3", "JOB_INDEX": "0", "PROCESSES_IN_JOB": "3"},
            "JOB_COMPLETION_INDEX=3 must be at least 0 and below PROCESSES_IN_JOB=3",
        ),
        (
            {"JOB_COMPLETION_INDEX": "0", "JOB_INDEX": "2", "PROCESSES_IN_JOB": "3"},
            r"JOB_INDEX \* PROCESSES_IN_JOB \+ JOB_COMPLETION_INDEX=6 must be at least 0 and below JAX_NUM_PROCESSES=6",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "host", "JAX_PROCESS_ID": "0"},
            "JAX_COORDINATOR_ADDRESS='host' must be host:port, such as host:1234",
        ),
    ],
)
def test_half_a_place_is_one_sentence(changed, why, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: pytest.fail("it was joined"))
    with pytest.raises(ValueError, match=why):
        processes.start({**POD, **changed})


@pytest.mark.parametrize("error", [ValueError("coordinator_address should be defined."), KeyError("TPU_WORKER_ID")])
def test_a_detection_that_fails_is_one_sentence(error, monkeypatch):
    def fail(**_):
        raise error

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    with pytest.raises(ValueError, match=rf"one of 2 processes, .* \({type(error).__name__}: .*\): start all"):
        processes.start({**SLURM, "SLURM_PROCID": "1"})


def test_fewer_processes_than_named_is_one_sentence(monkeypatch):
    asked = {}
    monkeypatch.setattr(jax.distributed, "initialize", asked.update)
    with pytest.raises(ValueError, match=r"\(only 1 joined\)"):
        processes.start({**SLURM, "SLURM_PROCID": "1"})
    assert asked["local_device_ids"] is None and asked["initialization_timeout"] > 300


def _started(environment, *, limit_s=100):
    program = (
        "import os, sys; from jaxrl_post.parallel.processes import start\n"
        f"start(os.environ, limit_s={limit_s})\n"
        "import jax; print('GOT', jax.process_index(), jax.process_count())"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ROOT} | environment,
    )


# Of a GKE pod with TPU chips. JAX_FORCE_TPU_INIT takes this machine for one; the empty variable spares a metadata server.
GKE = {
    "JAX_FORCE_TPU_INIT": "1",
    "TPU_WORKER_HOSTNAMES": "127.0.0.1,127.0.0.2",
    "MEGASCALE_NUM_SLICES": "",
    "MEGASCALE_SLICE_ID": "",
    "MEGASCALE_COORDINATOR_ADDRESS": "",
}


@pytest.mark.extended
@pytest.mark.parametrize(
    "launcher", [(SLURM, "SLURM_PROCID"), (OPEN_MPI, "OMPI_COMM_WORLD_RANK"), (GKE, "TPU_WORKER_ID")]
)
def test_two_real_processes_are_joined_by_their_launcher(launcher):
    here, rank = launcher
    port = str(20000 + os.getpid() % 20000)
    pair = [_started({**here, rank: str(index), "JAX_COORDINATOR_PORT": port}) for index in range(2)]
    told = [process.communicate(timeout=100) for process in pair]
    assert [[line for line in out.splitlines() if line.startswith("GOT")] for out, _ in told] == [
        ["GOT 0 2"],
        ["GOT 1 2"],
    ], told


@pytest.mark.extended
@pytest.mark.parametrize("index", ["0", "1"])
def test_a_process_whose_others_never_come_ends_with_one_sentence(index):
    """jax itself would abort with a stack trace of C++."""
    alone = _started(
        {**SLURM, "SLURM_PROCID": index, "JAX_COORDINATOR_PORT": str(41000 + os.getpid() % 9000)}, limit_s=2
    )
    said, errors = alone.communicate(timeout=60)
    assert alone.returncode == 1 and "GOT" not in said
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "one of 2 processes, and they could not be joined (not all came within 2 s)" in lines[0]


@pytest.mark.extended
def test_a_run_in_a_task_without_its_step_ends_with_exit_code_1(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_post.main", "--config=configs/demo.py", f"--run-dir={tmp_path / 'run'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 1 and done.stderr.count("error: environment: SLURM_NTASKS=2") == 1
    assert not (tmp_path / "run").exists()
