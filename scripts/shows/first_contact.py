"""The whole start of a run on 25 kinds of devices that are not there: from the config to the first dispatch's program.

A process of its own for each kind sees what its runtime would report: the name, memory, coordinates, cores and compute
capability (scripts/fake_start.py). It resolves the config, plans, orders the mesh, chooses kernels, takes step costs, and compiles
learner and engine by the vendor's compiler. Where there is none, one sentence must be right. Four parts:
- Kinds: TPUs from v4, NVIDIA's GPUs from V100 to GB300, AMD's, and kinds that nobody knows.
- The notebook's settings on a T4, an L4 and a TPU v5e.
- Memory that cannot suffice is refused by one sentence before anything is compiled.
- Every slice of TPUs that can be named has a mesh, in the order of its coordinates.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import compilers
import jax
import numpy as np

from jaxrl_post.launch.jobs import roles
from jaxrl_post.launch.plan import chips
from jaxrl_post.models import decoder, hf
from jaxrl_post.parallel import mesh as meshes

MINUTES = 25.0
LIMIT_S = 1800
SOURCES = (
    "scripts/fake_start.py",
    "scripts/compilers.py",
    "configs/demo.py",
    "configs/demo_policy",
    "notebooks/runtimes.py",
)
COUNT = 20
MIB = 1 << 20
KERNELS = "kernels: the jnp references compute attention and sampling"
SMALL = (  # one size of rows, no evaluations: what is compiled is one dispatch
    "--config=configs/demo.py",
    "--dry-run",
    "--config.engine.page_size=64",
    "--config.engine.row_sizes=[64]",
    "--config.eval=default",
    "--config.eval.prompts=0",
)


class Kind(NamedTuple):
    """A kind as its runtime reports it.

    - slice: whose compiler works for it; none: there is no compiler
    - mib: memory that the runtime grants, MiB
    - cost: name of its step costs
    - said: a sentence that must be there; "": the kernels are used
    - refused: the run must end with that sentence
    """

    kind: str
    slice: str
    mib: int
    cost: str
    said: str = ""
    devices: int = 1
    capability: str = ""
    refused: bool = False


def _nvidia(kind: str, cost: str, mib: int, said: str = KERNELS, **more) -> Kind:
    return Kind(kind=kind, slice=cost, mib=int(0.75 * mib), cost=cost, said=said, **more)


KINDS = (
    Kind(
        kind="TPU v4",
        slice="v4-8",
        mib=31488,
        cost="v4",
        devices=4,
        said="written for TPU v5 and later, and this is TPU v4",
    ),
    Kind(kind="TPU v5 lite", slice="v5e-1", mib=16128, cost="v5e"),
    Kind(kind="TPU v5", slice="v5p-8", mib=98038, cost="v5p", devices=4),
    Kind(kind="TPU v6 lite", slice="v6e-4", mib=32000, cost="v6e", devices=4),
    Kind(kind="TPU7x", slice="tpu7x-8", mib=97024, cost="tpu7x", devices=8),
    _nvidia("Tesla V100-SXM2-16GB", "v100", 16160, "CUDA 13 compiles for 7.5 and later: install CUDA 12", refused=True),
    _nvidia("Tesla T4", "t4", 15360, "Tesla T4 has no units for bfloat16"),
    _nvidia("NVIDIA A10G", "a10g", 23028),
    _nvidia("NVIDIA A100-SXM4-40GB", "a100-40gb", 40960),
    _nvidia("NVIDIA A100 80GB PCIe", "a100", 81920),
    _nvidia("NVIDIA GeForce RTX 3090", "rtx3090", 24576),
    _nvidia("NVIDIA GeForce RTX 4090", "rtx4090", 24564),
    _nvidia("NVIDIA GeForce RTX 5090", "rtx5090", 32607),
    _nvidia("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000", 97887),
    _nvidia("NVIDIA L4", "l4", 23034),
    _nvidia("NVIDIA L40S", "l40s", 46068),
    _nvidia("NVIDIA H100 80GB HBM3", "h100", 81559, ""),
    _nvidia("NVIDIA H100 PCIe", "h100-pcie", 81559, ""),
    _nvidia("NVIDIA H200", "h200", 143771, ""),
    _nvidia("NVIDIA GH200 480GB", "gh200", 97871, ""),
    _nvidia("NVIDIA B200", "b200", 183359),
    _nvidia("NVIDIA GB200", "gb200", 189471),
    _nvidia("NVIDIA GB300", "gb300", 284208),
    Kind(
        kind="AMD Instinct MI300X",
        slice="none",
        mib=147456,
        cost="mi300x",
        said="MI300X has gfx942",
        capability="gfx942",
    ),
    Kind(
        kind="NVIDIA GeForce RTX 6090",
        slice="rtx5090",
        mib=24576,
        cost="l4?",
        said="is no known kind: plans and step costs",
    ),
)


def show(record) -> None:
    python = compilers.python(record.root, "first-contact")
    with tempfile.TemporaryDirectory() as folder:
        policy = _policy(Path(folder) / "policy")
        for one in KINDS:
            if not record.args or one.cost in record.args:
                _kind(record, python, policy, one)
        if not record.args:
            _notebook(record, python)
            _refused(record, python, policy)
    if not record.args:
        record.figure("kinds", len(KINDS), at_least=COUNT)
        _meshes(record)


def _kind(record, python: Path, policy: Path, one: Kind) -> None:
    mesh = f"--config.mesh.fsdp={one.devices}"
    found = record.cached(
        f"{one.kind}", lambda: _start(record, python, one, *SMALL, f"--config.model.path={policy}", mesh)
    )
    key = re.sub(r"\W+", "_", one.kind.lower())
    record.figure(f"{key}.exit_code", found["code"], equals=int(one.refused))
    record.figure(f"{key}.cost", found["cost"], equals=f"analytic:{one.cost}")
    said = found["errors"] if one.refused else found["out"]
    if one.said:
        record.figure(f"{key}.said", one.said in said, equals=True)
    else:
        record.figure(f"{key}.kernels", KERNELS not in said and "devices:" not in said, equals=True)
    if one.refused:
        record.figure(f"{key}.sentences", found["errors"].count("\n"), equals=1)
    elif one.slice != "none":
        record.figure(f"{key}.programs", found["programs"], equals=["dispatch_64", "insert"])


def _start(record, python: Path, one: Kind, *arguments: str) -> dict:
    env = os.environ | {"FAKE_MEMORY": str(one.mib * MIB), "JAX_ENABLE_COMPILATION_CACHE": "0"}
    env |= {"FAKE_CUDA": "13000"} if one.slice != "none" and not one.kind.startswith("TPU") else {}
    env |= {"FAKE_CAPABILITY": one.capability} if one.capability else {}
    command = [python, "scripts/fake_start.py", one.kind, one.slice, *arguments]
    done = subprocess.run(command, cwd=record.root, text=True, capture_output=True, env=env, timeout=LIMIT_S)
    if done.returncode:
        return {"code": done.returncode, "out": "", "errors": done.stderr[-2000:], "programs": [], "cost": ""}
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["code"] or "Memory per device" in told["out"], f"the start printed no plan: {told['out'][:500]}"
    return told


def _policy(folder: Path) -> Path:
    """Writes a policy of random weights whose heads and vocabulary the kernels take."""
    demo = Path(__file__).resolve().parents[2] / "configs" / "demo_policy"
    shape = dict(vocab_size=4096, embed=256, layers=2, heads=4, kv_heads=2, head_dim=128, ffw=512, windows=())
    model = dataclasses.replace(hf.read_config(demo / "config.json"), **shape)
    files = (demo / "tokenizer.json", demo / "tokenizer_config.json")
    params = jax.tree.map(np.asarray, decoder.init(model, 0))
    hf.save(folder, model, params, dtype="bfloat16", tokenizer_files=files, eos_ids=(0,), bos_id=None)
    return folder


def _notebook(record, python: Path) -> None:
    """Starts the notebook's own settings, with the policy that it trains."""
    sys.path.append(str(record.root / "notebooks"))
    import runtimes

    for one in (one for one in KINDS if one.cost in ("t4", "l4", "v5e")):
        options = runtimes.of("tpu" if one.cost == "v5e" else "gpu").options
        flags = [f"--config.{name.replace('__', '.')}={value}" for name, value in options.items()]
        start = record.cached(
            f"notebook {one.kind}", lambda one=one, flags=flags: _start(record, python, one, *SMALL[:2], *flags)
        )
        key = f"notebook.{one.cost}"
        record.figure(f"{key}.exit_code", start["code"], equals=0)
        record.figure(
            f"{key}.programs",
            [name for name in start["programs"] if "dispatch" in name],
            equals=["dispatch_512", "dispatch_1024"],
        )
        record.figure(f"{key}.said_of_missing_units", "no units for bfloat16" in start["out"], equals=False)


