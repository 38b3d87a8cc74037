"""python -m jaxrl_post launch --target=TARGET --config=FILE --run-dir=FOLDER [--slice=NAME] [--dry-run] [...]

Starts a run on several hosts: renders files from the run's own config, checks them, says what the run takes, and applies
them. --dry-run stops before that.

The exit code is 1, with one sentence, where something does not fit. docs/run_on_gcp.md and docs/run_on_slurm.md show all.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_post import config as configs
from jaxrl_post.commands.arguments import Command
from jaxrl_post.config.address import is_bucket
from jaxrl_post.config.command_line import OVERRIDE, Flag, number, whole
from jaxrl_post.ring import written
from jaxrl_post.ring.json_text import shown

PROGRAMS = {  # by target, what starts its job
    "gke-tpu": "kubectl",
    "gke-gpu": "kubectl",
    "tpu-vm": "bash",
    "slurm": "sbatch",
    "local": sys.executable,
}
_TEXTS = ("share", "image", "queue", "service_account", "claim", "project", "zone", "partition", "account")

_FLAGS = (
    Flag(
        "--target=TARGET",
        "gke-tpu or gke-gpu: a JobSet for Google Kubernetes Engine, by kubectl; tpu-vm: a queued resource of TPU VMs, by "
        "gcloud; slurm: a batch script, by sbatch; local: processes on this machine",
    ),
    Flag("--config=FILE", "as python -m jaxrl_post.main has it; FILE lies below the working directory"),
    Flag(OVERRIDE, "as python -m jaxrl_post.main has it"),
    Flag(
        "--run-dir=FOLDER",
        "the run's folder, the same at every start; on Google Cloud in a bucket, or below /mnt, where a shared disk is",
    ),
    Flag("--slice=NAME", "v5e-16, v5p-64, 8xh100, ...; every target but local needs it"),
    Flag("--nodes=N", "so many slices, machines of GPUs, or local processes; 1", whole(1), 1),
    Flag("--name=NAME", "of the job; the config's name"),
    Flag("--dry-run", "prints the files and the calls, and applies nothing"),
    Flag("--out=FOLDER", "where the files are written; launches/NAME, and none with --dry-run"),
    Flag("--restarts=N", "at most so many after exit code 42; 50", whole(0), 50),
    Flag("--price=DOLLARS", "of a chip for an hour: prints the cost", number, None),
    Flag("--quota=CHIPS", "refuses more chips than that", whole(0), 0),
    Flag(
        "--length=TOKENS",
        "mean length of a rollout, for seconds and cost; that of scheduler.auto_history, else of a published distribution",
        number,
        None,
    ),
    Flag(
        "--save-seconds=S",
        "measured seconds of a save, for the grace period: timing_s/save_checkpoint of metrics.jsonl",
        number,
        None,
    ),
    Flag("--env=NAME=VALUE ...", "a variable of every process; may be repeated"),
    Flag(
        "--secret=NAME=PLACE ...",
        "a secret variable; may be repeated. PLACE is SECRET/KEY of Kubernetes, a name in Secret Manager (tpu-vm), or a "
        "file (slurm). No file of the job holds its value",
    ),
    Flag("--image=IMAGE", "REGISTRY/NAME:TAG, made from docker/; for gke-tpu, gke-gpu and tpu-vm"),
    Flag("--namespace=NAMESPACE", "of Kubernetes"),
    Flag("--queue=QUEUE", "of Kueue"),
    Flag("--service-account=ACCOUNT", "of Kubernetes, for the pods"),
    Flag("--claim=CLAIM", "of Kubernetes: the PersistentVolumeClaim that is mounted at /mnt"),
    Flag("--project=PROJECT", "of tpu-vm"),
    Flag("--zone=ZONE", "of tpu-vm"),
    Flag("--share=SERVER:/EXPORT", "of tpu-vm: a network file system that every host mounts at /mnt"),
    Flag("--wait-hours=H", "for a slice of tpu-vm; 24", number, None),
    Flag("--partition=PARTITION", "of Slurm"),
    Flag("--account=ACCOUNT", "of Slurm"),
    Flag("--hours=H", "of Slurm", number, None),
    Flag("--port=N", "of a local job, by which its processes meet; 12400", whole(1), 12400),
    Flag("--spot", "capacity that may be taken away"),
    Flag(
        "--status=FOLDER",
        "launches nothing: says from a run's folder, or gs://BUCKET/NAME, alone how far it came, how old that is, and how "
        "each attempt ended",
    ),
)


def _act(flags: argparse.Namespace) -> int:
    for name in ("price", "length", "save_seconds", "hours", "wait_hours"):
        if (getattr(flags, name) or 0) < 0:
            raise ValueError(f"launch: --{name.replace('_', '-')}={getattr(flags, name):g} must be at least 0")
    if not flags.status:
        return _launch(flags)
    from jaxrl_post.runs import attempts

    configs.check_place(flags.status, "--status", bucket=True)
    status = attempts.bucket_status if is_bucket(flags.status) else attempts.status
    print(status(flags.status))
    return 0


main = Command("launch", __doc__, _FLAGS, _act)


def _launch(flags: argparse.Namespace) -> int:
    from jaxrl_post.launch.jobs import plan

    request = _request(flags)
    terms = plan.Terms(
        price=flags.price or 0.0, quota=flags.quota, save_s=flags.save_seconds, length=flags.length or 0.0
    )
    program = PROGRAMS[request.target]
    if not flags.dry_run and shutil.which(program) is None:
        raise ValueError(
            f"launch: {program} is not on PATH: install it, or add --dry-run to see what it would be given"
        )
    rendered = plan.prepare(request, terms, lambda text: print(text, flush=True))
    folder = Path(flags.out or f"launches/{request.name}")
    calls = [[word.format(folder=folder) for word in call] for call in rendered.calls]
    if flags.dry_run:
        for name, text in rendered.files.items():
            print(f"\n---- {name}\n{text}", end="")
        print("\n---- what would be called", *map(shlex.join, calls), sep="\n")
    if flags.out or not flags.dry_run:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in rendered.files.items():
            written.whole(folder / name, text)
            print(f"wrote {folder / name}")
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
    from jaxrl_post.launch.jobs import plan
    from jaxrl_post.launch.jobs.request import Request
    from jaxrl_post.launch.plan import chips

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
    config = os.path.relpath(flags.config)
    if config.startswith(os.pardir):
        raise ValueError(
            f"launch: --config={shown(flags.config, 200)} lies outside of the working directory, so no host would have it; "
            "copy it into configs/"
        )
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
