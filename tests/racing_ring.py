"""An engine in plain numpy that parks, resumes and swaps, for tests of schedulers that race; and a turn of the ring."""

from __future__ import annotations

import numpy as np
import plain_rollouts
from toy_ring import ToyLearner, ToyObserver, ToyPrompts, ToyRewards, observed, publish, scheduler_of

from jaxrl_post.ring.loop import run
from jaxrl_post.ring.types import Capacity, Finish
from jaxrl_post.scheduler.registry import SCHEDULERS


def text(seed, version, drift, longest):
    """The whole answer that weights `version` give: a token changes with probability `drift` per version."""
    rng = np.random.default_rng([int(word) for word in seed])
    draws = rng.integers(1, 50, longest)
    ends, moved = (
        rng.random(longest),
        np.random.default_rng([*(int(word) for word in seed), 1]).random((version, longest)),
    )
    for row in moved:
        draws = np.where(row < drift, (draws * 7 + 3) % 49 + 1, draws)
    # A few rollouts are long: the end is drawn per token with a rate that the seed decides.
    rate = 0.03 if seed[0] % 5 == 0 else 0.4
    stops = np.flatnonzero((ends < rate) ^ (draws == 7))
    length = int(stops[0]) + 1 if stops.size else longest
    return draws[:length]


class RacingEngine:
    """protocols.Engine: each of the running ones (the first `slots` of the waiting line) advances a token per engine step,
    or, with `order`, in each step with a probability of 1/2. `steps` engine steps per dispatch."""

    def __init__(self, *, slots=1 << 30, steps=3, order=None, drift=0.0, longest=24, replicas=1):
        self._slots, self._steps, self._drift, self._longest = slots, steps, drift, longest
        self._order, self._replicas = order, replicas
        self.live = []  # [request, tokens, versions], in order of submission
        self._at_once = []  # finished before they were submitted
        self.clock = self.version = 0
        self.generated = self.parked_tokens = 0
        self.submitted = []

    @property
    def capacity(self):
        return Capacity(
            slots=(max(min(self._slots, 1 << 20) - len(self.live), 0),) * self._replicas, pages=(9,) * self._replicas
        )

    @property
    def pending(self):
        return len(self.live)

    def submit(self, requests):
        here = {live[0].rollout_id for live in self.live}
        for request in requests:
            assert request.rollout_id not in here and 0 <= request.replica < self._replicas
            assert np.array_equal(request.seed, request.rollout_id.seed())
            here.add(request.rollout_id)
            self.submitted.append(request)
            tokens, versions = [], []
            if request.prefix is not None:
                assert request.prefix.id == request.rollout_id and len(request.prefix) > 0
                if request.prefix_mode == "recompute":
                    tokens, versions = request.prefix.tokens.tolist(), request.prefix.versions.tolist()
                elif request.prefix_mode == "verify":
                    now = text(request.seed, self.version, self._drift, self._longest)
                    before = request.prefix.tokens[: now.size]
                    same = int(np.argmin(np.append(before == now[: before.size], False)))
                    tokens, versions = now[:same].tolist(), [self.version] * same
            self.live.append([request, tokens, versions])

    def park(self, ids):
        ids, out = set(ids), []
        for live in [live for live in self.live if live[0].rollout_id in ids]:
            self.live.remove(live)
            self.parked_tokens += len(live[1])
            out.append(self._rollout(live, Finish.PARKED))
        return sorted(out, key=lambda rollout: rollout.id)

    def step(self):
        done = []
        for _ in range(self._steps):
            if not self.live:
                break
            self.clock += 1
            running = self.live[: self._slots]
            if self._order is not None:
                rng = np.random.default_rng((self._order, self.clock))
                running = [live for live in running if rng.random() < 0.5]
            ended = [live for live in running if self._advance(live)]
            self.live = [live for live in self.live if all(live is not other for other in ended)]
            done += [self._rollout(live, Finish.EOS) for live in ended]
        return sorted(done, key=lambda rollout: (rollout.finish_clock, rollout.id))

    def _advance(self, live):
        """Whether it ends."""
        request, tokens, versions = live
        now = text(request.seed, self.version, self._drift, self._longest)
        if len(tokens) < now.size and versions[:1] in ([], [self.version]):
            tokens.append(int(now[len(tokens)]))
            versions.append(self.version)
            self.generated += 1
            return len(tokens) == now.size
        if len(tokens) >= self._longest or (tokens and len(tokens) >= now.size):
            return True  # verified to its end, or recomputed beyond what the new weights would give
        tokens.append(int(now[len(tokens)]))
        versions.append(self.version)
        self.generated += 1
        return len(tokens) >= now.size

    def _rollout(self, live, finish):
        request, tokens, versions = live
        return plain_rollouts.rollout(
            request.rollout_id, request.prompt, tokens, finish=finish, clock=(0, self.clock), versions=versions
        )

    def swap(self, params, version, finite=None):
        assert version > self.version and not self.live, "a round ends with nothing on its way"
        self.version = version

    def metrics(self):
        return {}


def accuracy(rollout):
    return float(np.random.default_rng([int(rollout.tokens.sum()), len(rollout)]).random() < 0.5)


MORE = {"tail_batching": {"over": 1.5}, "rollpacker": {"over": 1.5, "over_samples": 1.4}}


def policy(name, order=None, **changed):
    """A scheduler by name, its settings those of a small run."""
    given = dict(steps=6, prompts=4, group_size=3, max_waves=99, filter_metric="acc") | MORE.get(name, {}) | changed
    return scheduler_of(SCHEDULERS[name], order or ToyPrompts(23), **given)


class KeepingLearner(ToyLearner):
    """Keeps the groups of every part."""

    def __init__(self):
        super().__init__()
        self.parts = []

    def accumulate(self, groups):
        super().accumulate(groups)
        self.parts.append(tuple(groups))


def turn(scheduler, engine, steps, grade=accuracy):
    """Turns the ring; the learner that kept everything."""
    learner = KeepingLearner()
    run(observed(ToyObserver()), engine, scheduler, ToyRewards(grade), learner, publish, steps)
    return learner


def names(groups):
    return [(group.rollouts[0].id.epoch, group.prompt.id) for group in groups]


def trained(learner):
    """Every (id, tokens) that was trained on, sorted."""
    return sorted((tuple(r.id), tuple(r.tokens.tolist())) for part in learner.parts for g in part for r in g.rollouts)


def whole(requests):
    """Finished rollouts of these requests, in their order."""
    engine = RacingEngine(steps=200)
    engine.submit(requests)
    found = {rollout.id: rollout for rollout in engine.step()}
    return [found[request.rollout_id] for request in requests]
