"""Jobs that are launched: golden files, schema, shell scripts, calls of fake tools, misfits, secrets, and the plan by hand."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import launches  # noqa: E402

from jaxrl_post.commands import launch  # noqa: E402
from jaxrl_post.config import load, resolve  # noqa: E402
from jaxrl_post.launch import chips, device_less, inputs, local_job, roofline, stop_signal  # noqa: E402
from jaxrl_post.launch.jobs import forecast, gke, local, manifest, plan, planned_devices, roles  # noqa: E402
from jaxrl_post.launch.jobs import request as requests  # noqa: E402
from jaxrl_post.parallel import mesh as meshes  # noqa: E402

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


def test_eleven_launches_and_one_more_have_goldens():
    assert len(launches.LAUNCHES) == 11 + len(launches.EXTRA)
    assert sorted(path.name for path in launches.GOLDENS.iterdir()) == sorted(launches.LAUNCHES)


@pytest.mark.parametrize("name", launches.LAUNCHES)
def test_every_command_resumes_one_folder(name):
    run_dir = next(one for one in launches.LAUNCHES[name] if one.startswith("--run-dir="))
    texts = [file.read_text() for file in (launches.GOLDENS / name).iterdir() if file.name != launches.CALLS]
    (text,) = [text for text in texts if "jaxrl_post.main" in text]
    assert text.count("--resume") == 1 == text.count(run_dir) and text.count("jaxrl_post.main") == 1


@pytest.mark.parametrize("name", JOBSETS)
def test_every_misspelt_field_of_a_jobset_is_refused(name):
    whole = yaml.safe_load((launches.GOLDENS / name / gke.FILE).read_text())
    manifest.check(whole)
    places = list(launches.fields_of(whole))
    assert len(places) > 60
    for place in places:
        with pytest.raises(ValueError, match="JobSet: "):
            manifest.check(launches.misspelt(whole, place))


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
    whole = yaml.safe_load((launches.GOLDENS / JOBSETS[0] / gke.FILE).read_text())
    *above, last = path
    part = whole
    for one in above:
        part = part[one]
    part[last] = value
    with pytest.raises(ValueError, match="JobSet: "):
        manifest.check(whole)


def test_a_jobset_says_what_follows_each_end_of_a_pod():
    whole = yaml.safe_load((launches.GOLDENS / "gke-tpu-2-v6e-32" / gke.FILE).read_text())
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
    whole = yaml.safe_load((launches.GOLDENS / name / gke.FILE).read_text())
    pod = whole["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
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
    monkeypatch.setattr(local_job, "run_job", lambda *given: called.append(given) or 42)
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
    monkeypatch.setattr(local_job, "run_job", lambda *given: pytest.fail("it was run"))
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


@pytest.mark.parametrize("name", launches.MISFITS)
def test_a_misfit_is_one_sentence(name):
    misfit = launches.MISFITS[name]
    code, _, errors = launches.printed([*misfit.arguments, "--dry-run"])
    assert code == 1 and errors.count("\n") == 1 and misfit.said in errors and len(errors) < 500


def test_there_are_twenty_misfits():
    assert len(launches.MISFITS) >= 20


@pytest.mark.parametrize(
    "more, said",
    [
        (["--target"], "launch: "),
        (["--price=-1"], "--price=-1 must be at least 0"),
        (["--nodes=0"], "must be a whole number of at least 1"),
        (["--env=A"], "must be NAME=VALUE"),
        (["--env=A=1", "--env=A=2"], "sets 'A' twice"),
        (["--env=A=1", "--secret=A=a/b"], "both set A"),
        (["--env=a-b=1"], "is no name of a variable"),
        (["--slcie=v5e-16"], "nearest is --slice"),
    ],
)
def test_a_flag_of_another_form_is_one_sentence(more, said):
    code, _, errors = launches.printed([*launches.LAUNCHES["gke-tpu-v5p-64"], *more, "--dry-run"])
    assert code == 1 and errors.count("\n") == 1 and said in errors


@pytest.mark.parametrize("name", ["gke-tpu-v5e-16", "tpu-vm-v5p-64", "slurm-2-8xh100"])
def test_no_file_holds_the_value_of_a_secret(name, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hush-0123456789")
    code, out, errors = launches.printed([*launches.LAUNCHES[name], "--env=NOTE=hush-0123456789", "--dry-run"])
    assert code == 1 and "would hold the value of WANDB_API_KEY" in errors and "hush" not in out + errors


# ---- Plan


def settled(name):
    """Config, model and slice of a launch."""
    flags = launch._read([*launches.LAUNCHES[name], "--dry-run"])
    where = launch._request(flags).where
    config = resolve(load(flags.config), flags.overrides, platform=where.chip.platform)
    return config, inputs.shape(config), where


@pytest.mark.parametrize("name", ["gke-tpu-v5e-16", "gke-tpu-2-v6e-32", "gke-gpu-4-a3-ultra", "tpu-vm-v5p-64"])
def test_a_publish_brings_each_host_its_replicas_weights(name):
    """Each device gets its part of a replica. One part in fsdp x tensor is there already, at most, and no more."""
    config, model, where = settled(name)
    hosts = roles.of(config, model, planned_devices.of(where))
    assert len(hosts) == where.hosts and sum(one.learns for one in hosts) == config.mesh.learner
    whole = 2 * roofline.parameters(model)
    got = sum(one.near + one.far for one in hosts)
    needed = whole * config.generating / config.mesh.replica
    assert needed * (1 - 1 / config.mesh.fsdp) * 0.999 <= got <= needed
    if where.chip.grids:
        assert all(one.far == 0 for one in hosts), (
            "a slice has a whole copy, so nothing crosses the network between slices"
        )
    else:  # 8 of 32 parts of a weight are on the host
        assert all(abs(one.far / whole - 24 / 32) < 0.01 for one in hosts)


def test_a_split_over_slices_keeps_weights_and_replicas_within_each():
    """Half of each slice's hosts learn, and the others generate. Weights come from the own slice alone."""
    devices = planned_devices.of(chips.read("v6e-32").times(2))
    learner, engine = meshes.make_split(2, 16, 1, 32, 4, devices=devices)
    assert [{device.slice_index for device in part.flat} for part in learner.devices] == [{0}, {1}]
    assert all(len({device.slice_index for device in one.flat}) == 1 for one in engine.devices)
    assert meshes.processes(learner).isdisjoint(meshes.processes(engine))
    assert len(meshes.processes(learner)) == len(meshes.processes(engine)) == 8
    split = ["mesh.data=2", "mesh.fsdp=16", "mesh.engine=32", "mesh.engine_tensor=4", "batch.rows=32"]
    split += ["engine.sleep=false", "scheduler.name=pipeline"]
    config = resolve(load("configs/gsm8k_qwen3.py"), split, platform="tpu")
    hosts = roles.of(config, inputs.shape(config), devices)
    assert {(one.role, one.learns, one.generates, one.far) for one in hosts} == {
        ("learns", 4, 0, 0),
        ("generates", 0, 4, 0),
    }
    assert [one.near > 0 for one in hosts] == [one.generates > 0 for one in hosts]
    told = roles.table(hosts, "ICI", "DCN")
    assert "Whole hosts learn, and whole hosts generate" in told


