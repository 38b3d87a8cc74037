"""Runs that are killed and resumed, and what is compared of two runs: for the tests that do so with further settings."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from test_main import CONFIG, go, write_sums

from jaxrl_post.runs import metric_rows

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import killed

STEPS = 5
FLAGS = (
    f"--config.steps={STEPS}",
    "--config.checkpoint.every=2",
    "--config.checkpoint.keep_last=2",
    "--config.eval.every=2",
    "--config.eval.prompts=3",
    "--config.optimizer.weight_decay=0.1",
    "--config.optimizer.schedule=cosine",
    "--config.engine.row_sizes=(16,32)",
)
REWARD = """
def even(data_source, solution_str, ground_truth, extra_info):
    return {"score": sum(c in "02468" for c in solution_str) / 8, "acc": float(solution_str[:1] == ground_truth[:1])}
"""
PAIR = (
    "--config.mesh.data=2",
    "--config.mesh.fsdp=2",
    "--config.steps=3",
    "--config.checkpoint.every=1",
    "--config.checkpoint.keep_last=3",
    "--config.eval.prompts=2",
    "--config.eval.every=2",
    "--config.eval.samples=1",
    "--config.engine.row_sizes=(32,)",
    "--config.optimizer.weight_decay=0.1",
)


class Killed(BaseException):
    """Not an Exception: nothing of the run may catch it."""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The run of test_main on 12 prompts, one epoch and a bit, with a reward that says something about every answer."""
    folder = tmp_path_factory.mktemp("resume")
    write_sums(folder, 4, 4, trained=12)
    (folder / "reward.py").write_text(REWARD)
    (folder / "toy.py").write_text(CONFIG.format(here=folder).replace("first_digit", "even"))
    return folder


@pytest.fixture(scope="module")
def whole(here):
    """The run that nothing happens to."""
    assert go(here, f"--run-dir={here / 'whole'}", *FLAGS) == 0
    rows = metric_rows.read(here / "whole" / "metrics.jsonl")
    assert all(row["actor/grad_norm"] > 0 for row in rows if "actor/grad_norm" in row)
    return here / "whole"


def resume(here, folder, *flags):
    return go(here, f"--run-dir={folder}", "--resume", *FLAGS, *flags)


def whole_run(here, name, *flags):
    """The folder of a run that nothing happens to, with which several tests compare: begun by the first that asks. What a
    failed test left of it is thrown away, not gone on with."""
    folder = here / name
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        assert resume(here, folder, *flags) == 0
    return folder


def final_state(folder):
    """Weights, moments and step of the last checkpoint, read by Orbax alone."""
    last = max((folder / "checkpoints").glob("step_??????"))
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        found = reader.restore(last.absolute() / "arrays")
    return {name: np.asarray(leaf) for name, leaf in found.items()}


def same_run(one, two):
    """Everything that a run leaves and that was not timed."""
    files = [
        sorted(
            path.relative_to(folder).as_posix()
            for path in folder.rglob("*")
            if path.is_file() and not {"attempts", "checkpoints", "rewards.log"} & set(path.parts)
        )
        for folder in (one, two)
    ]
    assert files[0] == files[1] and len(files[0]) > 12
    for name in files[0]:
        if name not in ("metrics.jsonl", "summary.json", "config.json", "report.html"):
            assert (one / name).read_bytes() == (two / name).read_bytes(), name
    rows = [metric_rows.read(folder / "metrics.jsonl") for folder in (one, two)]
    assert [metric_rows.deterministic(row) for row in rows[0]] == [metric_rows.deterministic(row) for row in rows[1]]
    told = [json.loads((folder / "summary.json").read_text()) | killed.LAST_START for folder in (one, two)]
    assert told[0] == told[1]
    states = [final_state(folder) for folder in (one, two)]
    assert sorted(states[0]) == sorted(states[1]) and any(name.startswith("opt_state") for name in states[0])
    for name, leaf in states[0].items():
        assert leaf.dtype == states[1][name].dtype and leaf.tobytes() == states[1][name].tobytes(), name


def kill(here, folder, owner, name, count, *, after=False, flags=()):
    """Resumes until `owner.name` is called for the `count`-th time here, and ends there, before or after it."""
    real, calls = getattr(owner, name), []

    def dying(*args, **kwargs):
        calls.append(1)
        if len(calls) == count and not after:
            raise Killed
        out = real(*args, **kwargs)
        if len(calls) == count:
            raise Killed
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, dying)
        with pytest.raises(Killed):
            resume(here, folder, *flags)


def saved(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("step_*"))


@pytest.fixture
def ended(here, whole, tmp_path):
    """A copy of the whole run."""
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def pair(here, folder, cache, *, code=(), resumed=False, flags=()):
    """Two processes of two forced devices each; their exit statuses and what they said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = str(Path(__file__).parents[1])
    command = [
        sys.executable,
        *(code or ("-m", "jaxrl_post.main")),
        f"--config={here / 'toy.py'}",
        f"--run-dir={folder}",
        *PAIR,
        *flags,
        *(["--resume"] if resumed else []),
    ]
    given = os.environ | {
        "PYTHONPATH": root,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
    }
    jobs = [
        subprocess.Popen(
            command,
            env=given | {"JAX_PROCESS_ID": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=root,
        )
        for i in range(2)
    ]
    said = [job.communicate(timeout=300)[0] for job in jobs]
    return [job.returncode for job in jobs], said


def placed_state(folder):
    """As `final_state`, of arrays that lay on more devices than there are here."""
    last = max((folder / "checkpoints").glob("step_??????"))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    kinds = {
        name: kind.rstrip("]").split("[")
        for name, kind in json.loads((last / "about.json").read_text())["arrays"].items()
    }
    like = {
        name: jax.ShapeDtypeStruct([int(n) for n in shape.split(",") if n], dtype, sharding=here)
        for name, (dtype, shape) in kinds.items()
    }
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        found = reader.restore(last.absolute() / "arrays", args=ocp.args.StandardRestore(like))
    return {name: np.asarray(leaf) for name, leaf in found.items()}
