"""Devices and launches: folders that die with a slice (T02), one step time (T13), and networks between hosts alone (T23)."""

from __future__ import annotations

import itertools
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import launches
import yaml

from strangers import Members

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

VM = ("tpu-vm-v5e-16", "tpu-vm-v5p-64", "tpu-vm-v6e-32")
DYING = ("/mnt/runs/a", "/mnt/a", "/mnt/disks/a", "runs/a", "/home/me/a", "/tmp/a", "/data/a")
LASTING = ("gs://bucket/a", "gs://my-bucket/runs/a", "s3://bucket/a")
STEP = re.compile(r"An optimizer step takes ([\d.]+) s")


def _counted(cases: Iterator[tuple[str, Callable[[], str]]]) -> Members:
    """Returns how many cases there were, and those whose check says what is wrong."""
    wrong, tried = [], 0
    for name, check in cases:
        tried += 1
        if said := check():
            wrong.append(f"{name}: {said}")
    return Members(tried=tried, wrong=tuple(wrong))


def _launched(*arguments: str) -> tuple[int, str, str]:
    launches.stay_here()
    return launches.printed([*arguments, "--dry-run"])


def t02() -> Members:
    """A folder on the slice's own disk is refused with what to write; a bucket, or a mounted share, is not."""

    def dies(name: str, folder: str) -> str:
        given = [one for one in launches.LAUNCHES[name] if not one.startswith(("--share", "--run-dir"))]
        code, _, errors = _launched(*given, f"--run-dir={folder}")
        right = code == 1 and errors.count("\n") == 1 and "deleted with it" in errors and "gs://" in errors
        return "" if right else f"code {code}, {errors[:200]}"

    def lasts(name: str, folder: str) -> str:
        given = [one for one in launches.LAUNCHES[name] if not one.startswith("--run-dir")]
        code, out, errors = _launched(*given, f"--run-dir={folder}")
        right = code == 0 and f"--run-dir={folder}" in out and "mount -t nfs" in out
        return "" if right else f"code {code}, {errors[:200]}"

    refused = ((f"{name} {one}", lambda n=name, f=one: dies(n, f)) for name, one in itertools.product(VM, DYING))
    taken = ((f"{name} {one}", lambda n=name, f=one: lasts(n, f)) for name, one in itertools.product(VM[:1], LASTING))
    shared = ((f"{name} share", lambda n=name: lasts(n, "/mnt/runs/b")) for name in VM)
    return _counted(itertools.chain(refused, taken, shared))


def t13() -> Members:
    """One step time is printed, of the mean length that was asked for; hours and dollars are those of it."""
    targets = ("gke-tpu-v5e-16", "gke-tpu-v5p-64", "gke-gpu-a3", "slurm-2-8xh100")
    slow = {}

    def check(name: str, length: int) -> str:
        code, out, errors = _launched(*launches.LAUNCHES[name], "--price=2", f"--length={length}")
        times, paid = STEP.findall(out), re.findall(r"steps of ([\d.]+) s", out)
        mean = re.findall(r"rollouts of ([\d.]+) tokens on average", out)
        if code or len(times) != 1 or times != paid or len(mean) != 1 or abs(float(mean[0]) / length - 1) > 0.01:
            return f"code {code}, steps {times}, paid {paid}, mean {mean}, {errors[:200]}"
        before = slow.get(name, 0.0)
        slow[name] = float(times[0])
        return "" if slow[name] >= before else f"{length} tokens take {slow[name]} s, and fewer took {before} s"

    lengths = (32, 64, 128, 192, 256, 384)
    return _counted((f"{n} {k}", lambda n=n, k=k: check(n, k)) for n, k in itertools.product(targets, lengths))


def t23() -> Members:
    """A machine of eight GPUs alone has no daemon and no networks; several have those of their kind."""
    marks = {"8xh100": "vpc8", "8xh200": "rdma-7", "8xb200": "rdma-7"}

    def check(kind: str, nodes: int, *more: str) -> str:
        given = [
            one
            for one in launches.LAUNCHES["gke-gpu-a3"]
            if not one.startswith(("--slice", "--config.mesh", "--config.batch"))
        ]
        with tempfile.TemporaryDirectory() as folder:
            shape = (f"--config.mesh.data={nodes}", f"--config.batch.rows={8 * nodes}")
            code, _, errors = _launched(
                *given, f"--slice={kind}", f"--nodes={nodes}", *shape, *more, f"--out={folder}/out"
            )
            if code:
                return errors[:200]
            job = yaml.safe_load((Path(folder) / "out" / "jobset.yaml").read_text())
        pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        there = marks[kind] in str(pod.get("metadata", {})), "initContainers" in pod["spec"]
        return "" if there == (nodes > 1, nodes > 1) else f"networks and daemon: {there}"

    more = ((), ("--spot",), ("--queue=gpu",), ("--restarts=3",))
    cases = itertools.product(marks, (1, 2), more)
    return _counted((f"{n} x {k} {' '.join(m)}", lambda k=k, n=n, m=m: check(k, n, *m)) for k, n, m in cases)


KINDS = {"T02": t02, "T13": t13, "T23": t23}
