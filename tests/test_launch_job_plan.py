"""The plan of a launched job: what each host gets at a publish, hours and cost, by hand."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import launches  # noqa: E402
from test_launch_jobs import place  # noqa: E402, F401  (a fixture that every test here uses)

from jaxrl_post.commands import launch  # noqa: E402
from jaxrl_post.config import load, resolve  # noqa: E402
from jaxrl_post.launch import stop_signal  # noqa: E402
from jaxrl_post.launch.jobs import plan, roles  # noqa: E402
from jaxrl_post.launch.jobs import request as requests  # noqa: E402
from jaxrl_post.launch.parts import inputs  # noqa: E402
from jaxrl_post.launch.plan import chips, roofline  # noqa: E402
from jaxrl_post.parallel import mesh as meshes  # noqa: E402


def settled(name):
    """Config, model and slice of a launch."""
    flags = launch.main.read([*launches.LAUNCHES[name], "--dry-run"])
    where = launch._request(flags).where
    config = resolve(load(flags.config), flags.overrides, platform=where.chip.platform)
    return config, inputs.shape(config), where


@pytest.mark.parametrize("name", ["gke-tpu-v5e-16", "gke-tpu-2-v6e-32", "gke-gpu-4-a3-ultra", "tpu-vm-v5p-64"])
def test_a_publish_brings_each_host_its_replicas_weights(name):
    """Each device gets its part of a replica. One part in fsdp x tensor is there already, at most, and no more."""
    config, model, where = settled(name)
    hosts = roles.of(config, model, roles.planned(where))
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
    devices = roles.planned(chips.read("v6e-32").times(2))
    learner, engine = meshes.make_split(2, 16, 1, 32, 4, devices=devices)
    assert [{device.slice_index for device in part.flat} for part in learner.devices] == [{0}, {1}]
    assert all(len({device.slice_index for device in one.flat}) == 1 for one in engine.devices)
    assert meshes.processes(learner).isdisjoint(meshes.processes(engine))
    assert len(meshes.processes(learner)) == len(meshes.processes(engine)) == 8
    split = ["mesh.data=2", "mesh.fsdp=16", "mesh.engine=32", "mesh.engine_tensor=4", "batch.rows=32"]
    split += ["engine.sleep=false", "scheduler.name=pipeline"]
    config = resolve(load("configs/models/gsm8k_qwen3.py"), split, platform="tpu")
    hosts = roles.of(config, inputs.shape(config), devices)
    assert {(one.role, one.learns, one.generates, one.far) for one in hosts} == {
        ("learns", 4, 0, 0),
        ("generates", 0, 4, 0),
    }
    assert [one.near > 0 for one in hosts] == [one.generates > 0 for one in hosts]
    told = roles.table(hosts, "ICI", "DCN")
    assert "Whole hosts learn, and whole hosts generate" in told


def test_hosts_of_tpus_are_blocks_of_chips_and_slices_are_apart():
    devices = roles.planned(chips.read("v5e-16").times(2))
    assert [device.id for device in devices] == list(range(32))
    blocks = {(d.slice_index, d.process_index, d.coords[0] // 2, d.coords[1] // 2) for d in devices}
    assert len(blocks) == 8 == len({device.process_index for device in devices})
    assert {device.core_on_chip for device in roles.planned(chips.read("tpu7x-8"))} == {0, 1}


def test_a_forecast_by_hand():
    """32 billion weights with bfloat16 moments are 8 bytes each, written by 8 hosts at 200 MB/s."""
    config, model, where = settled("gke-tpu-v5p-64")
    assert config.optimizer.moments_dtype == "bfloat16"
    found = plan.forecast(config, model, 100.0, where.hosts)
    assert found.save_s == pytest.approx(32762123264 * 8 / 8 / 2e8)
    assert found.saves == 6 and found.hours == pytest.approx((174 * 100 + 6 * found.save_s) / 3600)
    assert found.grace_s == 10 * int(np.ceil((100 * config.scheduler.updates + found.save_s + 30) / 10))
    assert plan.forecast(config, model, 0.1, 8, save_s=1.0).grace_s == plan.LEAST_S
    uploaded = plan.forecast(config, model, 100.0, where.hosts, uploads=True)
    assert (uploaded.upload_s, uploaded.hours) == (found.save_s, found.hours)
    assert uploaded.grace_s == 10 * int(np.ceil((100 * config.scheduler.updates + 2 * found.save_s + 30) / 10))
    assert stop_signal.limit({stop_signal.GRANTED: str(plan.LEAST_S)}) >= stop_signal.LIMIT_S  # what a process takes
    assert plan.forecast(config, model, 9e9, 8).grace_s == plan.MOST_S
    _, chip_hours, grace = plan.forecast_lines(found, where, 2.0)
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


@pytest.mark.parametrize("length", [64, 256, 512])
def test_one_step_time_is_printed_and_paid_for(length):
    """Of the mean length that --length says, whatever it is: T13. A longer one takes longer."""
    code, out, _ = launches.printed(
        [*launches.LAUNCHES["gke-tpu-v5e-16"], "--price=1", f"--length={length}", "--dry-run"]
    )
    assert code == 0 and len(re.findall(r"An optimizer step takes", out)) == 1
    ((mean, _),) = re.findall(r"rollouts of ([\d.]+) tokens on average, at most (\d+)", out)
    assert float(mean) == pytest.approx(length, rel=0.01)
    parts = out.partition("Seconds of the parts of an optimizer step")[2].partition("predicted, not measured")[0]
    assert not re.search(r"^ +all ", parts, re.MULTILINE)
    (told,) = re.findall(r"An optimizer step takes ([\d.]+) s", out)
    assert f"steps of {told} s" in out


def test_a_length_that_no_rollout_can_have_is_refused():
    code, _, errors = launches.printed([*launches.LAUNCHES["gke-tpu-v5e-16"], "--length=513", "--dry-run"])
    assert code == 1 and "from 1 to sampling.max_tokens=512; the nearest valid value is 512" in errors


def test_a_request_knows_the_config_as_its_processes_will():
    """The variables of --env are those of the pod, for the time of reading alone."""
    before = dict(os.environ)
    with plan._with({"JAXRL_MODELS": "/mnt/elsewhere", "ONE_MORE": "1"}):
        assert load("configs/models/gsm8k_qwen2_5_7b.py").model.path == "/mnt/elsewhere/Qwen2.5-7B-Instruct"
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
