"""A JobSet for Google Kubernetes Engine: slices of TPUs, or machines of eight GPUs.

What ends a pod decides what follows:
- Maintenance or preemption (the condition DisruptionTarget): the whole set starts again, and no restart is counted.
- Exit code 1 or 2, a mistake: the set fails, because another start would end alike.
- Anything else, 42 among it: the set starts again, at most `restarts` times.

GKE sets TPU_WORKER_ID, TPU_WORKER_HOSTNAMES and the variables of several slices by itself. Processes on GPUs get the
three variables of parallel/processes.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_post.buckets.address import is_bucket
from jaxrl_post.json_text import shown
from jaxrl_post.launch.jobs import manifest
from jaxrl_post.launch.jobs.gpu_networks import NETWORKS, Network
from jaxrl_post.launch.jobs.request import SHARED, Rendered, Request, check_image, check_run_dir

ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
FILE = "jobset.yaml"
JOB = CONTAINER = "run"
PORT = 8476  # of the coordinator
MISTAKES = (1, 2)  # exit codes of a run, and of a command that cannot begin
SHM = "64Gi"
_CODES = {"containerName": CONTAINER, "operator": "In", "values": list(MISTAKES)}


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
    _check(request)
    pod = _pod(
        request,
        selector={
            "cloud.google.com/gke-tpu-accelerator": ACCELERATORS[where.kind],
            "cloud.google.com/gke-tpu-topology": where.topology,
        },
        taint="google.com/tpu",
        container=_container(request, list(request.words), _environment(request, {}))
        | {"resources": {"limits": {"google.com/tpu": where.chips // where.hosts}}}
        | {"securityContext": {"privileged": True}},
        volumes=[],
    ) | {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    job = _job(where.hosts // where.slices, {"spec": pod})
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    return _rendered(request, where.slices, job, exclusive)


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
    _check(request)
    network = NETWORKS[where.kind] if where.hosts > 1 else NETWORKS[where.kind].alone
    joined = ["/bin/bash", "-c", f'source {network.profile} && exec "$@"', CONTAINER] if network.profile else []
    members = _members(request) if where.hosts > 1 else []
    container = _container(request, [*joined, *request.words], _environment(request, network.environment) + members)
    container |= {"resources": {"limits": {"nvidia.com/gpu": 8}}}
    container |= {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}
    container["volumeMounts"] += [{"name": "shared-memory", "mountPath": "/dev/shm"}, *network.mounts]
    pod = _pod(
        request,
        selector={"cloud.google.com/gke-accelerator": network.accelerator},
        taint="nvidia.com/gpu",
        container=container,
        volumes=[_memory(), *network.volumes],
    )
    return _rendered(request, 1, _job(where.hosts, _networked(pod, network)), {})


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


def _environment(request: Request, more: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns variables as a container lists them. Secrets are named, never written."""
    plain = [{"name": name, "value": value} for name, value in (dict(more) | dict(request.variables)).items()]
    secret = [(name, place.partition("/")) for name, place in request.secrets.items()]
    return plain + [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": place, "key": key}}} for name, (place, _, key) in secret
    ]


def _members(request: Request) -> list[dict[str, Any]]:
    """Returns the variables by which processes find each other: the first pod's name in the set's own domain."""
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return [
        {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{request.name}-{JOB}-0-0.{request.name}:{PORT}"},
        {"name": "JAX_NUM_PROCESSES", "value": str(request.processes)},
        {"name": "JAX_PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": index}}},
    ]


def _container(request: Request, words: list[str], environment: list[dict[str, Any]]) -> dict[str, Any]:
    mounts = [{"name": "shared", "mountPath": SHARED}] if request.claim else []
    return {"name": CONTAINER, "image": request.image, "command": words, "env": environment, "volumeMounts": mounts}


def _pod(
    request: Request, selector: dict[str, str], taint: str, container: dict[str, Any], volumes: list[Mapping[str, Any]]
) -> dict[str, Any]:
    tolerations = [{"key": taint, "operator": "Exists"}]
    if request.spot:
        selector = selector | {"cloud.google.com/gke-spot": "true"}
        tolerations += [{"key": "cloud.google.com/gke-spot", "operator": "Exists"}]
    claimed = {"name": "shared", "persistentVolumeClaim": {"claimName": request.claim}}
    account = {"serviceAccountName": request.service_account} if request.service_account else {}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": request.grace_s,
        **account,
        "nodeSelector": selector,
        "tolerations": tolerations,
        "containers": [container],
        "volumes": [*volumes, *([claimed] if request.claim else [])],
    }


def _memory() -> dict[str, Any]:
    return {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": SHM}}


def _networked(pod: dict[str, Any], network: Network) -> dict[str, Any]:
    """Returns a pod's template with the network's interfaces and init containers, where there is a network."""
    pod["tolerations"] += [{"key": "cloud.google.com/impending-node-termination", "operator": "Exists"}]
    if not network.init:
        return {"spec": pod}
    return {
        "metadata": {"annotations": dict(network.annotations)},
        "spec": pod | {"initContainers": [dict(one) for one in network.init]},
    }


def _job(hosts: int, template: dict[str, Any]) -> dict[str, Any]:
    """Returns a Job with one pod a host. A pod that fails is never replaced alone: all start again together."""
    return {
        "completionMode": "Indexed",
        "parallelism": hosts,
        "completions": hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": dict(_CODES)},
            ]
        },
        "template": template,
    }


def _rendered(request: Request, slices: int, job: dict[str, Any], annotations: dict[str, str]) -> Rendered:
    labels = {"kueue.x-k8s.io/queue-name": request.queue} if request.queue else {}
    about: dict[str, Any] = {"name": request.name, "namespace": request.namespace}
    about |= {name: value for name, value in (("labels", labels), ("annotations", annotations)) if value}
    policy = ["PodFailurePolicy"]
    whole = {
        **manifest.API,
        "metadata": about,
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {
                "maxRestarts": request.restarts,
                "rules": [
                    {
                        "name": "maintenance",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": list(policy),
                        "onJobFailureMessagePatterns": [".*DisruptionTarget.*"],
                    },
                    {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": list(policy)},
                ],
            },
            "replicatedJobs": [{"name": JOB, "replicas": slices, "template": {"spec": job}}],
        },
    }
    return Rendered(files={FILE: manifest.text(whole)}, calls=(("kubectl", "apply", "--filename", "{folder}/" + FILE),))
