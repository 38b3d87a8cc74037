"""A ring in plain numpy: engine, rewards, learner and prompts that satisfy the protocols, for tests of what is between
them."""

from __future__ import annotations

import dataclasses

import numpy as np
import plain_rollouts

from jaxrl_post.config import SchedulerConfig
from jaxrl_post.ring.events import Ring
from jaxrl_post.ring.types import Capacity, Prompt, Sampling
from jaxrl_post.scheduler.placement.placement import LeastLoaded

SAMPLING = Sampling(temperature=1.0, eos_ids=(0,))
OPTIONS = {field.name for field in dataclasses.fields(SchedulerConfig)} - {"placement"}


def scheduler_of(kind, order, *, replicas=1, **changed):
    """A scheduler of a small run. `changed`: options of the scheduler, and arguments of Ledger."""
    given = dict(run_seed=7, steps=3, sampling=SAMPLING, max_tokens=24, placement=None) | changed
    given["placement"] = given["placement"] or LeastLoaded(replicas)
    options = {name: given.pop(name) for name in OPTIONS & given.keys()}
    return kind(order, SchedulerConfig(**options), **given)


class ToyPrompts:
    """`count` prompts, the order within an epoch drawn from (seed, epoch)."""

    def __init__(self, count: int, seed: int = 0):
        self._count, self._seed = count, seed
        self.prompts = [Prompt(id=f"p{i}", tokens=[1, 2, i + 3], answer=str(i), source="toy") for i in range(count)]

    def at(self, position: int):
        epoch, index = divmod(position, self._count)
        order = np.random.default_rng((self._seed, epoch)).permutation(self._count)
        return epoch, self.prompts[order[index]]


class ToyEngine:
    """Tokens are a function of (seed, version); which waiting rollouts advance in a step is drawn from `order`."""

    def __init__(self, *, slots: int = 8, order: int = 0, longest: int = 6, stuck: bool = False):
        self._slots, self._longest, self._stuck = slots, longest, stuck
        self._rng = np.random.default_rng(order)
        self._live = []  # [request, tokens still to come]
        self.clock = self.version = 0
        self.calls = []

    @property
    def capacity(self):
        return Capacity(slots=(max(self._slots - len(self._live), 0),), pages=(99,))

    @property
    def pending(self):
        return len(self._chosen())

    def _chosen(self):
        return [live for live in self._live if live[0].purpose == "eval"] or self._live

    def submit(self, requests):
        self.calls.append(("submit", len(requests)))
        self._live += [[r, 1 + int(r.seed[0]) % min(self._longest, r.max_tokens)] for r in requests]

    def park(self, ids):
        assert not list(ids)
        return []

    def step(self):
        self.calls.append(("step",))
        chosen = self._chosen()
        if not chosen or self._stuck:
            return []
        self.clock += chosen[0][0].purpose == "train"
        picked = self._rng.permutation(len(chosen))[: self._slots]
        done = []
        for live in (chosen[i] for i in picked):
            live[1] -= 1
            if live[1] == 0:
                done.append(live)
        self._live = [live for live in self._live if live not in done]
        return sorted((self._rollout(live[0]) for live in done), key=lambda r: (r.finish_clock, r.id))

    def _rollout(self, request):
        n = 1 + int(request.seed[0]) % min(self._longest, request.max_tokens)
        tokens = np.random.default_rng((*request.seed.tolist(), self.version)).integers(1, 50, n)
        if request.sampling.temperature == 0:
            tokens = np.arange(1, n + 1)
        zeros = np.zeros(n)
        return plain_rollouts.rollout(
            request.rollout_id, request.prompt, tokens, clock=(0, self.clock), versions=zeros + self.version
        )

    def swap(self, params, version, finite=None):
        assert version > self.version
        self.calls.append(("swap", version))
        self.version = version

    def metrics(self):
        return {}


class ToyRewards:
    """accuracy(rollout) -> float, or None for a grader that failed."""

    def __init__(self, accuracy):
        self._accuracy, self.started, self.joined = accuracy, [], []

    def start(self, rollout):
        self.started.append(rollout.id)

    def join(self, group):
        assert all(rollout.id in self.started for rollout in group.rollouts)
        self.joined.append(group.rollouts[0].id[2:4])
        scores = [self._accuracy(rollout) for rollout in group.rollouts]
        acc = np.array([0.0 if s is None else s for s in scores])
        return dataclasses.replace(
            group, rewards=acc - 0.25, scored=[s is not None for s in scores], components={"acc": acc}
        )

    def metrics(self):
        return {}


class ToyLearner:
    """Its weights are a running sum over (reward, token): order and membership of every batch show in it."""

    def __init__(self):
        self.step, self.params, self.calls, self.batches, self._pending = 0, 0.0, [], [], []

    def prepare(self, groups):
        self.calls.append(("prepare", len(groups)))

    def accumulate(self, groups):
        self.calls.append(("accumulate", len(groups)))
        self._pending += groups

    def commit(self):
        self.calls.append(("commit",))
        self.batches.append([(*g.rollouts[0].id[2:4], [r.tokens.tolist() for r in g.rollouts]) for g in self._pending])
        for group in self._pending:
            for rollout, reward in zip(group.rollouts, group.rewards):
                self.params = 0.9 * self.params + float(reward) * float(rollout.tokens.sum())
        self._pending = []
        self.step += 1
        return {"actor/sum": self.params}


class ToyObserver:
    def __init__(self):
        self.seen = []

    def commit(self, metrics, part):
        self.seen.append(("commit", dict(metrics), len(part.groups)))

    def published(self, version):
        self.seen.append(("published", version))


def observed(observer):
    """A ring with one observer."""
    ring = Ring()
    ring.on("committed", observer.commit)
    ring.on("published", observer.published)
    return ring


def publish(learner, engine):
    engine.swap(learner.params, learner.step)
    return learner.step
