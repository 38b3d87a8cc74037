"""Launches that tests and the show `strangers` go through, misfits that must each be one sentence, and fake cluster tools.

    python scripts/launches.py         prints the names
    python scripts/launches.py NAME    prints what one launch would run, as --dry-run does
    python scripts/launches.py --write writes tests/goldens/launch/ anew

Invariant: nothing here reaches a cluster. The fakes record how they were called, and answer as a script tells them.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GOLDENS = ROOT / "tests" / "goldens" / "launch"
CALLS = "calls.txt"
LIMIT_S = 300  # of a launch
PYTHON = "PYTHON"  # stands in a golden file for the interpreter that runs local jobs
IMAGE = "--image=us-docker.pkg.dev/my-project/rl/jaxrl-post:1"
FILES = ("--env=JAXRL_MODELS=/mnt/models", "--env=JAXRL_DATA=/mnt/data")
RUN_DIR = "--run-dir=/mnt/runs/first"
SEVEN, THREE = "--config=configs/models/gsm8k_qwen2_5_7b.py", "--config=configs/models/gsm8k_qwen3.py"
GKE = (IMAGE, *FILES, RUN_DIR, "--claim=shared")
BUCKET = (IMAGE, *FILES, "--run-dir=gs://my-bucket/runs/first", "--claim=shared")
VM = (IMAGE, *FILES, RUN_DIR, "--share=10.0.0.2:/shared", "--project=my-project", "--zone=us-east5-b")
KEYS = ("--secret=HF_TOKEN=keys/hf", "--secret=WANDB_API_KEY=keys/wandb", "--config.logger.wandb=online")
WIDE = ("--config.mesh.fsdp=32", "--config.batch.rows=32")
TWO_A3 = ("--config.mesh.data=2", "--config.batch.rows=16")
LAUNCHES: Mapping[str, tuple[str, ...]] = {
    "gke-tpu-v5e-16": ("--target=gke-tpu", f"{SEVEN}:v5e-16", "--slice=v5e-16", *GKE, *KEYS, "--queue=tpu"),
    "gke-tpu-v5p-64": ("--target=gke-tpu", f"{THREE}:32b-v5p-64", "--slice=v5p-64", *GKE),
    "gke-tpu-2-v6e-32": (
        *("--target=gke-tpu", f"{THREE}:8b-v6e-16", "--slice=v6e-32", "--nodes=2", *GKE, "--queue=tpu"),
        *("--config.mesh.data=2", "--config.mesh.fsdp=32", "--config.batch.rows=64", "--service-account=runner"),
    ),
    "gke-tpu-tpu7x-16": ("--target=gke-tpu", f"{THREE}:8b-v6e-16", "--slice=tpu7x-16", *GKE, "--spot"),
    "tpu-vm-v5e-16": (
        *("--target=tpu-vm", f"{SEVEN}:v5e-16", "--slice=v5e-16", *VM, "--spot", "--config.logger.wandb=online"),
        "--secret=WANDB_API_KEY=wandb",
    ),
    "tpu-vm-v5p-64": ("--target=tpu-vm", f"{THREE}:32b-v5p-64", "--slice=v5p-64", *VM),
    "tpu-vm-v6e-32": ("--target=tpu-vm", f"{THREE}:8b-v6e-16", "--slice=v6e-32", *VM, *WIDE),
    "gke-gpu-2-a3": ("--target=gke-gpu", f"{SEVEN}:8xh100", "--slice=8xh100", "--nodes=2", *GKE, *TWO_A3, *KEYS),
    "gke-gpu-4-a3-ultra": (
        *("--target=gke-gpu", f"{THREE}:32b-4x8xh100", "--slice=8xh200", "--nodes=4", *GKE, "--queue=gpu"),
    ),
    "gke-gpu-2-a4": ("--target=gke-gpu", f"{SEVEN}:8xh100", "--slice=8xb200", "--nodes=2", *BUCKET, *TWO_A3),
    "gke-gpu-a3": ("--target=gke-gpu", f"{SEVEN}:8xh100", "--slice=8xh100", *GKE),
    "slurm-2-8xh100": (
        *("--target=slurm", f"{SEVEN}:8xh100", "--slice=8xh100", "--nodes=2", *FILES, *TWO_A3, "--partition=h100"),
        *("--run-dir=/lustre/runs/first", "--secret=WANDB_API_KEY=/home/me/.secrets/wandb", "--hours=24"),
    ),
    "local-4": ("--target=local", "--config=configs/demo/sharded.py", "--nodes=4", "--run-dir=runs/first"),
}
EXTRA = ("gke-gpu-2-a4", "gke-gpu-a3")  # beside the eleven that are promised


# A launch that cannot be: one that can, what is left out of it (!) or added, and what the sentence must say.
MISFITS: Mapping[str, tuple[str, str]] = {
    "unknown target": ("gke-tpu-v5e-16 --target=gke-tup", "nearest is gke-tpu"),
    "no slice": ("gke-tpu-v5e-16 !--slice", "needs --slice=NAME"),
    "unknown slice": ("gke-tpu-v5e-16 --slice=v5e-15", "nearest valid one is v5e-16"),
    "mesh against slice": ("gke-tpu-v5e-16 --slice=v5e-32", "nearest valid value is mesh.fsdp=32"),
    "fsdp across slices": (
        "gke-tpu-2-v6e-32 --config.mesh.data=1 --config.mesh.fsdp=64",
        "only data may cross the network between slices",
    ),
    "replica across slices": (
        "tpu-vm-v5p-64 --slice=v5p-8 --nodes=3 --config.mesh.fsdp=4 --config.mesh.tensor=1 "
        "--config.mesh.engine=8 --config.mesh.engine_tensor=8 --config.batch.rows=4 "
        "--config.scheduler.name=pipeline --config.engine.sleep=false",
        "would lie in several slices",
    ),
    "split with unequal halves": (
        "gke-gpu-2-a3 --config.mesh.data=1 --config.mesh.fsdp=4 --config.mesh.engine=12 --config.batch.rows=8 "
        "--config.scheduler.name=pipeline",
        "it must be data*fsdp*tensor=4",
    ),
    "memory": (
        "gke-tpu-v5e-16 --config.engine.sleep=false --config.optimizer.moments_dtype=float32 "
        "--config.optimizer.sums_dtype=float32",
        "does not fit",
    ),
    "batch against shards": ("gke-tpu-v5e-16 --config.batch.rows=12", "batch.rows=12"),
    "heads against replica": ("gke-tpu-v5e-16 --config.mesh.engine_tensor=16", "does not divide"),
    "missing secret": ("gke-tpu-v5e-16 !--secret", "write --secret=WANDB_API_KEY=PLACE"),
    "secret as a variable": ("gke-tpu-v5p-64 --env=HF_TOKEN=abc", "--secret=HF_TOKEN=PLACE"),
    "secret of another form": ("gke-tpu-v5p-64 --secret=HF_TOKEN=hf", "must be SECRET/KEY"),
    "quota": ("gke-tpu-v5p-64 --quota=16", "v5p-64 has 32 chips, 16 more than the quota"),
    "folder of one host": ("gke-tpu-v5e-16 --run-dir=runs/first", "write --run-dir=/mnt/first"),
    "bucket without a name": ("gke-tpu-v5e-16 --run-dir=gs://my-bucket", "is no place in a bucket"),
    "disk that no pod has": ("gke-tpu-v5e-16 !--claim", "write --claim=CLAIM"),
    "files of this machine": ("gke-tpu-v5e-16 !--env", "lies on this machine alone"),
    "run that dies with its slice": (
        "tpu-vm-v5e-16 !--share",
        "lies on the slice's own disk, which is deleted with it",
    ),
    "models that no host has": ("tpu-vm-v5e-16 !--share --run-dir=gs://my-bucket/runs/vm", "that no host has"),
    "share of another form": ("tpu-vm-v5e-16 --share=/mnt", "must be SERVER:/EXPORT"),
    "no image": ("gke-tpu-v5e-16 !--image", "must be REGISTRY/NAME:TAG"),
    "no zone": ("tpu-vm-v5e-16 !--zone", "--zone='' must name where the TPUs are"),
    "tpu7x on tpu-vm": ("tpu-vm-v5e-16 --slice=tpu7x-16", "write --target=gke-tpu"),
    "GPUs on gke-tpu": ("gke-gpu-2-a3 --target=gke-tpu", "needs TPUs"),
    "part of a machine": ("gke-gpu-2-a3 --slice=4xh100 --config.mesh.data=1", "needs machines of eight"),
    "slices of one host": (
        "gke-tpu-2-v6e-32 --slice=v6e-8 --config.mesh.fsdp=8 --config.batch.rows=16",
        "take a larger slice",
    ),
    "name of a job": ("gke-tpu-v5e-16 --name=My_Run", "nearest valid name is my-run"),
    "nothing saved": (
        "gke-tpu-v5e-16 --config.checkpoint=default --config.checkpoint.every=0",
        "checkpoint.every=0 saves nothing",
    ),
    "config elsewhere": ("gke-tpu-v5e-16 --config=/etc/hosts.py", "outside of the working directory"),
    "slice of a local job": ("local-4 --slice=h100", "leave it out"),
    "processes of a local job": ("local-4 --nodes=3", "nearest valid value is 2"),
    "no GPUs for Slurm": ("slurm-2-8xh100 --slice=v5e-16 --nodes=1", "needs nodes with GPUs"),
}


def misfit(name: str) -> list[str]:
    """Returns the arguments of a launch that cannot be."""
    of, *changes = MISFITS[name][0].split()
    more = [one for one in changes if not one.startswith("!")]
    gone = [one[1:] for one in changes if one.startswith("!")] + [f"{one.partition('=')[0]}=" for one in more]
    return [one for one in LAUNCHES[of] if not one.startswith(tuple(gone))] + more


def printed(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Returns exit code, output and errors of `launch` in this process. The working directory must be the root."""
    from jaxrl_post.commands import launch

    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = launch.main(list(arguments))
    return code, out.getvalue(), errors.getvalue()


