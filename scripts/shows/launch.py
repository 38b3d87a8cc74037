"""Eleven launches render, validate, lint and call as they should, and over twenty misfits are one sentence each.

The launches are TPU slices and machines of GPUs on GKE, TPU VMs, Slurm and local processes (scripts/launches.py), with two
more for A4 and a single A3. Four parts:
- Files: each launch renders its golden files. Each JobSet satisfies the schema, and a misspelling of any field does not.
- Scripts and images: shellcheck and hadolint find nothing.
- Calls: each launch is applied with fakes of gcloud, kubectl and sbatch on PATH, which must be called as written here. A
  babysitter loses its slice once, asks for it again, and goes on with the same run folder.
- Misfits: each ends with exit code 1 and one sentence, before anything is called.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

MINUTES = 1.5
SOURCES = ("scripts/launches.py", "tests/goldens/launch", "docker", "configs")
MISFITS = 20
PLACE = "--project=my-project --zone=us-east5-b"
SHAPES = {  # of a queued resource: its name, and what it is created with
    "tpu-vm-v5e-16": (
        "gsm8k-qwen2-5-7b",
        "--accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --spot",
    ),
    "tpu-vm-v5p-64": ("gsm8k-qwen3", "--accelerator-type=v5p-64 --runtime-version=v2-alpha-tpuv5"),
    "tpu-vm-v6e-32": ("gsm8k-qwen3", "--accelerator-type=v6e-32 --runtime-version=v2-alpha-tpuv6e"),
}
# States of a slice that is preempted once. The last start of its hosts follows a restart, not a loss.
LOST = ("", "WAITING_FOR_RESOURCES", "ACTIVE", "SUSPENDED", "", "PROVISIONING", "ACTIVE", "ACTIVE")


def show(record) -> None:
    sys.path[:0] = [str(record.root)]
    import launches

    launches.stay_here()
    with tempfile.TemporaryDirectory() as folder:
        _files(record, launches, Path(folder))
        _lint(record, launches)
        _calls(record, launches, Path(folder))
    _misfits(record, launches)


def _files(record, launches, folder: Path) -> None:
    import yaml

    from jaxrl_post.launch.jobs import gke, manifest

    same, tried, refused, jobsets = 0, 0, 0, 0
    for name in launches.LAUNCHES:
        files = launches.rendered(name, folder / name)
        same += files == {file.name: file.read_text() for file in (launches.GOLDENS / name).iterdir()}
        if gke.FILE not in files:
            continue
        whole = yaml.safe_load(files[gke.FILE])
        manifest.check(whole)
        jobsets += 1
        for place in launches.fields_of(whole):
            tried += 1
            try:
                manifest.check(launches.misspelt(whole, place))
            except ValueError:
                refused += 1
    record.figure("launches", len(launches.LAUNCHES) - len(launches.EXTRA), at_least=11)
    record.figure("launches.as_their_golden_files", same, equals=len(launches.LAUNCHES))
    record.figure("jobsets.valid", jobsets, equals=8)
    record.figure("fields.misspelt", tried, at_least=400)
    record.figure("fields.refused", refused, equals=tried)


def _lint(record, launches) -> None:
    scripts = sorted(file for file in launches.GOLDENS.rglob("*") if file.suffix in (".sh", ".sbatch"))
    images = sorted((record.root / "docker").glob("Dockerfile.*"))
    for program, files in (("shellcheck", scripts), ("hadolint", images)):
        done = subprocess.run([Path(sys.executable).with_name(program), *files], capture_output=True, text=True)
        record.figure(f"{program}.files", len(files), at_least=2)
        record.figure(f"{program}.exit_code", done.returncode, equals=0)


def _calls(record, launches, folder: Path) -> None:
    right = 0
    for name in launches.LAUNCHES:
        if name.startswith("local"):
            continue  # its processes are real: the show `joined` starts such a job
        out = folder / name
        with launches.fakes([(["describe"], [(0, ""), (0, "ACTIVE")])]) as fakes:
            done = launches.run([*launches.LAUNCHES[name], f"--out={out}"])
            right += done == 0 and launches.recorded(fakes) == _expected(name, out)
    record.figure("calls.launches_that_call_as_expected", right, equals=len(launches.LAUNCHES) - 1)
    with launches.fakes(
        [(["describe"], [(0, state) for state in LOST]), (["ssh"], [(255, ""), (42, ""), (0, "")])]
    ) as fakes:
        done = launches.run([*launches.LAUNCHES["tpu-vm-v5e-16"], f"--out={folder / 'lost'}"])
        calls = [call[4] for call in launches.recorded(fakes)]
    record.figure("babysitter.exit_code", done, equals=0)
    record.figure("babysitter.slices_created", calls.count("create"), equals=2)
    record.figure("babysitter.slices_deleted", calls.count("delete"), equals=2)
    record.figure("babysitter.starts_of_the_hosts", calls.count("ssh"), equals=3)


def _expected(name: str, out: Path) -> list[list[str]]:
    """Returns the calls of a launch whose run ends at once."""
    if name.startswith("gke"):
        return [["kubectl", "apply", "--filename", f"{out}/jobset.yaml"]]
    if name.startswith("slurm"):
        return [["sbatch", f"{out}/job.sbatch"]]
    job, shape = SHAPES[name]
    queued, nodes, every = "gcloud compute tpus queued-resources", "gcloud compute tpus tpu-vm", "--worker=all --quiet"
    describe = f"{queued} describe {job} {PLACE} --format=value(state.state)".split()
    return [
        describe,
        f"{queued} create {job} {PLACE} --node-id={job} {shape}".split(),
        describe,
        f"{nodes} scp {out}/host.sh {job}:host.sh {PLACE} {every}".split(),
        [
            *f"{nodes} ssh {job} {PLACE} {every}".split(),
            *("--ssh-flag=-o ServerAliveInterval=30", "--command=bash host.sh"),
        ],
        f"{queued} delete {job} {PLACE} --force --quiet".split(),
    ]


def _misfits(record, launches) -> None:
    said = {}
    with launches.fakes() as fakes:
        for name, misfit in launches.MISFITS.items():
            code, _, errors = launches.printed(misfit.arguments)
            said[name] = code == 1 and errors.count("\n") == 1 and misfit.said in errors
        calls = launches.recorded(fakes)
    record.figure("misfits", len(said), at_least=MISFITS)
    record.figure("misfits.not_one_sentence", [name for name, right in said.items() if not right], equals=[])
    record.figure("misfits.calls", len(calls), equals=0)
