"""LoRA on the demo: the gain of full training, additions alone move and are saved, and PEFT computes the same.

1. configs/demo.py and configs/demo/lora.py, with the same steps, prompts and rollouts a step. Only the learning rate
   differs: an addition moves its matrix by A A' times what a step of the matrix itself would.
2. Every rollout of the LoRA run's last evaluation is sampled again from its merged export, bit for bit.
3. A swap between learner and engine on devices of their own moves A and B, counted in bytes.
4. peft, in an environment below .cache/peers/ (made once: some minutes and 1.3 GB), loads the adapter over the base. Its
   log-probs of rollouts are compared with the engine's, and its merge with the exported weights.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import peers
import trained

from jaxrl_post.launch.parts import saved_policy
from jaxrl_post.models import tensor_file
from jaxrl_post.runs import rollout_log

MINUTES = 9.0
PLATFORM = "cpu"
LIMIT_S = 3600.0
TEXTS = 64  # rollouts that are scored by peft


def show(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        full = _run(record, place / "full", "demo")["eval"]
        lora = _run(record, place / "lora", "demo/lora")
        _gain(record, full, lora["eval"])
        _bits(record, place / "lora")
        _peft(record, place / "lora", place)
        _swap(record, place)


def _run(record, place: Path, config: str, *flags: str, env: dict | None = None) -> dict:
    trained.run(record, f"configs/{config}.py", place, "", *flags, timeout_s=LIMIT_S, env=env)
    return trained.summary(place)


def _gain(record, full: dict, lora: dict) -> None:
    gains = {}
    for name, found in (("full", full), ("lora", lora)):
        before, after = found["before"]["mean_at_4"], found["after"]["mean_at_4"]
        gains[name] = after - before
        record.figure(f"{name}.mean_at_4.before", before, at_most=0.5)
        record.figure(f"{name}.mean_at_4.after", after)
    record.figure("full.gain", gains["full"], at_least=0.4)
    record.figure("gain_of_lora_to_full", gains["lora"] / gains["full"], at_least=0.95)


def _bytes(kind: str) -> int:
    """Returns the bytes of an array that a checkpoint describes, such as float32[4, 8]."""
    dtype, _, shape = kind.rstrip("]").partition("[")
    out = {"float32": 4, "int32": 4, "uint32": 4, "bfloat16": 2}[dtype]
    for size in filter(None, shape.split(",")):
        out *= int(size)
    return out


def _bits(record, run: Path) -> None:
    """Samples the run's last evaluation again from its merged export."""
    config = json.loads((run / "config.json").read_text())
    file = max((run / "evaluations").glob("step_*.npz"))
    logged = [rollout for group in rollout_log.read(file) for rollout in group.rollouts]
    for name in (run, f"{run}@{config['steps']}"):
        policy, differ = saved_policy.load(name), 0
        for greedy in (False, True):
            some = [one for one in logged if bool(one.id.attempt) is greedy]
            keys = np.stack([one.id.seed() for one in some])[:, None]
            law = {"temperature": 0.0 if greedy else config["eval"]["temperature"]}
            given = [dataclasses.replace(one.prompt, id=str(place)) for place, one in enumerate(some)]
            again = policy.sampled(given, 1, law, keys, config["sampling"]["max_tokens"])
            differ += sum(
                mine.tokens.tobytes() != one.tokens.tobytes() or mine.logprobs.tobytes() != one.logprobs.tobytes()
                for one, (mine,) in zip(some, again, strict=True)
            )
        what = "export" if name == run else "saved_step"
        record.figure(f"{what}.rollouts_compared", len(logged), at_least=1000)
        record.figure(f"{what}.rollouts_with_other_bits", differ, equals=0)


def _peft(record, run: Path, place: Path) -> None:
    python = peers.environment(record.root, "peft", peers.PEFT)
    file = max((run / "evaluations").glob("step_*.npz"))
    some = [group.rollouts[0] for group in rollout_log.read(file)][:TEXTS]
    texts = [[one.prompt.tokens.tolist(), one.tokens.tolist()] for one in some]
    (place / "texts.json").write_text(json.dumps(texts))
    base = json.loads((run / "config.json").read_text())["model"]["path"]
    for name in ("adapter", "planted_alpha", "planted_transpose"):
        adapter = _planted(run / "adapter", place / name, name)
        wanted = [str(run / "policy")] if name == "adapter" else []
        command = [python, "scripts/peft_scores.py", base, adapter, place / "texts.json", place / "out.json", *wanted]
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        subprocess.run(list(map(str, command)), cwd=record.root, check=True, timeout=LIMIT_S, **quiet)
        found = json.loads((place / "out.json").read_text())
        pairs = zip(some, found["logprobs"], strict=True)
        gap = max(float(np.abs(one.logprobs - np.array(theirs)).max()) for one, theirs in pairs)
        if name == "adapter":
            record.figure("peft.versions", " ".join(f"{what} {version}" for what, version in found["versions"].items()))
            record.figure("peft.tokens", sum(map(len, found["logprobs"])), at_least=500)
            record.figure("peft.logprob_gap", gap, at_most=1e-4)
            record.figure("peft.merge_gap", found["unmerged"], at_most=1e-5)
        else:
            record.figure(f"peft.{name}.logprob_gap", gap, at_least=1e-3)


def _planted(adapter: Path, target: Path, fault: str) -> Path:
    """Returns the adapter, or a copy with another scale, or with the columns of B in another order."""
    if fault == "adapter":
        return adapter
    shutil.copytree(adapter, target)
    if fault == "planted_alpha":
        told = json.loads((target / "adapter_config.json").read_text())
        (target / "adapter_config.json").write_text(json.dumps(told | {"lora_alpha": 1.5 * told["lora_alpha"]}))
        return target
    entries = tensor_file.entries(adapter / "adapter_model.safetensors")
    values = {name: tensor_file.read(one) for name, one in entries.items()}
    turned = {n: v.reshape(v.shape[::-1]).T if "lora_B" in n else v for n, v in values.items()}
    shapes = {name: value.shape for name, value in turned.items()}
    tensor_file.write(target / "adapter_model.safetensors", shapes, np.dtype(np.float32), turned.values())
    return target


def _swap(record, place: Path) -> None:
    """Counts the bytes of a swap between devices of their own, with additions and in full."""
    off = (
        "--config.eval=default",
        "--config.eval.prompts=0",
        "--config.checkpoint=default",
        "--config.checkpoint.every=0",
    )
    flags = ("--config.mesh.engine=1", "--config.steps=2", *off)
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    moved = {}
    for name, config in (("demo", "demo"), ("demo_lora", "demo/lora")):
        told = _run(record, place / f"{name}_split", config, *flags, env=devices)["swap"]
        moved[name] = sum(told["links"].values())
        record.figure(f"{name}.swap", told["case"])
        record.figure(f"{name}.swap_bytes", moved[name])
    about = json.loads(max((place / "lora" / "checkpoints").glob("step_*/about.json")).read_text())["arrays"]
    additions = sum(_bytes(kind) for name, kind in about.items() if name.startswith("params.policy."))
    record.figure("bytes_of_additions", additions)
    record.figure("swap_moves_additions_alone", moved["demo_lora"] == additions, equals=True)
