"""Every model family scores as transformers does, planted faults do not, and a checkpoint of 1 GB loads in its size.

Scores: the random checkpoints of tests/goldens (scripts/make_goldens.py) in float32, in both spellings of config.json.
They run over plain attention, the trainer's and the engine's. Then come, one by one, mistakes that a reader or a
decoder could make. With JAXRL_ORACLE set to a python that has torch and transformers, transformers also reads what we
write.

Memory: a random checkpoint of the shape of Qwen2.5-0.5B in several files, made in a temporary folder and loaded in a
fresh process. Peak resident memory over that just before loading is compared with the bytes of what is loaded.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.models import decoder, hf
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.parallel import mesh

MINUTES = 3.0
PLATFORM = "cpu"
FAULT = 1e-3  # ten times the bound of the comparison
PRESET, FILE_BYTES = "qwen2_5_0_5b", 400_000_000
STATUS = Path("/proc/self/status")


def show(record) -> None:
    import parity_arms as arms

    for family in arms.FAMILIES:
        _scores(record, arms, family)
        _planted(record, arms, family)
    if os.environ.get("JAXRL_ORACLE"):
        _written(record, os.environ["JAXRL_ORACLE"])
    _memory(record)


def _scores(record, arms, family: str) -> None:
    tokens, scores = arms.golden(family)
    record.figure(f"{family}_score_std", scores.std(), at_least=2)
    record.figure(f"{family}_places", tokens.size)
    with tempfile.TemporaryDirectory() as folder:
        for spelling in ("newer", "older"):
            config, params = hf.load(arms.spelled(family, spelling, Path(folder)))
            longest = max(
                [window or 0 for window in config.windows]
                + [getattr(config.rope_scaling, "original_length", 0) if family == "llama3" else 0]
            )
            for name, arm in arms.ARMS.items():
                gap, elsewhere = arms.gap(family, config, params, jax.jit(arm, static_argnums=0))
                record.figure(f"{family}_{spelling}_{name}", gap, at_most=arms.BOUND)
                record.figure(f"{family}_{spelling}_{name}_best_token_differs", elsewhere, equals=0)
    record.figure(f"{family}_length_beyond_window_and_original", tokens.shape[1] - longest, at_least=1)


def _planted(record, arms, family: str) -> None:
    for fault in arms.FAULTS[family]:
        record.figure(f"{family}_planted_{fault}", arms.planted(family, fault)[0], at_least=FAULT)


def _written(record, oracle: str) -> None:
    """Returns the largest difference of transformers' scores on directories that models/hf.py wrote."""
    told = record.said("scripts/make_goldens.py", "--check", sys.executable, timeout_s=1200, python=oracle)
    for family, found in json.loads(told).items():
        for name, gap in found.items():
            record.figure(f"{family}_transformers_reads_{name}", gap, at_most=0.0)


def _memory(record) -> None:
    if not STATUS.is_file():
        raise RuntimeError(f"parity: {STATUS} is missing: peak memory is read from Linux's /proc")
    with tempfile.TemporaryDirectory() as folder:
        made = _own_process(record, "make", f"{folder}/model")
        record.figure("checkpoint_files", made["files"], at_least=2)
        record.figure("checkpoint_mb", made["bytes"] / 1e6, at_least=900)
        for dtype in ("bfloat16", "float32"):
            seen = _own_process(record, "load", f"{folder}/model", dtype)
            record.figure(f"load_{dtype}_mb", seen["bytes"] / 1e6)
            record.figure(f"load_{dtype}_peak_increase_mb", seen["increase"] / 1e6)
            record.figure(f"load_{dtype}_peak_increase_to_bytes", seen["increase"] / seen["bytes"], at_most=1.3)
            record.figure(f"load_{dtype}_seconds", seen["seconds"])
            record.figure(f"load_{dtype}_same_weights", seen["digest"] == made["digest"], equals=True)


def _own_process(record, *arguments: str) -> dict:
    told = record.said(__file__, *arguments, timeout_s=1200, env={"PYTHONPATH": str(record.root)})
    return json.loads(told.splitlines()[-1])


# ---- in a process of its own


def make(folder: str) -> dict:
    """Writes the checkpoint, leaf by leaf in bfloat16."""
    generator = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: (0.05 * generator.standard_normal(leaf.shape, np.float32)).astype(jnp.bfloat16),
        decoder.abstract(PRESETS[PRESET]),
    )
    hf.save(folder, PRESETS[PRESET], params, dtype="bfloat16", max_file_bytes=FILE_BYTES)
    return {
        "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "digest": digest(params),
        "files": len(list(Path(folder).glob("*.safetensors"))),
    }


def load(folder: str, dtype: str) -> dict:
    """Loads in bfloat16, as the checkpoint is, or in float32, as a run does, into the learner's sharding."""
    shardings = mesh.param_shardings(mesh.make_mesh(), decoder.axes(hf.read_config(f"{folder}/config.json")), "learner")
    jax.block_until_ready(mesh.put(np.zeros(8, np.float32), mesh.replicated(mesh.make_mesh())))
    before, begun = memory("VmRSS"), time.monotonic()
    _, params = hf.load(folder, dtype=None if dtype == "bfloat16" else np.float32, shardings=shardings)
    seconds, after = time.monotonic() - begun, memory("VmHWM")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {dtype}
    return {
        "increase": after - before,
        "seconds": seconds,
        "digest": digest(params),
        "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
    }


def digest(params) -> int:
    """Returns a hash of every weight in bfloat16, in the order of the tree."""
    value = 0
    for leaf in jax.tree.leaves(params):
        value = zlib.crc32(np.asarray(leaf).astype(jnp.bfloat16).reshape(-1).view(np.uint8), value)
    return value


def memory(word: str) -> int:
    """Returns bytes of this process, from Linux's own count."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{word}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps({"make": make, "load": load}[sys.argv[1]](*sys.argv[2:])))
