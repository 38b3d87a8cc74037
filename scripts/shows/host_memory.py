"""Weights come and go by shard: no process holds more than 1.5 times its share and one leaf.

An 8 GiB tree of weights over 8 processes of one device each. It is drawn at random, exported as a Hugging Face
directory, loaded, saved as a checkpoint and restored onto another mesh. The highest resident bytes of each process in
each phase are compared with its share of the tree. Every phase must end with the same bits. `--mib` names another size.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import processes

MINUTES = 15.0
PROCESSES, MIB = 8, 8192
JOBS = (("draw", "export"), ("load", "save"), ("restore",))
SPARE = 32 << 20  # bytes that a phase may read beside tensors


def show(record) -> None:
    mib = int(record.options.get("mib", MIB))
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, list[dict]] = {}
        for phases in JOBS:
            command = ["scripts/host_memory.py", folder, str(mib), *phases]
            processes.run(record.root, command, processes=PROCESSES, devices=1, timeout_s=3000)
            for phase in phases:
                files = [Path(folder) / f"{phase}.{index}.json" for index in range(PROCESSES)]
                found[phase] = [json.loads(file.read_text()) for file in files]
            if phases[-1] == "save":
                shutil.rmtree(Path(folder) / "policy")  # so that the disk needs room for one copy and a half
        _figures(record, found, mib)


def _figures(record, found: dict[str, list[dict]], mib: int) -> None:
    """Writes each phase's highest bytes beside the bound, and what was read."""
    one = found["draw"][0]
    record.figure("tree_mib", one["tree"] / 2**20, at_least=0.9 * mib)
    record.figure("share_mib", one["share"] / 2**20)
    record.figure("largest_leaf_mib", one["leaf"] / 2**20)
    for phase, told in found.items():
        most = max((each["peak"] - each["leaf"]) / each["share"] for each in told)
        record.figure(f"{phase}_peak_mib", max(each["peak"] for each in told) / 2**20)
        record.figure(f"{phase}_peak_less_a_leaf_over_share", most, at_most=1.5)
        record.figure(f"{phase}_s", max(each["seconds"] for each in told))
    read = [(each["read"] - SPARE) / each["share"] for each in found["load"]]
    record.figure("load_read_over_share", max(read), at_most=1.0)
    sums = {json.dumps(each["sums"]) for told in found.values() for each in told}
    record.figure("different_sums_of_bits", len(sums), equals=1)