def _refused(record, python: Path, policy: Path) -> None:
    """Gives two kinds a hundredth of what the plan needs."""
    for one in (one for one in KINDS if one.cost in ("v5e", "h100")):
        small = Kind(kind=one.kind, slice=one.slice, mib=1, cost=one.cost)
        found = _start(record, python, small, *SMALL, f"--config.model.path={policy}")
        record.figure(f"memory.{one.cost}.exit_code", found["code"], equals=1)
        right = f"policy on 1 x {one.kind} does not fit" in found["errors"] and found["errors"].count("\n") == 1
        record.figure(f"memory.{one.cost}.one_sentence", right, equals=True)
        record.figure(f"memory.{one.cost}.programs", found["programs"], equals=[])


def _meshes(record) -> None:
    """Orders all devices of every slice of TPUs, as a learner of fsdp over all of them, and as two slices."""
    right, tried = 0, 0
    for kind, one in chips.KINDS.items():
        for devices, _ in one.grids:
            for count in (1, 2):
                where = chips.read(f"{kind}-{int(devices / one.numbered)}").times(count)
                made = meshes.make_mesh(count, devices, 1, roles.planned(where))
                tried += 1
                right += len({device.id for device in made.devices.flat}) == where.devices
    record.figure("meshes", tried, at_least=60)
    record.figure("meshes.with_every_device", right, equals=tried)
