"""Real runs of several arms under the prices of devices that are not there, and their time to a reward.

A run is made once for each key, by one of two processes (scripts/priced_runs.py). Its steps are priced by
scripts/priced.py. Settings that share all devices decide without prices: one run of theirs is priced many times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import cost_tables
import priced
import priced_runs

SHARE = 0.9  # of what synchronous rounds reach in the end
FILTERED = 0.4  # of the steps of other runs: a step without groups of equal accuracies teaches more
LONGER = 1.2  # a pipelined run has so many times the rollouts, because stale tokens may teach less
# Stories end with their paragraph or with the word that pays. 13 is the line feed of the tokenizer.
STORIES = (
    "eval.at=()",
    "sampling.stop_ids=(13,)",
    "sampling.stop_strings=('happy',)",
    "sampling.max_tokens=192",
    "engine.max_length=240",
    "engine.page_size=48",
    "batch.rows=8",
    "batch.tokens=240",
)
PRICES = {
    "": {},
    ".launch_0.5": {"launch": 0.5},
    ".launch_2": {"launch": 2.0},
    ".train_0.5": {"train": 0.5},
    ".train_2": {"train": 2.0},
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run an arm.

    - rollouts: of an optimizer step.
    - slots: of the engine.
    - placement: shared or split, as in scripts/cost_tables.py.
    - filtered: groups of equal accuracies are left out and replaced, as DAPO does (arXiv 2503.14476).
    """

    overrides: tuple[str, ...]
    rollouts: int
    slots: int
    placement: str
    filtered: bool


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A config, its overrides, and how many rollouts a run without a filter and a window have."""

    config: str
    overrides: tuple[str, ...]
    trained: int
    window: int
    arms: dict[str, list[Setting]]


class Runs:
    """The runs of one workload by key, and their times."""

    def __init__(self, name: str, workload: Workload, jobs: Jobs):
        self._name, self._workload, self._jobs, self._found = name, workload, jobs, {}

    def of(self, arm: str, at: int, slice_: str, price: str, seed: int) -> tuple:
        """Returns the key of a run. Settings that share all devices decide without prices."""
        split = self._workload.arms[arm][at].placement == "split"
        return (arm, at, seed, *((slice_, price) if split else ()))

    def make(self, keys: Iterable[tuple]) -> None:
        missing = [key for key in dict.fromkeys(keys) if key not in self._found]
        made = self._jobs.all((f"{self._name}-{'-'.join(map(str, key))}", self._job(*key)) for key in missing)
        self._found |= dict(zip(missing, made, strict=True))

    def _job(self, arm: str, at: int, seed: int, slice_: str = "", price: str = "") -> dict:
        workload, setting = self._workload, self._workload.arms[arm][at]
        share = FILTERED if setting.filtered else LONGER if arm == "pipeline" else 1.0
        steps = math.ceil(share * workload.trained / setting.rollouts)
        overrides = [*workload.overrides, *setting.overrides, f"steps={steps}", f"seed={seed}"]
        table = _price(slice_, setting, price).table() if slice_ else None
        return {"config": workload.config, "overrides": overrides, "table": table}

    def found(self, key: tuple) -> dict:
        """Returns what a run has logged. It is made where it is missing."""
        self.make([key])
        return self._found[key]

    def time(self, key: tuple, slice_: str, price: str) -> dict:
        """Returns seconds and rollouts until the reward, and the mean seconds of a step by part."""
        arm, at, seed = key[:3]
        setting, run = self._workload.arms[arm][at], self.found(key)
        steps = [priced.Step(dispatches=tuple(map(tuple, d)), begins=b, tokens=t) for d, b, t in run["steps"]]
        parts = priced.seconds(steps, _price(slice_, setting, price), setting.slots)
        first = reached(run["rewards"], run["scored"], self._target(seed), self._workload.window)
        means = {part: statistics.mean(getattr(one, part) for one in parts) for part in ("engine", "learner", "waited")}
        return means | {
            "step": statistics.mean(one.all for one in parts),
            "seconds": sum(one.all for one in parts[:first]) if first else math.inf,
            "rollouts": sum(run["scored"][:first]) if first else math.inf,
        }

    def _target(self, seed: int) -> float:
        run = self.found(("sync", 0, seed))
        return SHARE * last(run["rewards"], run["scored"], self._workload.window)


def reached(rewards: Sequence[float], scored: Sequence[int], target: float, window: int) -> int | None:
    """Returns the first step, counted from 1, at whose end the mean reward of the last rollouts reaches the target."""
    for step in range(1, len(rewards) + 1):
        mean = last(rewards[:step], scored[:step], window)
        if mean is not None and mean >= target:
            return step
    return None


def last(rewards: Sequence[float], scored: Sequence[int], window: int) -> float | None:
    """Returns the mean reward of the last steps that have `window` scored rollouts together; None: all have fewer."""
    many = total = 0.0
    for reward, count in zip(reversed(rewards), reversed(scored), strict=True):
        many, total = many + count, total + count * reward
        if many >= window:
            return total / many
    return None


def _price(slice_: str, setting: Setting, price: str):
    return cost_tables.read(slice_, setting.placement).scaled(**PRICES[price])


class Jobs:
    """Two processes that run jobs. Finished jobs are kept, so that a killed show goes on."""

    def __init__(self, record):
        self._record, self._workers = record, SimpleQueue()

    def __enter__(self) -> Jobs:
        self._all = [priced_runs.Worker(), priced_runs.Worker()]
        for worker in self._all:
            self._workers.put(worker)
        return self

    def __exit__(self, *error) -> None:
        for worker in self._all:
            worker.close()

    def all(self, jobs: Iterable[tuple[str, dict]]) -> list[dict]:
        with ThreadPoolExecutor(len(self._all)) as pool:
            return list(pool.map(lambda job: self._one(*job), jobs))

    def _one(self, name: str, job: dict) -> dict:
        worker = self._workers.get()
        try:
            return self._record.cached(name, lambda: worker.run(job))
        finally:
            self._workers.put(worker)
