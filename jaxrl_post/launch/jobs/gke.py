"""A JobSet for Google Kubernetes Engine: slices of TPUs, or machines of eight GPUs. It is checked before it is applied.

What ends a pod decides what follows:
- Maintenance or preemption (the condition DisruptionTarget): the whole set starts again, and no restart is counted.
- Exit code 1 or 2, a mistake: the set fails, because another start would end alike.
- Anything else, 42 among it: the set starts again, at most `restarts` times.

GKE sets TPU_WORKER_ID, TPU_WORKER_HOSTNAMES and the variables of several slices by itself. Processes on GPUs get the
three variables of parallel/processes.py.

Network between machines of eight GPUs: A3 Ultra (H200) and A4 (B200) have RDMA, and an init container installs NCCL's
plugin gIB for the pod. A3 Mega (H100) has GPUDirect-TCPXO: a daemon runs beside the pod, and a DaemonSet of the cluster
installs the plugin on each node. Sources: AI-Hypercomputer/gpu-recipes (A3 Ultra, A4), and the notes on GPUDirect-TCPXO in
GoogleCloudPlatform/container-engine-accelerators. The networks have the names that those pages give them.

templates/jobset.yaml.j2 is read as YAML, checked, and written anew, so a value can break no line of it.

Source of schema/jobset-v1alpha2.json: the CRD of kubernetes-sigs/jobset, which holds the whole Job and Pod (Apache-2.0,
schema/LICENSE). It has no descriptions, and refuses unknown fields. Labels, annotations, node selectors and limits have
the keys of the template alone, because a cluster ignores any other without a word.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema
import yaml

from jaxrl_post.config.address import is_bucket
from jaxrl_post.launch.jobs.request import Rendered, Request, check_image, check_run_dir, from_template
from jaxrl_post.ring.json_text import shown

FILE = "jobset.yaml"
ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}


@dataclass(frozen=True, kw_only=True)
class Network:
    """How machines of a kind of GPU reach each other. `profile`: the script that a run sources before it starts."""

    accelerator: str
    name: str
    profile: str
    environment: Mapping[str, str]


def _rdma(accelerator: str, tuner: str) -> Network:
    return Network(
        accelerator=accelerator,
        name="rdma",
        profile="/usr/local/gib/scripts/set_nccl_env.sh",
        environment={
            "LD_LIBRARY_PATH": "/usr/local/gib/lib64:/usr/local/nvidia/lib64",
            "NCCL_SOCKET_IFNAME": "eth0,eth1",
            "NCCL_TUNER_CONFIG_PATH": f"/usr/local/gib/configs/{tuner}",
        },
    )


ALONE = {"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64"}  # variables of one machine, whose GPUs have NVLink
NETWORKS = {
    "h100": Network(
        accelerator="nvidia-h100-mega-80gb",
        name="tcpxo",
        profile="/usr/local/nvidia/lib64/nccl-env-profile.sh",
        environment=ALONE
        | {"NCCL_LIB_DIR": "/usr/local/nvidia/lib64", "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "/dev/aperture_devices"},
    ),
    "h200": _rdma("nvidia-h200-141gb", "tuner_config_a3u.txtpb"),
    "b200": _rdma("nvidia-b200", "tuner_config_a4.txtpb"),
}


def tpu(request: Request) -> Rendered:
    """Renders a JobSet with one job a slice.

    Raises:
      ValueError: no slices of TPUs, or something that GKE refuses.
    """
    where = request.where
    if where is None or where.kind not in ACCELERATORS:
        raise ValueError(
            f"--target=gke-tpu needs TPUs, and --slice={where.name if where else ''} has none; write --slice=v5e-16, or "
            "--target=gke-gpu"
        )
    if where.slices > 1 and where.hosts == where.slices:
        raise ValueError(
            f"--nodes={where.slices}: GKE joins slices of several hosts each, and {where.name} has one; take a larger slice"
        )
    return _rendered(request, resource="google.com/tpu", accelerator=ACCELERATORS[where.kind])


def gpu(request: Request) -> Rendered:
    """Renders a JobSet with one pod a machine, and memory for the processes' shared buffers.

    Raises:
      ValueError: no machines of eight H100, H200 or B200, or something that GKE refuses.
    """
    where = request.where
    if where is None or where.kind not in NETWORKS or where.devices != 8 * where.hosts:
        raise ValueError(
            f"--target=gke-gpu needs machines of eight H100, H200 or B200, and --slice={where.name if where else ''} is "
            "none; write --slice=8xh100"
        )
    resource, network = "nvidia.com/gpu", NETWORKS[where.kind]
    if where.hosts == 1:
        return _rendered(request, resource, network.accelerator, environment=ALONE)
    joined = ("/bin/bash", "-c", f'source {network.profile} && exec "$@"', "run")
    return _rendered(request, resource, network.accelerator, network.name, joined, network.environment)


def _rendered(
    request: Request,
    resource: str,
    accelerator: str,
    network: str = "",
    before: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Rendered:
    """Renders the template.

    Args:
      resource: Kubernetes' name of the devices.
      network: between the machines of GPUs, if there are several.
      before: the command that calls the run's own.
      environment: variables that --env may set to another value.
    """
    _check(request)
    text = from_template(
        FILE,
        request,
        tpu=resource == "google.com/tpu",
        resource=resource,
        accelerator=accelerator,
        network=network,
        command=[*before, *request.words],
        variables={**(environment or {}), **request.variables},
    )
    manifest = yaml.safe_load(text)
    check_manifest(manifest)
    written = yaml.safe_dump(manifest, sort_keys=False, width=120)
    return Rendered(files={FILE: written}, calls=(("kubectl", "apply", "--filename", "{folder}/" + FILE),))


def _check(request: Request) -> None:
    check_image(request)
    check_run_dir(request, "with --claim=CLAIM, a PersistentVolumeClaim that many pods may write")
    if not request.claim and not is_bucket(request.run_dir):
        raise ValueError(
            f"--run-dir={shown(request.run_dir, 60)} lies on a disk that no pod has: write --claim=CLAIM, a "
            "PersistentVolumeClaim that many pods may write"
        )
    for variable, place in request.secrets.items():
        name, _, key = place.partition("/")
        if not name or not key or "/" in key:
            raise ValueError(
                f"--secret={variable}={shown(place, 60)} must be SECRET/KEY, of a Secret in the namespace; make it by "
                f"kubectl create secret generic SECRET --from-literal=KEY=..."
            )


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Refuses a field that the schema does not have, and a value of another type.

    Raises:
      ValueError: one sentence with the path of the field.
    """
    errors = sorted(_validator().iter_errors(manifest), key=lambda error: len(error.absolute_path))
    if errors:
        place = ".".join(map(str, errors[0].absolute_path)) or "the manifest"
        raise ValueError(f"JobSet: {place}: {errors[0].message[:300]}")


@functools.cache
def _validator() -> jsonschema.Draft7Validator:
    source = importlib.resources.files("jaxrl_post.launch.jobs").joinpath("schema/jobset-v1alpha2.json")
    return jsonschema.Draft7Validator(json.loads(source.read_text(encoding="utf-8")))
