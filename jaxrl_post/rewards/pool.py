"""Reward functions in killable processes. start(rollout) queues a rollout. join(group) waits and returns the group's
scores.

Invariants:
- A group's scores depend on its texts alone, never on the number of workers or on which one finished first.
- A reward function fails if it raises, dies, returns no finite number or runs over its limit. It is tried once more in
  a fresh process. Then the rollout is unscored, never scored 0. Only `Overrun`, raised by the function, is a verdict.
- Every wait is bounded: START_LIMIT_S for a starting worker, `timeout_s` for a working one, which is then killed.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing.connection
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxrl_post.rewards import Overrun as Overrun  # exported here too
from jaxrl_post.rewards import digest, records, signatures
from jaxrl_post.rewards.limits import Fixed, Limits
from jaxrl_post.rewards.process import START_LIMIT_S, WorkerProcess
from jaxrl_post.rewards.sandbox import AUTO
from jaxrl_post.rewards.sandbox.wire import Broken
from jaxrl_post.rewards.sharing import Sharing
from jaxrl_post.types import Group, Prompt, Rollout, RolloutId

_COUNTERS = ("unscored", "retries", "overruns")
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Job:
    """The scores of one rollout so far, one per function, or its journaled record from before a resume."""

    rollout: RolloutId
    digest: str
    numbers: list
    pending: int
    journaled: Mapping | None = None
    limit_s: float = 0.0
    counts: dict = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0))

    @property
    def scored(self) -> bool:
        """Returns whether every function returned, at least one of them with a number."""
        return all(numbers is not None for numbers in self.numbers) and any(self.numbers)


@dataclass(eq=False)
class _Task:
    """One function on one rollout."""

    job: _Job
    function: int
    arguments: object
    retried: bool = False


class Pool:
    """protocols.Rewards over reward functions named by import path.

    Functions have verl's signature or TRL's (rewards/signatures.py).

    Components of a group are NaN where a rollout has none. They are:
    - "acc", from the first function that returns one, else the score of the first function that applies;
    - the named numbers of each function;
    - with several functions, also their scores. Names then begin with the function's name and a slash.

    Args:
      functions: import paths `pkg.mod:fn` or `file.py:fn`.
      weights: one per function, or empty for all 1. A reward is the weighted sum of the scores.
      workers: child processes. Each scores one rollout with one function at a time.
      timeout_s: wall-clock limit of one call of one function, in seconds.
      decode: maps a rollout's token ids to its text.
      shuffle: a control from which nothing can be learned. It permutes a training group's scores over its rollouts.
        The order depends on (seed, prompt id, epoch) alone. Components, including "acc", and the journal are not
        permuted.
      share: the argument of sharing.Sharing, in a job of several processes. Every process calls it.
      compute: False in all processes but 0. They check the paths, score nothing and receive records through `share`.
      journal: an object with write(record: dict), called for every score before `join` returns it.
      journaled: rollout_log.Journaled, or an object with its `find` and `take`. A rollout with a record is not graded
        again. Its record is joined and journaled unchanged, with its failures and their counts.
      limits: CPU seconds that a judged program may take, passed to functions. A function may return the CPU seconds it
        measured as the number "cpu_s". That number is journaled beside the limit and is not a component.
      sandbox: level of confinement of judged programs (rewards/sandbox).

    `confined` holds the level and the layers of that sandbox. It is empty if no function judges programs.

    Raises:
      ValueError: a path is wrong, a function is missing or has neither signature, or weights do not fit.
    """

    def __init__(
        self,
        functions: Sequence[str],
        weights: Sequence[float] = (),
        *,
        workers: int,
        timeout_s: float,
        decode: Callable[[np.ndarray], str],
        shuffle: bool = False,
        seed: int = 0,
        share: Callable[[np.ndarray], np.ndarray] | None = None,
        compute: bool = True,
        journal: object | None = None,
        journaled: object | None = None,
        limits: Limits = Fixed(5.0),
        sandbox: str = AUTO,
    ):
        _check_arguments(functions, weights, workers, timeout_s)
        if not compute and share is None:
            raise ValueError("a reward pool that computes nothing needs `share`")
        self._functions, self._names = tuple(functions), signatures.names(functions)
        self._weights = tuple(weights) or (1.0,) * len(functions)
        self._timeout_s, self._decode, self._journal = timeout_s, decode, journal
        self._sharing = Sharing(share) if share is not None else None
        self._journaled, self._limits = journaled, limits
        self._shuffle, self._seed, self._compute = shuffle, seed, compute
        self._arguments = {"verl": signatures.verl, "trl": functools.partial(signatures.trl, decode=decode)}
        self._signatures: list = []
        self._sandbox, self.confined = sandbox, {}
        self._judging = {"sandbox": sandbox, "workers_per_core": workers / (os.cpu_count() or 1)}
        self._broken = 0
        self._queue: deque[_Task] = deque()
        self._jobs: dict[RolloutId, _Job] = {}
        self._counts, self._waited_s = dict.fromkeys(_COUNTERS, 0), 0.0
        self._workers: list[WorkerProcess] = []
        self._finalizer = weakref.finalize(self, _end_all, self._workers)  # runs at exit too
        self._workers += [WorkerProcess(functions, sandbox) for _ in range(workers if compute else 1)]
        self._check(self._workers[0])
        if not compute:
            self.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        """Kills the workers and reaps them. Scores that are not joined yet are lost."""
        _end_all(self._workers)

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raises ValueError when a prompt lacks a ground truth, or a column, that a function needs."""
        for name, (_, needs, truths, instead) in zip(self._functions, self._signatures, strict=True):
            for prompt in prompts if needs or truths else ():
                signatures.check(prompt, name, needs, truths, instead)

    def start(self, rollout: Rollout) -> None:
        """Queues a rollout and returns at once. A resumed rollout that is started again is scored again."""
        if self._sharing is not None:
            self._sharing.forget(rollout.id)
        if not self._compute:
            return
        tokens = digest.of_tokens(rollout)
        known = self._journaled.find(rollout.id, tokens) if self._journaled is not None else None
        limit_s = self._limits.of(rollout.id.prompt_id)
        job = _Job(
            rollout=rollout.id,
            digest=tokens,
            numbers=[None] * len(self._functions),
            journaled=known,
            limit_s=limit_s,
            pending=0 if known else len(self._functions),
        )
        self._jobs[rollout.id] = job
        if known:
            return
        text, about = self._decode(rollout.tokens), signatures.about(rollout, limit_s, self._judging)
        for index in range(len(self._functions)):
            arguments = self._arguments[self._signatures[index][0]](rollout, text, about)
            self._queue.append(_Task(job=job, function=index, arguments=arguments))
        self._turn(0.0)

    def join(self, group: Group) -> Group:
        """Returns the group with rewards, scored and components. Each of its rollouts must have been started.

        Raises:
          ValueError: a rollout was never started.
          RuntimeError: a fresh worker can no longer be started.
        """
        ids = [rollout.id for rollout in group.rollouts]
        if self._sharing is None:
            found = self._collect(ids)
        else:
            found = self._sharing.take(ids, (lambda ids: self._collect(ids) + self._ready()) if self._compute else None)
        for record in found:
            for name in _COUNTERS:
                self._counts[name] += record["counts"][name]
            self._limits.scored(record)
            if self._journal is not None:
                self._journal.write(record)
        return records.scored(group, found, self._seed if self._shuffle else None)

    def metrics(self) -> dict[str, float]:
        """Returns counts since the last call, and the seconds that `join` waited.

        Counted are unscored rollouts, second attempts, overruns, and workers whose output was no reply.
        """
        out = {f"reward/{name}": float(count) for name, count in self._counts.items()}
        out |= {"reward/broken_workers": float(self._broken), "timing_s/reward_wait": self._waited_s}
        self._counts, self._broken, self._waited_s = dict.fromkeys(_COUNTERS, 0), 0, 0.0
        return out

    def _check(self, worker: WorkerProcess) -> None:
        while not worker.ready:
            if not multiprocessing.connection.wait([worker], max(0.0, worker.deadline - time.monotonic())):
                self.close()
                raise ValueError(f"reward functions {self._functions} are not loaded after {START_LIMIT_S:g} s")
            try:
                message = next(worker.receive(), {})
            except (EOFError, Broken):
                message = {"refused": f"the process that loads {self._functions} died"}
            if "refused" in message:
                self.close()
                raise ValueError(message["refused"])
            worker.ready = "ready" in message
        self._signatures, self.confined = message["ready"], message["sandbox"]
        self._judging["sandbox"] = self.confined.get("level", self._sandbox)

    def _collect(self, ids: Sequence[RolloutId]) -> list[Mapping]:
        """Waits for the records of rollouts and returns them."""
        begun = time.monotonic()
        unknown = [id for id in ids if id not in self._jobs]
        if unknown:
            raise ValueError(f"group {unknown[0].prompt_id!r}: rollout {unknown[0]} is joined but was never started")
        if not self._workers:
            raise ValueError(f"group {ids[0].prompt_id!r} is joined after the reward pool was closed")
        jobs = [self._jobs[id] for id in ids]
        while any(job.pending for job in jobs):
            nearest = min(worker.deadline for worker in self._workers if worker.task or not worker.ready)
            self._turn(max(0.0, nearest - time.monotonic()))
        self._waited_s += time.monotonic() - begun
        return self._taken(jobs)

    def _ready(self) -> list[Mapping]:
        """Returns the records of all other rollouts that are graded by now."""
        return self._taken([job for job in self._jobs.values() if not job.pending and job.journaled is None])

    def _taken(self, jobs: Sequence[_Job]) -> list[Mapping]:
        for job in jobs:
            del self._jobs[job.rollout]
        return [self._record(job) for job in jobs]

    def _record(self, job: _Job) -> Mapping:
        if job.journaled is not None:
            return self._journaled.take(job.rollout, job.digest)
        out = job.rollout._asdict() | {
            "digest": job.digest,
            "scored": job.scored,
            "reward": 0.0,
            "components": {},
            "counts": job.counts,
        }
        used = [numbers.pop("cpu_s") for numbers in job.numbers if numbers and "cpu_s" in numbers]
        if used:
            out |= {"limit_s": job.limit_s, "cpu_s": max(used)}
        if job.scored:
            out["reward"] = sum(w * n["score"] for w, n in zip(self._weights, job.numbers, strict=True) if n)
            out["components"] = self._components(job.numbers)
        return out

    def _components(self, numbers: Sequence[dict[str, float]]) -> dict[str, float]:
        first = next(n["score"] for n in numbers if n)
        out = {"acc": next((n["acc"] for n in numbers if "acc" in n), first)}
        if len(numbers) == 1:
            return out | {k: v for k, v in numbers[0].items() if k not in ("score", "acc")}
        return out | {f"{name}/{k}": v for name, n in zip(self._names, numbers, strict=True) for k, v in n.items()}

    def _turn(self, wait_s: float) -> None:
        """Hands out tasks, waits at most `wait_s`, processes replies, and kills workers over their limit."""
        self._feed()
        for worker in multiprocessing.connection.wait(self._workers, wait_s):
            try:
                for message in worker.receive():
                    self._answered(worker, message)
            except EOFError:
                self._failed(worker, None)
            except Broken as error:
                self._broken += 1
                self._failed(worker, f"wrote {error} instead of a reply")
        now = time.monotonic()
        for worker in list(self._workers):
            if now > worker.deadline and (worker.task or not worker.ready):
                self._failed(worker, f"took longer than {worker.limit_s if worker.ready else START_LIMIT_S:g} s")
        self._feed()

    def _feed(self) -> None:
        for worker in list(self._workers):
            if (
                worker.ready
                and worker.task is None
                and self._queue
                and not worker.give(self._queue.popleft(), self._timeout_s)
            ):
                self._failed(worker, None)

    def _answered(self, worker: WorkerProcess, message: dict) -> None:
        if "ready" in message:
            self._started(worker)
        elif "budget" in message:
            worker.extend(message["budget"])
        elif "numbers" not in message:
            self._failed(worker, message.get("failed") or message["refused"])
        elif message["seconds"] > worker.limit_s:  # it was late, but its reply came before the deadline was checked
            self._failed(worker, f"took {message['seconds']:.3g} s, longer than {worker.limit_s:g} s")
        else:
            task, worker.task = worker.task, None
            task.job.numbers[task.function] = message["numbers"]
            task.job.counts["overruns"] += message["overrun"]
            task.job.pending -= 1

    def _started(self, worker: WorkerProcess) -> None:
        worker.ready = True
        if worker.task is not None and not worker.give(worker.task, self._timeout_s):
            self._failed(worker, None)

    def _failed(self, worker: WorkerProcess, reason: str | None) -> None:
        """Replaces the worker. Its task goes to the fresh worker, or is given up after its second failure."""
        status = worker.end()
        reason = reason or f"the process ended with status {status}"
        place = self._workers.index(worker)
        if not worker.ready:
            self.close()
            raise RuntimeError(f"a fresh reward worker for {self._functions} cannot be started: {reason}")
        self._workers[place] = fresh = WorkerProcess(self._functions, self._sandbox)
        task = worker.task
        if task is None:
            return
        name = self._functions[task.function]
        if not task.retried:
            task.retried, fresh.task = True, task
            task.job.counts["retries"] += 1
            _log.info("reward %s failed on %s and is tried again: %s", name, task.job.rollout, reason)
            return
        task.job.pending -= 1
        task.job.counts["unscored"] = 1
        _log.warning("reward %s failed twice on %s, which stays unscored: %s", name, task.job.rollout, reason)


def _end_all(workers: list[WorkerProcess]) -> None:
    while workers:
        workers.pop().end()


def _check_arguments(functions: Sequence[str], weights: Sequence[float], workers: int, timeout_s: float) -> None:
    if not functions:
        raise ValueError("reward.functions is empty: name at least one, for example jaxrl_post.rewards.math:exact")
    if len(weights) not in (0, len(functions)):
        raise ValueError(
            f"reward.weights has {len(weights)} entries, reward.functions {len(functions)}: give none or one each"
        )
    if workers < 1 or not timeout_s > 0:
        raise ValueError(f"reward.workers={workers} must be at least 1 and reward.timeout_s={timeout_s} above 0")
