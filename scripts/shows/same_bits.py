"""Runs end in the bits of the base commit: final policy, rollouts and decision logs, in five modes of 12 steps.

The base commit (scripts/baseline.py) runs from a git worktree of its own. Both trees run in turns, on this machine, with
this interpreter and the same settings, each with a compilation cache of its own.

- Policy: the exported safetensors file, byte by byte.
- Rollouts: every array that both trees write, by value; those of TOKENS must be written by both. Texts are compared without
  the list of reasons to finish, and each rollout's reason by its name, because the base lists one that nothing used.
- Decisions: scheduler_log.jsonl, byte by byte. Where a tree's lines lack the field "cancel", which was always empty, it is
  taken out of the other's lines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import baseline
import numpy as np

MINUTES = 12.0
SOURCES = ("jaxrl_post.main",)
STEPS = 12
# As the base commit names them; this tree opens these names too.
CONFIGS = ("demo", "demo_speculation", "demo_pipeline", "demo_tail_batching", "demo_split")
DEVICES = {"demo_split": 2}
SHORT = (
    f"--config.steps={STEPS}",
    "--config.eval.prompts=16",
    "--config.eval.every=0",
    "--config.eval.show=0",
    "--config.checkpoint.every=0",
)
TOKENS = ("tokens", "sampled", "logprobs", "entropies", "versions", "drafted", "clocks", "offsets", "seeds", "rewards")
LIMIT_S = 900.0


def show(record) -> None:
    base = baseline.checkout(record.root)
    record.figure("base", baseline.BASE)
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(CONFIGS):
            runs = {"base": (base, Path(folder) / f"{name}_base"), "new": (record.root, Path(folder) / f"{name}_new")}
            for which in sorted(
                runs, reverse=number % 2 == 1
            ):  # the first of a pair warms the file cache for the other
                seconds = _run(*runs[which], name, Path(folder) / f"jax_{which}")
                record.figure(f"{name}.{which}_seconds", round(seconds, 1))
            _compare(record, name, runs["base"][1], runs["new"][1])


def _run(root: Path, place: Path, name: str, cache: Path) -> float:
    flags = os.environ.get("XLA_FLAGS", "")
    if name in DEVICES:
        flags = f"{flags} --xla_force_host_platform_device_count={DEVICES[name]}".strip()
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"JAX_COMPILATION_CACHE_DIR": str(cache)} | ({"XLA_FLAGS": flags} if flags else {})
    command = [sys.executable, "-m", "jaxrl_post.main", f"--config=configs/{name}.py", *SHORT, f"--run-dir={place}"]
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=root, env=env, timeout=LIMIT_S, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} exited {done.returncode} in {root}:\n{done.stdout[-4000:]}")
    return time.monotonic() - start


def _compare(record, name: str, base: Path, new: Path) -> None:
    start = (record.root / "configs" / "demo_policy" / "model.safetensors").read_bytes()
    policies = [(run / "policy" / "model.safetensors").read_bytes() for run in (base, new)]
    record.figure(f"{name}.policy_equal", policies[0] == policies[1], equals=True)
    record.figure(f"{name}.policy_has_moved", policies[0] != start, equals=True)
    files = [sorted(path.name for path in (run / "rollouts").glob("*.npz")) for run in (base, new)]
    record.figure(f"{name}.num_rollout_files", len(files[0]), at_least=STEPS // 2)
    record.figure(f"{name}.rollout_files_equal", files[0] == files[1], equals=True)
    differing, tokens = set(), 0
    for file in files[0]:
        loaded = [arrays(run / "rollouts" / file) for run in (base, new)]
        differing |= set(differing_arrays(*loaded))
        tokens += loaded[0]["tokens"].size
    record.figure(f"{name}.num_tokens", tokens, at_least=10_000)
    record.figure(f"{name}.arrays_that_differ", sorted(differing), equals=[])
    logs = [(run / "scheduler_log.jsonl").read_text() for run in (base, new)]
    record.figure(f"{name}.num_decisions", logs[0].count("\n"), at_least=1000)
    record.figure(f"{name}.decisions_equal", same_decisions(*logs), equals=True)


def arrays(file: Path) -> dict[str, np.ndarray]:
    """The arrays of one file of the rollout log. Reasons to finish are names; `texts` holds the other texts."""
    with np.load(file) as archive:
        found = {name: archive[name] for name in archive.files}
    texts = json.loads(found["texts"].tobytes())
    names = texts.pop("finishes")
    found["finish"] = np.array(json.dumps([names[place] for place in found["finish"]]))
    found["texts"] = np.array(json.dumps(texts, sort_keys=True))
    return found


def differing_arrays(base: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> list[str]:
    """Names of the arrays that differ in type, shape or bits; of TOKENS also those that one side lacks."""
    lacking = [name for name in (*TOKENS, "finish", "texts") if name not in base or name not in new]
    return lacking + [name for name in base.keys() & new.keys() if not _same(base[name], new[name])]


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype.kind == other.dtype.kind and one.shape == other.shape and one.tobytes() == other.tobytes()


def same_decisions(base: str, new: str) -> bool:
    """Whether two logs are equal byte by byte, but for empty fields "cancel" that only one of them has."""
    with_it = '"cancel":[],'
    if (with_it in base) != (with_it in new):
        base, new = base.replace(with_it, ""), new.replace(with_it, "")
    return base == new