def run(arguments: Sequence[str]) -> int:
    """Returns the exit code of `launch` in a process of its own."""
    command = [sys.executable, "-m", "jaxrl_post", "launch", *arguments]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=LIMIT_S).returncode


def stay_here() -> None:
    """Goes to the root, where configs are, and plans by formulas: with a compiler each plan takes minutes."""
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxrl_post.launch.plan import device_less

    device_less.WHEELS = dict.fromkeys(device_less.WHEELS, ())


def rendered(name: str, folder: Path) -> dict[str, str]:
    """Returns the files of a launch by name, and its calls as `calls.txt`. They are written below `folder` first."""
    code, out, errors = printed([*LAUNCHES[name], "--dry-run", f"--out={folder}"])
    if code:
        raise RuntimeError(f"{name}: {errors}")
    files = {file.name: file.read_text() for file in sorted(folder.iterdir())}
    calls = out.partition("---- what would be called\n")[2].partition("\nwrote ")[0].strip()
    files[CALLS] = calls.replace(str(folder), "FOLDER") + "\n"
    return {file: text.replace(sys.executable, PYTHON) for file, text in files.items()}


# ---- Fields of a manifest


def fields_of(value: Any, place: tuple = ()) -> Iterator[tuple]:
    """Yields the place of every field: keys and positions from the outside in, the field's own name last."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in pairs:
        if isinstance(key, str):
            yield (*place, key)
        yield from fields_of(one, (*place, key))


def misspelt(manifest: dict, place: tuple) -> dict:
    """Returns a copy in which two letters of one field's name have changed places."""
    out = copy.deepcopy(manifest)
    *above, name = place
    part = out
    for one in above:
        part = part[one]
    at = next((at for at in range(len(name) - 1) if name[at] != name[at + 1]), 0)
    wrong = name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    part[wrong] = part.pop(name)
    return out


