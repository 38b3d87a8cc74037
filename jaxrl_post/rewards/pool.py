"""Reward functions in killable processes. start(rollout) queues a rollout. join(group) waits and returns the group's
scores.

Invariants:
- A group's scores depend on its texts alone, never on the number of workers or on which one finished first.
- A function of verl's signature gets one rollout. One of TRL's gets a whole group, once its last rollout has started.
- A reward function fails if it raises, dies, returns no finite number or runs over its limit. It is tried once more in
  a fresh process. Then the rollout, or the group, is unscored, never scored 0. Only `Overrun`, raised by the function, is a verdict.
- Every wait is bounded: START_LIMIT_S for a starting worker, and for a working one `timeout_s` for each rollout of its
  task. Then it is killed.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_post.data.continuations import Decode
from jaxrl_post.rewards import Overrun as Overrun  # exported here too
from jaxrl_post.rewards import jobs, signatures
from jaxrl_post.rewards.jobs import COUNTERS, Call, GraderProcess, Score, ScoringJob
from jaxrl_post.rewards.limits import Adaptive, Fixed
from jaxrl_post.rewards.modelled import Beside
from jaxrl_post.rewards.printed import Failures, Printed
from jaxrl_post.rewards.processes import Processes
from jaxrl_post.rewards.sandbox import AUTO
from jaxrl_post.ring.types import Group, Prompt, Rollout, RolloutId

HEAD = 4096  # bytes of the first part of a message, which begins with the length of the body
_SIZE = 8  # bytes of the length


class Sharing:
    """Sends the records of scores that process 0 finds to every process of a job.

    All processes ask for the same scores in the same order and know which they have received. So they agree on when a
    message must be sent: when a missing record is needed. It carries all records that are ready. If graders keep up, one
    message carries many groups.

    Args:
      share: maps a uint8 vector, of the same length in all processes, to process 0's.
    """

    def __init__(self, share: Callable[[np.ndarray], np.ndarray]):
        self._share = share
        self._come: dict[RolloutId, Mapping] = {}

    def forget(self, rollout: RolloutId) -> None:
        """Drops the record of a rollout that is scored again."""
        self._come.pop(rollout, None)

    def take(
        self, rollouts: Sequence[RolloutId], find: Callable[[list[RolloutId]], Sequence[Mapping]] | None
    ) -> list[Mapping]:
        """Returns the records and drops them.

        `find`: process 0's function for missing records, None in the other processes. It may wait, and may return
        further records.
        """
        missing = [rollout for rollout in rollouts if rollout not in self._come]
        if missing:
            for record in self._sent(find(missing) if find else None):
                self._come[RolloutId(*(record[name] for name in RolloutId._fields))] = record
        return [self._come.pop(rollout) for rollout in rollouts]

    def _sent(self, records: Sequence[Mapping] | None) -> list[dict]:
        body = b"" if records is None else json.dumps(list(records)).encode()
        body = len(body).to_bytes(_SIZE, "big") + body
        head = self._share(np.frombuffer(body[:HEAD].ljust(HEAD, b"\0"), np.uint8)).tobytes()
        size = _SIZE + int.from_bytes(head[:_SIZE], "big")
        rest = np.frombuffer(body[HEAD:] or bytes(max(0, size - HEAD)), np.uint8)
        whole = head + (self._share(rest).tobytes() if rest.size else b"")
        return json.loads(whole[_SIZE:size])


@dataclass(frozen=True, kw_only=True)
class Graders:
    """Reward functions, and the processes that call them.

    `functions`: import paths `pkg.mod:fn` or `file.py:fn`, or names of `code`. `code`: functions of a program as text, by name
    (rewards/carried.py). `weights`: one per function, or empty for all 1; a reward is the weighted sum of the scores.
    `workers`: child processes. Each makes one call of one function at a time. `timeout_s`: wall-clock limit of one function
    for one rollout, in seconds; a call with a group may take as many times that as the group has rollouts. `limits`: CPU
    seconds that a judged program may take, passed to functions. A function may return the CPU seconds it measured as the
    number "cpu_s". That number is journaled beside the limit and is not a component. `sandbox`: level of confinement of
    judged programs (rewards/sandbox).
    """

    functions: Sequence[str]
    weights: Sequence[float] = ()
    code: Mapping[str, str] = field(default_factory=dict)
    workers: int
    timeout_s: float
    limits: Fixed | Adaptive = Fixed(5.0)
    sandbox: str = AUTO

    def check(self, alone: bool) -> None:
        """Raises ValueError where no function is named and they are `alone`, or where weights, workers or time do not fit."""
        if not self.functions and alone:
            raise ValueError("reward.functions is empty: name at least one, for example jaxrl_post.rewards.math:exact")
        count = len(self.functions) if alone else max(1, len(self.functions))
        if len(self.weights) not in (0, count):
            raise ValueError(
                f"reward.weights has {len(self.weights)} entries, reward.functions {count}: give none or one each"
            )
        if self.workers < 1 or not self.timeout_s > 0:
            raise ValueError(
                f"reward.workers={self.workers} must be at least 1 and reward.timeout_s={self.timeout_s} above 0"
            )


class Pool(AbstractContextManager):
    """protocols.Rewards over reward functions named by import path.

    Functions have verl's signature or TRL's (rewards/signatures.py).

    Components of a group are NaN where a rollout has none. They are:
    - "acc", from the first function that returns one, else the score of the first function that applies;
    - the named numbers of each function;
    - with several functions, also their scores. Names then begin with the function's name and a slash.

    Args:
      graders: the reward functions, and the processes that call them.
      decode: maps token ids to text, behind those of a prompt where it has them (data/continuations.py).
      shuffle_seed: of a control from which nothing can be learned. It permutes a training group's scores over its rollouts.
        The order depends on (shuffle_seed, prompt id, epoch) alone. Components, including "acc", and the journal are not
        permuted. None: scores stay.
      share: the argument of Sharing, in a job of several processes. Every process calls it.
      compute: False in all processes but 0. They check the paths, score nothing and receive records through `share`.
      journal: an object with write(record: dict), called for every score before `join` returns it.
      journaled: journal.Journaled, or an object with its `find` and `take`. A rollout with a record is not graded
        again. Its record is joined and journaled unchanged, with its failures and their counts.
      group_size: maps the id of a rollout to the size of its group, so that a group is graded as soon as its last rollout
        has started. It may be wrong; without it, or where it returns 0, a group is graded when it is joined.
      printed: takes what reward functions print.
      failures: what shows them; of its own without one.
      beside: adds the score of a reward model, or a verdict, to every record, in every process. Then there may be no functions.

    `beside` is that argument. `confined` holds the level and the layers of that sandbox. It is empty if no function judges programs.

    Raises:
      ValueError: a path is wrong, a function is missing or has neither signature, or weights do not fit.
    """

    def __init__(
        self,
        graders: Graders,
        decode: Decode,
        *,
        shuffle_seed: int | None = None,
        share: Callable[[np.ndarray], np.ndarray] | None = None,
        compute: bool = True,
        journal: object | None = None,
        journaled: object | None = None,
        group_size: Callable[[RolloutId], int] | None = None,
        printed: Printed | None = None,
        beside: Beside | None = None,
        failures: Failures | None = None,
    ):
        graders.check(alone=beside is None)
        if not compute and share is None:
            raise ValueError("a reward pool that computes nothing needs `share`")
        self._functions, self._names = tuple(graders.functions), signatures.names(graders.functions)
        self._weights = tuple(graders.weights) or (1.0,) * len(self._functions)
        self._timeout_s, self._limits, self._failures = graders.timeout_s, graders.limits, failures or Failures()
        self._decode, self._journal, self._journaled = decode, journal, journaled
        self._sharing = Sharing(share) if share is not None else None
        self._shuffle_seed, self._compute = shuffle_seed, compute
        self._group_size, self._printed, self.beside = group_size, printed, beside
        self._judging = {"sandbox": graders.sandbox, "workers_per_core": graders.workers / (os.cpu_count() or 1)}
        self._jobs: dict[RolloutId, ScoringJob] = {}
        self._begun: dict[RolloutId, dict[int, ScoringJob]] = {}  # by the id of sample 0: the group's rollouts so far
        self._counts, self._waited_s = dict.fromkeys(COUNTERS, 0), 0.0
        first = {"functions": list(self._functions), "sandbox": graders.sandbox, "code": dict(graders.code)}
        many, what = graders.workers if compute else 1, f"reward functions {self._functions}"
        self._workers = Processes(lambda: GraderProcess(first, printed), many, what, self._failures)
        found = self._workers.loaded()
        self._signatures, self.confined = found["ready"], found["sandbox"]
        self._judging["sandbox"] = self.confined.get("level", graders.sandbox)
        if not compute:
            self.close()

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        """Kills the workers and reaps them. Scores that are not joined yet are lost."""
        self._workers.close()
        if self._printed is not None:
            self._printed.settle()

    @property
    def signatures(self) -> list[Any]:
        """Returns, for each function, its signature, the columns it needs, its ground truths, what may stand for them, and
        the module that reads them."""
        return self._signatures

    @property
    def failures(self) -> tuple[str, ...]:
        """Returns a sentence for each kind of failure so far."""
        return tuple(self._failures.told)

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raises ValueError when a prompt lacks a ground truth, or a column, that a function needs, has one that scores
        nothing, or has a column that its call would overwrite."""
        for name, (signature, needs, truths, instead, reader) in zip(self._functions, self._signatures, strict=True):
            for prompt in prompts:
                signatures.check_names(prompt, signature)
                signatures.check(prompt, name, needs, truths, instead, reader)

    def start(self, rollout: Rollout) -> None:
        """Queues a rollout and returns at once. A resumed rollout that is started again is scored again."""
        if self._sharing is not None:
            self._sharing.forget(rollout.id)
        tokens = jobs.digest_of_tokens(rollout)
        known = self._journaled.find(rollout.id, tokens) if self._journaled is not None else None
        if self.beside is not None and (self._sharing is not None or not known):  # only process 0 knows what is known
            self.beside.start(rollout)
        if not self._compute:
            return
        limit_s = self._limits.of(rollout.id.prompt_id)
        text = "" if known else self._decode(rollout.tokens, before=rollout.prompt.tokens)
        job = ScoringJob(rollout=rollout, digest=tokens, text=text, limit_s=limit_s, journaled=known)
        self._jobs[rollout.id] = job
        if not known:
            self._ask_alone(job)
        if self._of("trl"):
            self._gather(job)
        self._workers.turn()

    def _of(self, signature: str) -> list[int]:
        """Returns the functions of a signature, by index."""
        return [index for index, (own, *_) in enumerate(self._signatures) if own == signature]

    def _about(self, job: ScoringJob) -> dict:
        return signatures.about(job.rollout, job.limit_s, self._judging, self._decode)

    def _ask_alone(self, job: ScoringJob) -> None:
        """Queues a rollout for every function that gets it alone."""
        if functions := self._of("verl"):
            self._ask(job.alone, functions, signatures.verl(job.rollout, job.text, self._about(job)))

    def _ask(self, call: Call, functions: Sequence[int], arguments: object) -> None:
        limit_s = self._timeout_s * len(call.members)
        for index in functions:
            message = {"function": index, "arguments": arguments}
            task = Score(self._functions[index], call.about, message, limit_s, call.counts, call=call, index=index)
            self._workers.queue.append(task)
        call.waiting += len(functions)

    def _gather(self, job: ScoringJob) -> None:
        """Queues the group of a rollout if this is its last one."""
        first = job.rollout.id._replace(sample=0)
        group = self._begun.setdefault(first, {})
        group[job.rollout.id.sample] = job
        if self._group_size is not None and len(group) == self._group_size(job.rollout.id):
            self._ask_together([one for _, one in sorted(group.items())])

    def _ask_together(self, jobs: Sequence[ScoringJob]) -> None:
        """Queues a group for every function that gets groups, unless a call of just these rollouts was made.

        Journaled records of a group are used only if every rollout has one: else its scores are of another group.
        """
        functions, call = self._of("trl"), jobs[0].together
        if not functions or all(job.journaled for job in jobs) or (call is not None and call.is_of(jobs)):
            return
        for job in jobs:
            if job.journaled:
                job.journaled, job.text = None, self._decode(job.rollout.tokens, before=job.rollout.prompt.tokens)
                self._ask_alone(job)
        call = Call(tuple(jobs), f"the {len(jobs)} rollouts of prompt {jobs[0].rollout.id.prompt_id!r}")
        rollouts, texts, abouts = zip(*((job.rollout, job.text, self._about(job)) for job in jobs), strict=True)
        arguments = signatures.trl(rollouts, texts, abouts, self._decode)
        stale = {id(job.together) for job in jobs if job.together}
        self._workers.queue = deque(task for task in self._workers.queue if id(task.call) not in stale)
        for job in jobs:
            job.together = call
        self._ask(call, functions, arguments)

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
        if self.beside is not None:
            found = self.beside.added(group.rollouts, found)
        for record in found:
            for name in COUNTERS:
                self._counts[name] += record["counts"].get(name, 0)
            self._limits.scored(record)
            if self._journal is not None:
                self._journal.write(record)
        return jobs.scored_group(group, found, self._shuffle_seed)

    def metrics(self) -> dict[str, float]:
        """Returns counts since the last call, and the seconds that `join` waited.

        Counted are unscored rollouts, second attempts, overruns, exceptions of reward functions, workers whose output
        was no reply, and launchers of judged programs that had died.
        """
        out = {f"reward/{name}": float(count) for name, count in self._counts.items()}
        out |= {"reward/broken_workers": float(self._workers.broken), "timing_s/reward_wait": self._waited_s}
        out |= {"reward/sandbox_restarts": float(self._workers.restarts)} if self.confined else {}
        self._counts, self._waited_s = dict.fromkeys(COUNTERS, 0), 0.0
        self._workers.broken = self._workers.restarts = 0
        return out | (self.beside.metrics() if self.beside is not None else {})

    def _collect(self, ids: Sequence[RolloutId]) -> list[Mapping]:
        """Waits for the records of rollouts and returns them."""
        begun = time.monotonic()
        unknown = [id for id in ids if id not in self._jobs]
        if unknown:
            raise ValueError(f"group {unknown[0].prompt_id!r}: rollout {unknown[0]} is joined but was never started")
        if not self._workers:
            raise ValueError(f"group {ids[0].prompt_id!r} is joined after the reward pool was closed")
        jobs = [self._jobs[id] for id in ids]
        self._begun.pop(ids[0]._replace(sample=0), None)
        self._ask_together(jobs)
        while any(self._waits(job) for job in jobs):
            self._workers.wait()
        self._waited_s += time.monotonic() - begun
        return self._taken(jobs)

    def _waits(self, job: ScoringJob) -> bool:
        return job.journaled is None and any(call.waiting for call in job.calls)

    def _ready(self) -> list[Mapping]:
        """Returns the records of all other rollouts that are graded by now. A group that is graded as a whole may still
        change until it is joined."""
        if self._of("trl"):
            return []
        return self._taken([job for job in self._jobs.values() if not job.alone.waiting and job.journaled is None])

    def _taken(self, jobs: Sequence[ScoringJob]) -> list[Mapping]:
        for job in jobs:
            del self._jobs[job.rollout.id]
        return [self._record(job) for job in jobs]

    def _record(self, job: ScoringJob) -> Mapping:
        if job.journaled is not None:
            return self._journaled.take(job.rollout.id, job.digest)
        found = [numbers and dict(numbers) for numbers in job.found(len(self._functions))]
        scored = all(numbers is not None for numbers in found) and any(found)
        out = job.rollout.id._asdict() | {
            "digest": job.digest,
            "scored": scored,
            "reward": 0.0,
            "components": {},
            "counts": job.counted(),
        }
        used = [numbers.pop("cpu_s") for numbers in found if numbers and "cpu_s" in numbers]
        if used:
            out |= {"limit_s": job.limit_s, "cpu_s": max(used)}
        if scored:
            out["reward"] = sum(w * n["score"] for w, n in zip(self._weights, found, strict=True) if n)
            out["components"] = self._components(found)
        return out

    def _components(self, numbers: Sequence[dict[str, float]]) -> dict[str, float]:
        first = next(n["score"] for n in numbers if n)
        out = {"acc": next((n["acc"] for n in numbers if "acc" in n), first)}
        if len(numbers) == 1:
            return out | {k: v for k, v in numbers[0].items() if k not in ("score", "acc")}
        return out | {f"{name}/{k}": v for name, n in zip(self._names, numbers, strict=True) for k, v in n.items()}
