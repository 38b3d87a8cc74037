"""python -m jaxrl_post launch --target=TARGET --config=FILE --run-dir=FOLDER [--slice=NAME] [--dry-run] [...]

Starts a run on several hosts: renders files from the run's own config, checks them, says what the run takes, and applies
them. --dry-run stops before that. A value stands behind a space or behind "=".

--target gke-tpu | gke-gpu   a JobSet for Google Kubernetes Engine, by kubectl
--target tpu-vm              a queued resource of TPU VMs, by gcloud
--target slurm               a batch script, by sbatch
--target local               processes on this machine

--config FILE, --config.a.b=VALUE   as python -m jaxrl_post.main has them; FILE lies below the working directory
--run-dir FOLDER             the run's folder, the same at every start; on Google Cloud in a bucket, or below /mnt, where
                             a shared disk is
--slice NAME                 v5e-16, v5p-64, 8xh100, ...; every target but local needs it
--nodes N                    so many slices, machines of GPUs, or local processes; 1
--name NAME                  of the job; the config's name
--dry-run                    prints the files and the calls
--out FOLDER                 where the files are written; launches/NAME, and none with --dry-run
--restarts N                 at most so many after exit code 42; 50

--price DOLLARS              of a chip for an hour: prints the cost
--quota CHIPS                refuses more chips than that
--length TOKENS              mean length of a rollout, for seconds and cost; that of scheduler.auto_history, else of a
                             published distribution
--save-seconds S             measured seconds of a save, for the grace period: timing_s/save_checkpoint of metrics.jsonl

--env NAME=VALUE             a variable of every process; may be repeated
--secret NAME=PLACE          a secret variable; may be repeated. PLACE is SECRET/KEY of Kubernetes, a name in Secret
                             Manager (tpu-vm), or a file (slurm). No file of the job holds its value.
--image IMAGE                REGISTRY/NAME:TAG, made from docker/; for gke-tpu, gke-gpu and tpu-vm
--namespace, --queue, --service-account, --claim   of Kubernetes: namespace, queue of Kueue, account of the pods, and the
                             PersistentVolumeClaim that is mounted at /mnt
--project, --zone            of tpu-vm
--share SERVER:/EXPORT       of tpu-vm: a network file system that every host mounts at /mnt
--wait-hours H               for a slice of tpu-vm; 24
--partition, --account, --hours   of Slurm
--port N                     of a local job, by which its processes meet; 12400
--spot                       capacity that may be taken away

--status FOLDER              launches nothing: says from a run's folder, or gs://BUCKET/NAME, alone how far it came, how
                             old that is, and how each attempt ended

The exit code is 1, with one sentence, where something does not fit. docs/run_on_gcp.md and docs/run_on_slurm.md show all.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_post import config as configs
from jaxrl_post import written
from jaxrl_post.buckets.address import is_bucket
from jaxrl_post.commands.arguments import Arguments, answered, number, whole
from jaxrl_post.json_text import shown

_TEXTS = ("share", "image", "queue", "service_account", "claim", "project", "zone", "partition", "account")


def main(arguments: Sequence[str]) -> int:
    """Launches a run, or says what would be launched."""
    return answered(lambda: _act(_read(arguments)))


def _act(flags: argparse.Namespace) -> int:
    if not flags.status:
        return _launch(flags)
    from jaxrl_post.launch import attempts, bucket_status

    configs.check_place(flags.status, "--status", bucket=True)
    print((bucket_status if is_bucket(flags.status) else attempts).status(flags.status))
    return 0


def _read(arguments: Sequence[str]) -> argparse.Namespace:
    words = Arguments("launch", str(__doc__), overrides=True)
    for name in (
        "target",
        "config",
        "run-dir",
        "slice",
        "name",
        "out",
        "status",
        "namespace",
        *(n.replace("_", "-") for n in _TEXTS),
    ):
        words.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    words.add_argument("--nodes", type=whole(1), default=1, help=argparse.SUPPRESS)
    words.add_argument("--restarts", type=whole(0), default=50, help=argparse.SUPPRESS)
    words.add_argument("--port", type=whole(1), default=12400, help=argparse.SUPPRESS)
    words.add_argument("--quota", type=whole(0), default=0, help=argparse.SUPPRESS)
    for name in ("price", "length", "save-seconds", "hours", "wait-hours"):
        words.add_argument(f"--{name}", type=number, help=argparse.SUPPRESS)
    for name in ("env", "secret"):
        words.add_argument(f"--{name}", action="append", default=[], help=argparse.SUPPRESS)
    for name in ("dry-run", "spot"):
        words.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    flags = words.read(arguments)
    for name in ("price", "length", "save_seconds", "hours", "wait_hours"):
        if (getattr(flags, name) or 0) < 0:
            raise ValueError(f"launch: --{name.replace('_', '-')}={getattr(flags, name):g} must be at least 0")
    return flags


def _launch(flags: argparse.Namespace) -> int:
    from jaxrl_post.launch.jobs import plan

    request = _request(flags)
    terms = plan.Terms(
        price=flags.price or 0.0, quota=flags.quota, save_s=flags.save_seconds, length=flags.length or 0.0
    )
    if request.target != plan.LOCAL and not flags.dry_run:
        _find("bash" if request.target == "tpu-vm" else {"slurm": "sbatch"}.get(request.target, "kubectl"))
    rendered = plan.prepare(request, terms, lambda text: print(text, flush=True))
    folder = Path(flags.out or f"launches/{request.name}")
    calls = [[word.format(folder=folder) for word in call] for call in rendered.calls]
    if flags.dry_run:
        for name, text in rendered.files.items():
            print(f"\n---- {name}\n{text}", end="")
        print("\n---- what would be called", *map(shlex.join, calls), sep="\n")
    if flags.out or not flags.dry_run:
        _write(folder, rendered.files)
    if flags.dry_run:
        return 0
    if request.target == plan.LOCAL:
        # Signals then reach the job itself, which must not fork beside jax's threads.
        return os.execv(calls[0][0], calls[0])
    codes = (subprocess.run(call).returncode for call in calls)
    return next((code for code in codes if code), 0)


def _request(flags: argparse.Namespace) -> Any:
    """Returns what the flags ask for.

    Raises:
      ValueError: a flag that is missing, unknown or of another form.
    """
    from jaxrl_post.launch import chips
    from jaxrl_post.launch.jobs import plan
    from jaxrl_post.launch.jobs.request import Request

    if flags.target not in plan.NAMES:
        near = difflib.get_close_matches(flags.target, plan.NAMES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"launch: --target={shown(flags.target, 40)} must be one of {', '.join(plan.NAMES)}; nearest is {near}"
        )
    for flag, value in (("--config=FILE", flags.config), ("--run-dir=FOLDER", flags.run_dir)):
        if not value:
            raise ValueError(
                f"launch: {flag} is missing; write for example --config=configs/demo.py --run-dir=runs/demo"
            )
    if not flags.slice and flags.target != plan.LOCAL:
        raise ValueError(
            f"launch: --target={flags.target} needs --slice=NAME, for example --slice=v5e-16 or --slice=8xh100"
        )
    where = chips.read(flags.slice).times(flags.nodes) if flags.slice else None
    config = _below(flags.config)
    return Request(
        target=flags.target,
        config=config,
        overrides=flags.overrides,
        where=where,
        processes=where.hosts if where else flags.nodes,
        name=flags.name or Path(config.partition(":")[0]).stem.replace("_", "-"),
        run_dir=flags.run_dir,
        restarts=flags.restarts,
        environment=_pairs("--env", flags.env),
        secrets=_pairs("--secret", flags.secret),
        namespace=flags.namespace or "default",
        hours=flags.hours or 0.0,
        wait_s=int(3600 * (24.0 if flags.wait_hours is None else flags.wait_hours)),
        port=flags.port,
        spot=flags.spot,
        **{name: getattr(flags, name) for name in _TEXTS},
    )


def _below(config: str) -> str:
    """Returns the config as a path below the working directory, which an image and a cluster's hosts have too."""
    relative = os.path.relpath(config)
    if relative.startswith(os.pardir):
        raise ValueError(
            f"launch: --config={shown(config, 200)} lies outside of the working directory, so no host would have it; copy it "
            "into configs/"
        )
    return relative


def _pairs(flag: str, given: Sequence[str]) -> dict[str, str]:
    """Returns NAME=VALUE flags by name."""
    pairs = {}
    for one in given:
        name, sign, value = one.partition("=")
        if not name or not sign or not value:
            raise ValueError(f"launch: {flag}={shown(name, 60)} must be NAME=VALUE, for example {flag}=HF_HOME=/mnt/hf")
        if name in pairs:
            raise ValueError(f"launch: {flag} sets {shown(name, 60)} twice: leave one of them out")
        pairs[name] = value
    return pairs


def _find(program: str) -> None:
    """Raises ValueError where a program is not installed here."""
    if shutil.which(program) is None:
        raise ValueError(
            f"launch: {program} is not on PATH: install it, or add --dry-run to see what it would be given"
        )


def _write(folder: Path, files: dict[str, str]) -> None:
    """Writes the files, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        written.whole(folder / name, text)
        print(f"wrote {folder / name}")