# ---- Fakes of gcloud, kubectl, sbatch and docker

_FAKE = """#!{python} -IS
import json, os, pathlib, sys
folder = pathlib.Path({folder!r})
calls = folder / "calls.jsonl"
with open(calls, "a") as out:
    out.write(json.dumps([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]) + "\\n")
for at, rule in enumerate(json.loads((folder / "rules.json").read_text())):
    told = folder / f"told_{{at}}"
    count = len(told.read_text()) if told.exists() else 0
    if all(word in sys.argv[1:] for word in rule["words"]) and count < len(rule["results"]):
        told.write_text("x" * (count + 1))
        code, text = rule["results"][count]
        sys.stdout.write(text)
        sys.exit(code)
"""


@contextlib.contextmanager
def fakes(rules: Sequence[tuple[Sequence[str], Sequence[tuple[int, str]]]] = ()) -> Iterator[Path]:
    """Puts fakes first on PATH, and yields the folder in which `recorded` finds their calls.

    Args:
      rules: of words that a call must have, and the exit codes and outputs of such calls in order. The first rule with a
        result left decides; without one a call ends with 0.
    """
    with tempfile.TemporaryDirectory(prefix="launches-") as name:
        folder = Path(name)
        told = [{"words": list(words), "results": [list(one) for one in results]} for words, results in rules]
        (folder / "rules.json").write_text(json.dumps(told))
        for program in ("gcloud", "kubectl", "sbatch"):
            file = folder / program
            file.write_text(_FAKE.format(python=sys.executable, folder=name))
            file.chmod(0o755)
        before = os.environ["PATH"]
        os.environ |= {"PATH": f"{name}{os.pathsep}{before}", "JAXRL_PAUSE_S": "0"}
        try:
            yield folder
        finally:
            os.environ["PATH"] = before
            del os.environ["JAXRL_PAUSE_S"]


def recorded(folder: Path) -> list[list[str]]:
    """Returns the calls of the fakes in order."""
    file = folder / "calls.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main(arguments: Sequence[str]) -> int:
    stay_here()
    if not arguments:
        print("\n".join(LAUNCHES))
        return 0
    if arguments[0] != "--write":
        command = [sys.executable, "-m", "jaxrl_post", "launch", *LAUNCHES[arguments[0]], "--dry-run"]
        return subprocess.run(command).returncode
    for name in LAUNCHES:
        with tempfile.TemporaryDirectory() as folder:
            files = rendered(name, Path(folder))
        (GOLDENS / name).mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (GOLDENS / name / file).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
