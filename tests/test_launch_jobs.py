"""Jobs that are launched: golden files, schema, shell scripts, calls of fake tools, misfits and secrets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import launches  # noqa: E402

from jaxrl_post.launch.jobs import gke, local  # noqa: E402
from jaxrl_post.launch.plan import device_less  # noqa: E402

JOBSETS = [name for name in launches.LAUNCHES if name.startswith("gke")]
SCRIPTS = sorted(file for file in launches.GOLDENS.rglob("*") if file.suffix in (".sh", ".sbatch"))


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path_factory):
    """The root, where configs are; no compiler, and the machine's own variables are as they were."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(device_less, "is_there", lambda where: False)
    for name in device_less._ALONE:
        monkeypatch.setenv(name, os.environ.get(name, ""))


# ---- What is rendered


@pytest.mark.parametrize("name", launches.LAUNCHES)
def test_the_files_are_the_golden_ones_whatever_secrets_there_are(name, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hush-0123456789")
    files = launches.rendered(name, tmp_path / "out")
    golden = {file.name: file.read_text() for file in (launches.GOLDENS / name).iterdir()}
    assert files == golden, "python scripts/launches.py --write, and read the difference"


def golden(name: str) -> dict:
    """The manifest of a launch."""
    return yaml.safe_load((launches.GOLDENS / name / gke.FILE).read_text())


def job_of(name: str) -> dict:
    """The one job of a launch's manifest."""
    (job,) = golden(name)["spec"]["replicatedJobs"]
    return job["template"]["spec"]


def test_eleven_launches_and_one_more_have_goldens():
    assert len(launches.LAUNCHES) == 11 + len(launches.EXTRA)
    assert sorted(path.name for path in launches.GOLDENS.iterdir()) == sorted(launches.LAUNCHES)


@pytest.mark.parametrize("name", launches.LAUNCHES)
def test_every_command_resumes_one_folder(name):
    run_dir = next(one for one in launches.LAUNCHES[name] if one.startswith("--run-dir="))
    texts = [file.read_text() for file in (launches.GOLDENS / name).iterdir() if file.name != launches.CALLS]
    (text,) = [text for text in texts if "jaxrl_post.main" in text]
    assert text.count("--resume") == 1 == text.count(run_dir) and text.count("jaxrl_post.main") == 1


def test_one_machine_of_gpus_asks_for_no_network_between_hosts():
    """T23: neither a daemon nor eight networks, nor a coordinator's address."""
    alone, joined = job_of("gke-gpu-a3"), job_of("gke-gpu-2-a3")
    assert "metadata" not in alone["template"] and "initContainers" not in alone["template"]["spec"]
    assert "vpc8" in str(joined["template"]["metadata"]) and joined["template"]["spec"]["initContainers"]
    (own,), (other,) = (job["template"]["spec"]["containers"] for job in (alone, joined))
    told = [[one["name"] for one in container["env"]].count("JAX_NUM_PROCESSES") for container in (own, other)]
    assert told == [0, 1] and own["command"][:3] == ["python", "-m", "jaxrl_post.main"]


def test_a_folder_that_dies_with_its_slice_is_refused():
    """T02: /mnt of a TPU VM is its boot disk, unless --share mounts a file system there. A bucket outlives the slice."""
    given = [one for one in launches.LAUNCHES["tpu-vm-v5e-16"] if not one.startswith(("--share", "--run-dir", "--env"))]
    for run_dir in ("/mnt/runs/vm", "runs/vm", "/home/me/vm"):
        code, out, errors = launches.printed([*given, f"--run-dir={run_dir}", "--dry-run"])
        assert code == 1 and errors.count("\n") == 1 and "jaxrl_post.main" not in out
        assert "is deleted with it: write --run-dir=gs://BUCKET/vm, or --run-dir=/mnt/vm with --share" in errors


@pytest.mark.parametrize("name", JOBSETS)
def test_every_misspelt_field_of_a_jobset_is_refused(name):
    whole = golden(name)
    gke.check_manifest(whole)
    places = list(launches.fields_of(whole))
    assert len(places) > 60
    for place in places:
        with pytest.raises(ValueError, match="JobSet: "):
            gke.check_manifest(launches.misspelt(whole, place))


@pytest.mark.parametrize(
    "path, value",
    [
        (("spec", "failurePolicy", "maxRestarts"), "many"),
        (("spec", "replicatedJobs", 0, "template", "spec", "backoffLimit"), None),
        (("apiVersion",), "jobset.x-k8s.io/v1"),
        (("kind",), "Job"),
    ],
)
def test_a_value_of_another_type_is_refused(path, value):
    whole = golden(JOBSETS[0])
    *above, last = path
    part = whole
    for one in above:
        part = part[one]
    part[last] = value
    with pytest.raises(ValueError, match="JobSet: "):
        gke.check_manifest(whole)


def test_a_jobset_says_what_follows_each_end_of_a_pod():
    whole = golden("gke-tpu-2-v6e-32")
    spec = whole["spec"]
    maintenance, mistake = spec["failurePolicy"]["rules"]
    assert maintenance["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert maintenance["onJobFailureMessagePatterns"] == [".*DisruptionTarget.*"] and mistake["action"] == "FailJobSet"
    (job,) = spec["replicatedJobs"]
    inside = job["template"]["spec"]
    assert (job["replicas"], inside["parallelism"], inside["completions"], inside["backoffLimit"]) == (2, 8, 8, 0)
    disrupted, codes = inside["podFailurePolicy"]["rules"]
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert 42 not in codes["onExitCodes"]["values"] and 1 in codes["onExitCodes"]["values"]
    assert whole["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "tpu"}
    assert whole["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    assert inside["template"]["spec"]["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x8",
    }


@pytest.mark.parametrize("name", ["gke-gpu-2-a3", "gke-gpu-4-a3-ultra", "gke-gpu-2-a4"])
def test_gpus_have_shared_memory_and_their_network(name):
    pod = job_of(name)["template"]
    (container,), (network,) = pod["spec"]["containers"], pod["spec"]["initContainers"]
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert any(one.get("emptyDir", {}).get("medium") == "Memory" for one in pod["spec"]["volumes"])
    assert {one["name"] for one in container["volumeMounts"]} <= {one["name"] for one in pod["spec"]["volumes"]}
    assert network["name"] == ("tcpxo-daemon" if name == "gke-gpu-2-a3" else "nccl-plugin-installer")
    interfaces = json.loads(pod["metadata"]["annotations"]["networking.gke.io/interfaces"])
    assert len(interfaces) == (9 if name == "gke-gpu-2-a3" else 10)


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_scripts_are_clean(file):
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert subprocess.run(["bash", "-n", file]).returncode == 0


@pytest.mark.parametrize("kind", ["tpu", "gpu"])
def test_dockerfiles_are_clean_and_copy_what_is_packaged(kind):
    file = ROOT / "docker" / f"Dockerfile.{kind}"
    done = subprocess.run([Path(sys.executable).with_name("hadolint"), file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    text = file.read_text()
    assert "--constraint constraints/py3.12.txt" in text and "FROM python:3.12." in text
    pins = (ROOT / "constraints" / "py3.12.txt").read_text()
    assert all(f"\n{name}==" in pins for name in ("libtpu", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "nvidia-cublas"))
    copied = [word for line in text.splitlines() if line.startswith("COPY") for word in line.split()[1:-1]]
    allowed = (ROOT / ".dockerignore").read_text()
    assert all((ROOT / word).exists() and f"!{word}" in allowed for word in copied)


# ---- What is called


def test_kubectl_and_sbatch_are_called_once_with_the_written_file(tmp_path):
    for name, call in (
        ("gke-tpu-v5e-16", ["kubectl", "apply", "--filename", "jobset.yaml"]),
        ("slurm-2-8xh100", ["sbatch", "job.sbatch"]),
    ):
        out = tmp_path / name
        with launches.fakes() as folder:
            code, _, errors = launches.printed([*launches.LAUNCHES[name], f"--out={out}"])
            assert code == 0, errors
            assert launches.recorded(folder) == [[*call[:-1], str(out / call[-1])]]
        assert (out / call[-1]).read_text() == (launches.GOLDENS / name / call[-1]).read_text()


def test_the_exit_code_of_the_tool_is_that_of_the_command(tmp_path):
    with launches.fakes([(["apply"], [(3, "")])]):
        assert launches.printed([*launches.LAUNCHES["gke-tpu-v5e-16"], f"--out={tmp_path}"])[0] == 3


def test_a_tool_that_is_missing_is_one_sentence_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, errors = launches.printed([*launches.LAUNCHES["gke-tpu-v5e-16"], f"--out={tmp_path / 'out'}"])
    assert (code, out) == (1, "") and "kubectl is not on PATH" in errors and not (tmp_path / "out").exists()


def test_a_dry_run_calls_nothing_and_writes_nothing(tmp_path, monkeypatch):
    with launches.fakes() as folder:
        code, out, _ = launches.printed([*launches.LAUNCHES["tpu-vm-v5e-16"], "--dry-run"])
        assert code == 0 and "bash launches/gsm8k-qwen2-5-7b/babysit.sh" in out
        assert not launches.recorded(folder) and not (ROOT / "launches").exists()


def babysat(states, ends, name="tpu-vm-v5e-16"):
    """Exit code and calls of a babysitter that sees these states of the slice, and these exit codes of the hosts."""
    rules = [(["describe"], [(0, state) for state in states]), (["ssh"], [(code, "") for code in ends])]
    with launches.fakes(rules) as folder:
        done = subprocess.run(
            ["bash", launches.GOLDENS / name / "babysit.sh"], capture_output=True, text=True, timeout=60
        )
        return done.returncode, [call[4] for call in launches.recorded(folder)]


CREATE = ["describe", "create", "describe"]
RUN = ["scp", "ssh"]


@pytest.mark.parametrize(
    "states, ends, code, calls",
    [
        (["", "ACTIVE"], [0], 0, [*CREATE, *RUN, "delete"]),
        (["ACTIVE", "ACTIVE"], [42, 0], 0, ["describe", *RUN, "describe", *RUN, "delete"]),
        # preempted: the slice is deleted, asked for again, and waited for
        (
            ["ACTIVE", "SUSPENDED", "", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"],
            [255, 0],
            0,
            ["describe", *RUN, "describe", "delete", "describe", "create", *3 * ["describe"], *RUN, "delete"],
        ),
        (["ACTIVE", "ACTIVE"], [1], 1, ["describe", *RUN, "describe", "delete"]),  # a mistake
        # exit code 1 beside a slice that is gone is no mistake
        (
            ["ACTIVE", "FAILED", "FAILED", "ACTIVE"],
            [1, 0],
            0,
            ["describe", *RUN, "describe", "describe", "delete", "describe", *RUN, "delete"],
        ),
    ],
)
def test_a_babysitter_goes_on_until_the_run_ends(states, ends, code, calls):
    assert babysat(states, ends) == (code, calls)


def test_a_babysitter_gives_up_after_its_restarts():
    code, calls = babysat(["ACTIVE"] * 60, [42] * 60)
    assert code == 42 and calls.count("ssh") == 51 and calls[-1] == "delete"


def test_a_slice_is_created_as_asked():
    with launches.fakes([(["describe"], [(0, ""), (0, "ACTIVE")])]) as folder:
        subprocess.run(["bash", launches.GOLDENS / "tpu-vm-v5e-16" / "babysit.sh"], check=True, timeout=60)
        create = launches.recorded(folder)[1]
    assert " ".join(create) == (
        "gcloud compute tpus queued-resources create gsm8k-qwen2-5-7b --project=my-project --zone=us-east5-b "
        "--node-id=gsm8k-qwen2-5-7b --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --spot"
    )


def test_every_slice_of_several_is_started(tmp_path):
    arguments = [one for one in launches.LAUNCHES["tpu-vm-v6e-32"] if "mesh.fsdp" not in one and "rows" not in one]
    arguments += ["--nodes=2", "--config.mesh.data=2", "--config.mesh.fsdp=32", "--config.batch.rows=64"]
    assert launches.printed([*arguments, "--dry-run", f"--out={tmp_path}"])[0] == 0
    with launches.fakes([(["describe"], [(0, ""), (0, "ACTIVE")])]) as folder:
        subprocess.run(["bash", tmp_path / "babysit.sh"], check=True, timeout=60)
        calls = launches.recorded(folder)
    assert {"--node-count=2", "--node-prefix=gsm8k-qwen3"} <= set(calls[1])
    assert sorted(call[5] for call in calls if call[4] == "ssh") == ["gsm8k-qwen3-0", "gsm8k-qwen3-1"]


def test_a_batch_script_goes_back_into_the_queue_after_42_alone(tmp_path):
    script = launches.GOLDENS / "slurm-2-8xh100" / "job.sbatch"
    (tmp_path / "secret").write_text("value")
    text = script.read_text().replace("/home/me/.secrets/wandb", str(tmp_path / "secret"))
    for code, count, requeued in ((42, 0, 1), (137, 0, 1), (42, 50, 0), (1, 0, 0), (0, 0, 0)):
        calls = tmp_path / "calls"
        calls.write_text("")
        for program, body in (("srun", f"exit {code}"), ("scontrol", f"echo $@ >> {calls}")):
            (tmp_path / program).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / program).chmod(0o755)
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(count)}
        done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert calls.read_text().split() == ["requeue", "7"] * requeued


def test_a_local_job_starts_a_process_for_each_part_of_the_mesh(tmp_path, monkeypatch):
    called, executed = [], []
    monkeypatch.setattr(local, "run_job", lambda *given: called.append(given) or 42)
    monkeypatch.setattr(os, "execv", lambda *given: executed.append(given))
    launches.printed([*launches.LAUNCHES["local-4"], f"--out={tmp_path}"])
    ((program, words),) = executed
    assert program == words[0] == sys.executable and words[1:3] == ["-m", "jaxrl_post.launch.jobs.local"]
    assert local.main(words[3:]) == 42
    ((command, environments, most),) = called
    assert command[0] == sys.executable and command[1:3] == ["-m", "jaxrl_post.main"] and most == 50
    assert [one["JAX_PROCESS_ID"] for one in environments] == ["0", "1", "2", "3"]
    assert {one["XLA_FLAGS"] for one in environments} == {"--xla_force_host_platform_device_count=2"}


def test_a_local_job_joins_no_other_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(local, "run_job", lambda *given: pytest.fail("it was run"))
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]
        launches.printed([*launches.LAUNCHES["local-4"], f"--port={port}", "--dry-run", f"--out={tmp_path}"])
        assert local.main([str(tmp_path / "job.json")]) == 1
    assert capsys.readouterr().err == (
        f"error: localhost:{port} is taken, perhaps by another local job: end it, or write --port=N\n"
    )


def test_what_runs_a_local_job_loads_no_jax():
    code = "import sys, jaxrl_post.launch.jobs.local; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.shown("variants")
@pytest.mark.slow
def test_a_local_job_of_two_real_processes_runs_to_its_end_and_is_not_run_twice(tmp_path):
    few = ["steps=1", "checkpoint.every=1", "eval.prompts=4", "eval.samples=1", "scheduler.prompts=4", "mesh.data=2"]
    command = ["--target=local", "--config=configs/demo.py", "--nodes=2", f"--run-dir={tmp_path / 'run'}"]
    with socket.create_server(("localhost", 0)) as one:  # free in a moment
        command += [f"--port={one.getsockname()[1]}"]
    command += [f"--config.{one}" for one in few] + [f"--out={tmp_path / 'files'}"]
    assert launches.run(command) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["processes"], summary["devices"], summary["steps"]) == (2, 2, 1)
    weights = (tmp_path / "run" / "policy" / "model.safetensors").read_bytes()
    assert launches.run(command) == 0
    assert (tmp_path / "run" / "policy" / "model.safetensors").read_bytes() == weights


# ---- What does not fit, and secrets


def one_sentence(arguments: list[str], said: str) -> bool:
    """Whether a dry run ends with 1 and these words in one short line."""
    code, _, errors = launches.printed([*arguments, "--dry-run"])
    return code == 1 and errors.count("\n") == 1 and said in errors and len(errors) < 500


@pytest.mark.parametrize("name", launches.MISFITS)
def test_a_misfit_is_one_sentence(name):
    assert one_sentence(launches.misfit(name), launches.MISFITS[name][1])


MALFORMED = [
    (["--target"], "launch: "),
    (["--price=-1"], "--price=-1 must be at least 0"),
    (["--nodes=0"], "must be a whole number of at least 1"),
    (["--env=A"], "must be NAME=VALUE"),
    (["--env=A=1", "--env=A=2"], "sets 'A' twice"),
    (["--env=A=1", "--secret=A=a/b"], "both set A"),
    (["--env=a-b=1"], "is no name of a variable"),
]


def test_flags_of_another_form_are_one_sentence():
    """There are more than twenty misfits beside them."""
    assert len(launches.MISFITS) >= 20
    valid = launches.LAUNCHES["gke-tpu-v5p-64"]
    assert [more for more, said in MALFORMED if not one_sentence([*valid, *more], said)] == []
    code, _, errors = launches.printed([*valid, "--slcie=v5e-16", "--dry-run"])  # which names all flags
    assert code == 1 and errors.count("\n") == 1 and "nearest is --slice" in errors


@pytest.mark.parametrize("name", ["gke-tpu-v5e-16", "tpu-vm-v5p-64", "slurm-2-8xh100"])
def test_no_file_holds_the_value_of_a_secret(name, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hush-0123456789")
    code, out, errors = launches.printed([*launches.LAUNCHES[name], "--env=NOTE=hush-0123456789", "--dry-run"])
    assert code == 1 and "would hold the value of WANDB_API_KEY" in errors and "hush" not in out + errors
