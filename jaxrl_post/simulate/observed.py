"""Lengths of rollouts by which a mode is chosen: those that were seen before, or a prior where none were.

Invariant: what is returned is a function of the files and of the longest rollout. No random number is drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxrl_post.ring.types import Prompt
from jaxrl_post.runs import rollout_log
from jaxrl_post.simulate import workloads
from jaxrl_post.simulate.texts import noise

FILES = 32  # of a rollout log, evenly spread over the run: reading them takes about a second
_FITTED_CAP = 8192  # tokens; the longest rollouts of the workload that the prior was fitted to
_PRIOR = 256, 8  # prompts, and rollouts of each


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Lengths in tokens, one list for each prompt, none above the longest rollout. `source` says where they come from."""

    lengths: tuple[tuple[int, ...], ...]
    source: str

    @property
    def told(self) -> dict:
        """Returns source, counts, mean, quantiles and a digest, as JSON."""
        every = np.concatenate([np.array(own) for own in self.lengths])
        return {
            "source": self.source,
            "rollouts": int(every.size),
            "prompts": len(self.lengths),
            "mean": round(float(every.mean()), 1),
            "median": float(np.median(every)),
            "p90": round(float(np.quantile(every, 0.9)), 1),
            "longest": int(every.max()),
            "digest": hashlib.sha256(json.dumps(self.lengths).encode()).hexdigest()[:16],
        }


def read(path: str, cap: int) -> Observed:
    """Reads a run's folder, a rollout log or a trace. Lengths are cut at `cap` tokens.

    A record of a .jsonl file with `output_length` may name its `prompt`. Lengths without a prompt count as those of one.

    Raises:
      ValueError: nothing of the kind is there.
    """
    where = f"scheduler.auto_history={path}"
    place = Path(path)
    if place.is_file():
        return Observed(lengths=_cut(_of_file(place), cap), source=path)
    logs = [folder for folder in _logs(place) if any(folder.glob("step_*.npz"))]
    if not logs:
        raise ValueError(
            f"{where}: no trace and no rollout log is there: name the folder of a run, its rollouts, or a file .jsonl, .csv or .txt"
        )
    files = sorted(logs[0].glob("step_*.npz"))
    count = min(len(files), FILES)
    some = (files[index * len(files) // count] for index in range(count))
    return Observed(lengths=_cut(of_log(some), cap), source=path)


def of_log(files: Iterable[Path]) -> list[list[int]]:
    """Returns the lengths in files of a rollout log, one list per prompt, in order of first appearance."""
    found: dict[str, list[int]] = {}
    for file in files:
        for group in rollout_log.read(file):
            found.setdefault(group.prompt.id, []).extend(map(len, group.rollouts))
    return list(found.values())


def prior(cap: int) -> Observed:
    """Returns RollPacker's fitted lengths (simulate/workloads.py), scaled so that their longest rollout has `cap` tokens."""
    prompts, group = _PRIOR
    distribution = workloads.rollpacker(prompts, cap=_FITTED_CAP)
    none = np.zeros(1, np.int32)
    drawn = [
        [
            distribution(Prompt(id=str(prompt), tokens=none)).draw(
                noise(prompt, sample, 1), noise(prompt, sample, 2), 0.0
            )
            for sample in range(group)
        ]
        for prompt in range(prompts)
    ]
    scaled = [[round(length * cap / _FITTED_CAP) for length in own] for own in drawn]
    return Observed(lengths=_cut(scaled, cap), source="no history: RollPacker's fitted lengths, scaled")


def stretched(found: Observed, mean: float, cap: int) -> Observed:
    """Returns the lengths times one factor, none above `cap`, so that their mean is `mean` to a hundredth part."""
    low, high = 0.0, float(cap)

    def times(factor: float) -> tuple[tuple[int, ...], ...]:
        return _cut([[round(length * factor) for length in own] for own in found.lengths], cap)

    for _ in range(50):  # the mean grows with the factor
        middle = (low + high) / 2
        every = np.concatenate([np.array(own) for own in times(middle)])
        low, high = (middle, high) if every.mean() < mean else (low, middle)
    return Observed(lengths=times(high), source=f"{found.source}, stretched to --length={mean:g}")


def _logs(place: Path) -> tuple[Path, ...]:
    """Returns the folders in which the rollouts of a run may lie. In a job of several processes all logs are equal."""
    return place, place / "rollouts", place / "process_0" / "rollouts"


def _of_file(file: Path) -> list[list[int]]:
    """Returns the lengths of a trace by prompt."""
    every = workloads.read_lengths(file)
    if file.suffix != ".jsonl":
        return [every]
    found: dict[str, list[int]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line) if line.strip() else {}
        if int(record.get("output_length", 0)) > 0:
            found.setdefault(str(record.get("prompt", "")), []).append(int(record["output_length"]))
    return list(found.values())


def _cut(lengths: Sequence[Sequence[int]], cap: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(min(max(length, 1), cap) for length in own) for own in lengths)
