"""Publishing moves no byte of the weights through a host, in one process or two.

Runs the demo config for 2 steps on 4 forced devices, and counts what jax copies between devices and host during each
publish. The layouts are: weights split over devices that also generate, other devices that generate, and fewer of
those. jax's own guard on host-to-device transfers is closed during a publish. The way of jax.device_put is planted
once, and must be counted.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import processes

MINUTES = 4.0
STEPS = 2
SHORT = [f"--config.steps={STEPS}", "--config.engine.slots=32", "--config.eval.prompts=0", "--config.eval.every=0"]
SPLIT, APART, FEWER = "--config.mesh.fsdp=2", "--config.mesh.engine=2", "--config.mesh.engine=1"
ARMS = {  # name: processes, devices in all, config, overrides
    "one_process_shared_devices": (1, 4, "demo", [SPLIT, "--config.mesh.data=2"]),
    "one_process_other_devices": (1, 4, "demo/pipeline", [SPLIT, APART]),
    "one_process_fewer_devices": (1, 4, "demo/pipeline", [SPLIT, FEWER]),
    "two_processes_shared_devices": (2, 4, "demo", [SPLIT, "--config.mesh.data=2"]),
    "two_processes_other_devices": (2, 4, "demo/pipeline", [SPLIT, APART]),
}


def show(record) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def counts(name: str, *plant: str) -> list[dict]:
            count, devices, config, overrides = ARMS[name]
            place = Path(folder) / "-".join((name, *plant))
            files = [f"--config=configs/{config}.py", f"--run-dir={place}"]
            command = ["scripts/host_bytes.py", str(place), *files, *SHORT, *overrides, *plant]
            processes.run(record.root, command, processes=count, devices=devices // count)
            return [json.loads(Path(f"{place}.{index}.json").read_text()) for index in range(count)]

        for name in ARMS:
            found = counts(name)
            record.figure(f"{name}_publishes", min(one["publishes"] for one in found), at_least=STEPS)
            record.figure(f"{name}_case", found[0]["case"], equals="relayout")
            record.figure(f"{name}_weights_bytes", found[0]["weights"], at_least=1 << 16)
            record.figure(f"{name}_links", found[0]["links"])
            over_links = sum(count for link, count in found[0]["links"].items() if link != "in place")
            record.figure(f"{name}_bytes_over_links", over_links, at_least=1 << 14)
            record.figure(f"{name}_bytes_through_host", sum(one["down"] + one["up"] for one in found), equals=0)
            record.figure(f"{name}_largest_read_bytes", max(one["largest"] for one in found), at_most=8)
        planted = counts("one_process_shared_devices", "--through-host")[0]
        share = (planted["down"] + planted["up"]) / planted["publishes"] / planted["weights"]
        record.figure("planted_share_of_weights_through_host", share, at_least=0.5)
