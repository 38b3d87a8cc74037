"""A queued resource of TPU VMs: a script for every host, and one that keeps the slice and the run alive.

`babysit.sh` runs where it was called. It asks for the slice and waits for it, starts `host.sh` on every host, and looks
at the exit code. After 42 the hosts start again. A slice that was lost is deleted and asked for again. The run's folder
stays the same, so the run continues. It lies in a bucket, or on a network file system (--share) that every host mounts at
/mnt: the disks of a slice are deleted with it.
"""

from __future__ import annotations

import os
import re
import shlex

from jaxrl_post.buckets.address import is_bucket
from jaxrl_post.json_text import shown
from jaxrl_post.launch.chips import Slice
from jaxrl_post.launch.jobs.request import SHARED, Rendered, Request, check_image, check_run_dir

KINDS = {  # names of accelerator and software in the Cloud TPU API, which has none for TPU7x
    "v4": ("v4", "tpu-ubuntu2204-base"),
    "v5e": ("v5litepod", "v2-alpha-tpuv5-lite"),
    "v5p": ("v5p", "v2-alpha-tpuv5"),
    "v6e": ("v6e", "v2-alpha-tpuv6e"),
}
HOST = """#!/usr/bin/env bash
# Runs on every host of the slice: one process of the run, in a container.
set -euo pipefail
{before}{mount}sudo docker rm --force {name} >/dev/null 2>&1 || true
exec sudo{preserved} docker run --rm --name={name} \\
  --privileged --network=host --stop-timeout={grace_s} --volume={shared}:{shared} \\
{variables}  {image} \\
  {words}
"""
BABYSIT = """#!/usr/bin/env bash
# Keeps the run {name} going: asks for its slice, starts it on every host, and starts it again until it ends.
# To end it: interrupt this script, then gcloud compute tpus queued-resources delete {name} --force {place}
set -euo pipefail
folder="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
nodes=({nodes})
restarts_left={restarts}
seconds_left={wait_s}
pause_s="${{JAXRL_PAUSE_S:-30}}"

state() {{
  gcloud compute tpus queued-resources describe {name} {place} --format='value(state.state)' 2>/dev/null || true
}}

create() {{
  gcloud compute tpus queued-resources create {name} {place} \\
    {shape}
}}

remove() {{
  gcloud compute tpus queued-resources delete {name} {place} --force --quiet
}}

# Waits until the slice is there. A request that failed or was suspended is made anew.
wait_for_slice() {{
  while true; do
    case "$(state)" in
      ACTIVE) return 0 ;;
      '') create ;;
      FAILED | SUSPENDED) remove ;;
    esac
    if ((seconds_left <= 0)); then
      echo "error: {name}: the slice is not there after {wait_s} s; call this script again to wait longer" >&2
      remove
      exit 1
    fi
    sleep "$pause_s"
    seconds_left=$((seconds_left - pause_s - 1))
  done
}}

# Starts every host of every slice, and returns the first exit code that is not 0.
run() {{
  local code=0 one pids=()
  for one in "${{nodes[@]}}"; do
    gcloud compute tpus tpu-vm scp "$folder/host.sh" "$one:host.sh" {place} --worker=all --quiet \\
      || return 255
  done
  for one in "${{nodes[@]}}"; do
    gcloud compute tpus tpu-vm ssh "$one" {place} --worker=all --quiet \\
      --ssh-flag='-o ServerAliveInterval=30' --command='bash host.sh' &
    pids+=("$!")
  done
  for one in "${{pids[@]}}"; do
    wait "$one" || code="$((code ? code : $?))"
  done
  return "$code"
}}

while true; do
  wait_for_slice
  code=0
  run || code="$?"
  case "$code" in
    0)
      remove
      exit 0
      ;;
    1 | 2)
      if [[ "$(state)" == ACTIVE ]]; then
        echo "error: {name} ended with exit code $code, a mistake that another start would repeat" >&2
        remove
        exit "$code"
      fi
      ;;
  esac
  if ((restarts_left <= 0)); then
    echo "error: {name} ended with exit code $code after {restarts} restarts" >&2
    remove
    exit "$code"
  fi
  restarts_left=$((restarts_left - 1))
  echo "{name}: exit code $code, $restarts_left restarts left" >&2
  sleep "$pause_s"
done
"""


def render(request: Request) -> Rendered:
    """Renders host.sh and babysit.sh.

    Raises:
      ValueError: a kind that TPU VMs do not have, or a place that is missing.
    """
    _check(request)
    nodes = (
        [request.name] if request.where.slices == 1 else [f"{request.name}-{n}" for n in range(request.where.slices)]
    )
    place = f"--project={request.project} --zone={request.zone}"
    script = BABYSIT.format(
        name=request.name,
        place=place,
        nodes=" ".join(nodes),
        restarts=request.restarts,
        wait_s=request.wait_s,
        shape=" \\\n    ".join(_shape(request, request.where)),
    )
    return Rendered(files={"host.sh": _host(request), "babysit.sh": script}, calls=(("bash", "{folder}/babysit.sh"),))


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


def _mounted(share: str) -> str:
    """Returns the lines of a host that mount the share. A host without the client of the file system gets it first."""
    if not share:
        return ""
    return (
        "command -v mount.nfs >/dev/null || (sudo apt-get update -qq && sudo apt-get install -y -qq nfs-common)\n"
        f"mountpoint -q {SHARED} || sudo mount -t nfs {shlex.quote(share)} {SHARED}\n"
    )


def _shape(request: Request, where: Slice) -> list[str]:
    """Returns the flags that say how many of which TPU are asked for."""
    kind, software = KINDS[where.kind]
    nodes = ["--node-id=" + request.name]
    if where.slices > 1:
        nodes = [f"--node-count={where.slices}", f"--node-prefix={request.name}"]
    number = int(where.devices / where.slices / where.chip.numbered)
    return [
        *nodes,
        f"--accelerator-type={kind}-{number}",
        f"--runtime-version={software}",
        *(["--spot"] if request.spot else []),
    ]


def _host(request: Request) -> str:
    """Returns the script of a host. Values of secrets are read there, and pass through the environment alone."""
    registry = request.image.partition("/")[0]
    of_google = registry.endswith((".pkg.dev", "gcr.io"))
    before = f"sudo gcloud auth configure-docker {registry} --quiet\n" if of_google else ""
    before += "".join(
        f'{name}="$(gcloud secrets versions access latest --secret={place} --project={request.project})"\nexport {name}\n'
        for name, place in request.secrets.items()
    )
    variables = [f"--env={shlex.quote(f'{name}={value}')}" for name, value in request.variables.items()]
    variables += [f"--env={name}" for name in request.secrets]
    return HOST.format(
        before=before,
        mount=_mounted(request.share),
        name=request.name,
        preserved=f" --preserve-env={','.join(request.secrets)}" if request.secrets else "",
        grace_s=request.grace_s,
        shared=SHARED,
        variables="".join(f"  {one} \\\n" for one in variables),
        image=request.image,
        words=shlex.join(request.words),
    )
