"""A queued resource of TPU VMs: a script for every host, and one that keeps the slice and the run alive.

`babysit.sh` runs where it was called. It asks for the slice and waits for it, starts `host.sh` on every host, and looks
at the exit code. After 42 the hosts start again. A slice that was lost is deleted and asked for again. The run's folder
stays the same, so the run continues. It lies in a bucket, or on a network file system (--share) that every host mounts at
/mnt: the disks of a slice are deleted with it.
"""

from __future__ import annotations

import os
import re

from jaxrl_post.config.address import is_bucket
from jaxrl_post.launch.jobs.request import SHARED, Rendered, Request, check_image, check_run_dir, from_template
from jaxrl_post.ring.json_text import shown

KINDS = {  # names of accelerator and software in the Cloud TPU API, which has none for TPU7x
    "v4": ("v4", "tpu-ubuntu2204-base"),
    "v5e": ("v5litepod", "v2-alpha-tpuv5-lite"),
    "v5p": ("v5p", "v2-alpha-tpuv5"),
    "v6e": ("v6e", "v2-alpha-tpuv6e"),
}


def render(request: Request) -> Rendered:
    """Renders host.sh and babysit.sh.

    Raises:
      ValueError: a kind that TPU VMs do not have, or a place that is missing.
    """
    _check(request)
    where = request.where
    accelerator, software = KINDS[where.kind]
    names = [request.name] if where.slices == 1 else [f"{request.name}-{n}" for n in range(where.slices)]
    script = from_template(
        "babysit.sh",
        request,
        place=f"--project={request.project} --zone={request.zone}",
        nodes=names,
        accelerator=f"{accelerator}-{int(where.devices / where.slices / where.chip.numbered)}",
        software=software,
    )
    host = from_template("host.sh", request, registry=request.image.partition("/")[0])
    return Rendered(files={"host.sh": host, "babysit.sh": script}, calls=(("bash", "{folder}/babysit.sh"),))


def _check(request: Request) -> None:
    where = request.where
    if where is None or where.kind not in KINDS:
        other = "--target=gke-tpu" if where is not None and where.kind == "tpu7x" else "--slice=v5e-16"
        raise ValueError(
            f"--target=tpu-vm has no {where.name if where else 'slice'}: its machines are {', '.join(KINDS)}; write {other}"
        )
    check_image(request)
    check_disks(request)
    for flag, value in (("--project", request.project), ("--zone", request.zone)):
        if not re.fullmatch(r"[a-z][a-z0-9-]{3,40}", value):
            raise ValueError(
                f"{flag}={shown(value, 60)} must name where the TPUs are, for example --project=my-project --zone=us-east5-b"
            )
    for variable, secret in request.secrets.items():
        if not re.fullmatch(r"[\w-]{1,255}", secret):
            raise ValueError(
                f"--secret={variable}={shown(secret, 60)} must be the name of a secret in Secret Manager, for example "
                f"--secret={variable}=wandb"
            )


def check_disks(request: Request) -> None:
    """Refuses a run folder that is deleted with the slice.

    Raises:
      ValueError: it is neither in a bucket nor on a file system that --share mounts.
    """
    if request.share and not re.fullmatch(r"[\w.-]+:/[\w./-]*", request.share):
        raise ValueError(
            f"--share={shown(request.share, 80)} must be SERVER:/EXPORT of a network file system, for example "
            "--share=10.0.0.2:/shared"
        )
    last = os.path.basename(request.run_dir.rstrip("/")) or request.name
    if not is_bucket(request.run_dir) and not request.share:
        raise ValueError(
            f"--run-dir={shown(request.run_dir, 80)} lies on the slice's own disk, which is deleted with it: write "
            f"--run-dir=gs://BUCKET/{last}, or --run-dir={SHARED}/{last} with --share=SERVER:/EXPORT, a network file system "
            f"that every host mounts at {SHARED}"
        )
    check_run_dir(request, "with --share=SERVER:/EXPORT, a network file system that every host mounts there")