def test_hosts_of_tpus_are_blocks_of_chips_and_slices_are_apart():
    devices = planned_devices.of(chips.read("v5e-16").times(2))
    assert [device.id for device in devices] == list(range(32))
    blocks = {(d.slice_index, d.process_index, d.coords[0] // 2, d.coords[1] // 2) for d in devices}
    assert len(blocks) == 8 == len({device.process_index for device in devices})
    assert {device.core_on_chip for device in planned_devices.of(chips.read("tpu7x-8"))} == {0, 1}


def test_a_forecast_by_hand():
    """32 billion weights with bfloat16 moments are 8 bytes each, written by 8 hosts at 200 MB/s."""
    config, model, where = settled("gke-tpu-v5p-64")
    assert config.optimizer.moments_dtype == "bfloat16"
    found = forecast.of(config, model, 100.0, where.hosts)
    assert found.save_s == pytest.approx(32762123264 * 8 / 8 / 2e8)
    assert found.saves == 6 and found.hours == pytest.approx((174 * 100 + 6 * found.save_s) / 3600)
    assert found.grace_s == 10 * int(np.ceil((100 * config.scheduler.updates + found.save_s + 30) / 10))
    assert forecast.of(config, model, 0.1, 8, save_s=1.0).grace_s == forecast.LEAST_S
    uploaded = forecast.of(config, model, 100.0, where.hosts, uploads=True)
    assert (uploaded.upload_s, uploaded.hours) == (found.save_s, found.hours)
    assert uploaded.grace_s == 10 * int(np.ceil((100 * config.scheduler.updates + 2 * found.save_s + 30) / 10))
    assert (
        stop_signal.limit({stop_signal.GRANTED: str(forecast.LEAST_S)}) >= stop_signal.LIMIT_S
    )  # what a process takes
    assert forecast.of(config, model, 9e9, 8).grace_s == forecast.MOST_S
    _, chip_hours, grace = forecast.lines(found, where, 2.0)
    assert f"= ${32 * found.hours * 2:,.2f}" in chip_hours and f"{found.grace_s} s" in grace


def test_a_measured_save_sets_the_grace_period():
    code, out, _ = launches.printed([*launches.LAUNCHES["gke-tpu-v5e-16"], "--save-seconds=300", "--dry-run"])
    assert code == 0 and "terminationGracePeriodSeconds: 380" in out and "of 300 s (measured)" in out  # 41.3 s a step


def test_hours_and_cost_are_those_of_the_simulated_step():
    """By hand from the printed seconds; the grace period has room for a step of the roofline, 41.3 s here."""
    code, out, _ = launches.printed([*launches.LAUNCHES["gke-tpu-v5e-16"], "--price=1.5", "--dry-run"])
    assert code == 0
    (told,) = re.findall(r"An optimizer step takes ([\d.]+) s by simulation of the scheduler \(sync\), predicted", out)
    ((steps, step, saves, save, hours),) = re.findall(
        r"(\d+) steps of ([\d.]+) s and (\d+) saves of (\d+) s .*: ([\d.]+) hours, predicted, not measured", out
    )
    assert step == told and 30 < float(step) < 41.3
    assert float(hours) == pytest.approx((int(steps) * float(step) + int(saves) * float(save)) / 3600, abs=0.06)
    ((chip_hours, dollars),) = re.findall(r"= ([\d.]+) chip-hours x \$1.5 = \$([\d.]+)", out)
    assert float(chip_hours) == pytest.approx(16 * float(hours), abs=0.9)
    assert float(dollars) == pytest.approx(1.5 * float(chip_hours), abs=0.1)
    assert "terminationGracePeriodSeconds: 150" in out


def test_a_request_knows_the_config_as_its_processes_will():
    """The variables of --env are those of the pod, for the time of reading alone."""
    before = dict(os.environ)
    with plan._with({"JAXRL_MODELS": "/mnt/elsewhere", "ONE_MORE": "1"}):
        assert load("configs/gsm8k_qwen2_5_7b.py").model.path == "/mnt/elsewhere/Qwen2.5-7B-Instruct"
    assert dict(os.environ) == before


def test_names_of_images():
    request = requests.Request(
        target="gke-tpu", config="", overrides=(), where=None, processes=1, name="a", run_dir="", restarts=0
    )
    for image in ("gcr.io/p/a:1", "localhost:5000/a:b", f"r/a@sha256:{'0' * 64}"):
        requests.check_image(dataclasses.replace(request, image=image))
    for image in ("", "a", "a:1", "gcr.io/p/a", "gcr.io/p/a:1; rm"):
        with pytest.raises(ValueError, match="must be REGISTRY/NAME:TAG"):
            requests.check_image(dataclasses.replace(request, image=image))
