"""What a pod needs for the network between Google Cloud's machines of eight GPUs, by kind of GPU. One machine needs none.

A3 Ultra (H200) and A4 (B200) have RDMA: an init container installs NCCL's plugin gIB for the pod. A3 Mega (H100) has
GPUDirect-TCPXO: a daemon runs beside the pod, and a DaemonSet of the cluster installs the plugin on each node.
Sources: AI-Hypercomputer/gpu-recipes (A3 Ultra, A4), and the notes on GPUDirect-TCPXO in
GoogleCloudPlatform/container-engine-accelerators. The networks have the names that those pages give them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GIB = "us-docker.pkg.dev/gce-ai-infra/gpudirect-gib/nccl-plugin-gib:v1.0.6"
TCPXO = "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpxo/tcpgpudmarxd-dev:v1.0.21"
_INSTALL = """set -ex
/scripts/container_entry.sh install --install-nccl
cp -R /var/lib/gib/. /target/usr/local/gib
"""
_DAEMON = """set -ex
chmod 755 /fts/entrypoint_rxdm_container.sh
exec /fts/entrypoint_rxdm_container.sh --num_hops=2 --num_nics=8 --uid= --alsologtostderr
"""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Parts of a pod: `profile` is a script that the run sources before it starts, if there is one."""

    accelerator: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    init: tuple[Mapping[str, Any], ...] = ()
    volumes: tuple[Mapping[str, Any], ...] = ()
    mounts: tuple[Mapping[str, Any], ...] = ()
    profile: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def alone(self) -> Network:
        """Returns the parts of a pod that has one machine: its GPUs reach each other by NVLink."""
        return Network(accelerator=self.accelerator, environment={"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64"})


def _interfaces(*networks: str) -> dict[str, str]:
    """Returns the annotations that give a pod one interface a network, eth0 first."""
    every = [{"interfaceName": f"eth{at}", "network": name} for at, name in enumerate(networks)]
    return {"networking.gke.io/default-interface": "eth0", "networking.gke.io/interfaces": json.dumps(every)}


def _rdma(accelerator: str, tuner: str) -> Network:
    return Network(
        accelerator=accelerator,
        annotations=_interfaces("default", "gvnic-1", *(f"rdma-{at}" for at in range(8))),
        init=(
            {
                "name": "nccl-plugin-installer",
                "image": GIB,
                "command": ["/bin/sh", "-c", _INSTALL],
                "volumeMounts": [{"name": "gib", "mountPath": "/target/usr/local/gib"}],
            },
        ),
        volumes=({"name": "gib", "emptyDir": {}},),
        mounts=({"name": "gib", "mountPath": "/usr/local/gib"},),
        profile="/usr/local/gib/scripts/set_nccl_env.sh",
        environment={
            "LD_LIBRARY_PATH": "/usr/local/gib/lib64:/usr/local/nvidia/lib64",
            "NCCL_SOCKET_IFNAME": "eth0,eth1",
            "NCCL_TUNER_CONFIG_PATH": f"/usr/local/gib/configs/{tuner}",
        },
    )


def _tcpxo() -> Network:
    devices = [*(f"nvidia{at}" for at in range(8)), "nvidiactl", "nvidia-uvm", "dmabuf_import_helper"]
    return Network(
        accelerator="nvidia-h100-mega-80gb",
        annotations=_interfaces("default", *(f"vpc{at}" for at in range(1, 9)))
        | {"devices.gke.io/container.tcpxo-daemon": json.dumps([{"path": f"/dev/{one}"} for one in devices])},
        init=(
            {
                "name": "tcpxo-daemon",
                "image": TCPXO,
                "restartPolicy": "Always",  # it runs beside the container, and ends after it
                "command": ["/bin/sh", "-c", _DAEMON],
                "securityContext": {"capabilities": {"add": ["NET_ADMIN", "NET_BIND_SERVICE"]}},
                "env": [{"name": "LD_LIBRARY_PATH", "value": "/usr/local/nvidia/lib64"}],
                "volumeMounts": [
                    {"name": "nvidia", "mountPath": "/usr/local/nvidia"},
                    {"name": "sys", "mountPath": "/hostsysfs"},
                    {"name": "proc-sys", "mountPath": "/hostprocsysfs"},
                ],
            },
        ),
        volumes=(
            {"name": "nvidia", "hostPath": {"path": "/home/kubernetes/bin/nvidia"}},
            {"name": "sys", "hostPath": {"path": "/sys"}},
            {"name": "proc-sys", "hostPath": {"path": "/proc/sys"}},
            {"name": "aperture-devices", "hostPath": {"path": "/dev/aperture_devices"}},
        ),
        mounts=(
            {"name": "nvidia", "mountPath": "/usr/local/nvidia"},
            {"name": "aperture-devices", "mountPath": "/dev/aperture_devices"},
        ),
        profile="/usr/local/nvidia/lib64/nccl-env-profile.sh",
        environment={
            "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64",
            "NCCL_LIB_DIR": "/usr/local/nvidia/lib64",
            "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "/dev/aperture_devices",
        },
    )


NETWORKS = {
    "h100": _tcpxo(),
    "h200": _rdma("nvidia-h200-141gb", "tuner_config_a3u.txtpb"),
    "b200": _rdma("nvidia-b200", "tuner_config_a4.txtpb"),
}
