"""What must hold of every scheduler whatever happens: a witness around it, restarts at any point, a placement that wanders."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter

import numpy as np

from jaxrl_post.ring.types import Finish, Part, RolloutId, Stop
from jaxrl_post.runs.checkpoint import host_state

_SHELF = []  # of Wandering


class Restarting:
    """A protocols.Scheduler that, before one call in `every` on average, is written as a checkpoint writes it and read by a
    new one; 0: never."""

    def __init__(self, make, seed, every):
        self._make, self._scheduler = make, make()
        self._noise, self._every = np.random.default_rng(seed), every
        self.restarts = 0

    def __getattr__(self, name):
        if self._every and self._noise.random() < 1 / self._every:
            state = written_and_read(self._scheduler.state_dict())
            self._scheduler = self._make()
            self._scheduler.load_state_dict(state)
            self.restarts += 1
        return getattr(self._scheduler, name)


def written_and_read(state):
    """As by checkpoint.write_state and read_state, without the disk."""
    arrays = {}
    text = json.dumps(host_state._plain(state, arrays, "state"), sort_keys=True)
    return json.loads(text, object_hook=lambda d: arrays[d[host_state._ARRAY]] if host_state._ARRAY in d else d)


class Wandering:
    """A Placement that releases when and where it likes, a group in one replica, and parks running rollouts to move them. Its
    whims follow a counter, which is part of its state."""

    def __init__(self, replicas, seed):
        self._replicas, self._seed, self._count = replicas, seed, 0
        self._waiting, self._running = [], {}

    def _whim(self, below):
        self._count += 1
        return int(np.random.default_rng((self._seed, self._count)).integers(below))

    def place(self, groups, round):
        for group in groups:
            assert len({request.prompt.id for request in group}) == 1
            replica = self._whim(self._replicas)
            self._waiting += [dataclasses.replace(request, replica=replica) for request in group]

    def release(self, capacity):
        count = self._whim(len(self._waiting) + 1) if self._waiting and self._running else len(self._waiting)
        out, self._waiting = self._waiting[:count], self._waiting[count:]
        self._running |= {request.rollout_id: request for request in out}
        return out

    def learn(self, rollout):
        self._running.pop(rollout.id, None)
        mine = [id for id in self._running if id.prompt_id == rollout.id.prompt_id]
        return (mine[self._whim(len(mine))],) if mine and self._whim(3) == 0 else ()

    def moved(self, rollouts):
        for rollout in rollouts:
            request = self._running.pop(rollout.id)
            prefix = rollout if len(rollout) else request.prefix
            self._waiting.append(
                dataclasses.replace(
                    request, prefix=prefix, prefix_mode="recompute" if len(rollout) else request.prefix_mode
                )
            )

    def withdraw(self, ids):
        ids = set(ids)
        self._waiting = [request for request in self._waiting if request.rollout_id not in ids]
        self._running = {id: request for id, request in self._running.items() if id not in ids}

    def state_dict(self):
        """Of the requests only a number: how to write them is not what is tested here."""
        _SHELF.append((list(self._waiting), dict(self._running)))
        return {"count": self._count, "shelf": len(_SHELF) - 1}

    def load_state_dict(self, state):
        self._count = state["count"]
        waiting, running = _SHELF[state["shelf"]]
        self._waiting, self._running = list(waiting), dict(running)


class Witness:
    """A protocols.Scheduler around another that objects (AssertionError) to whatever breaks a promise, and keeps a log of every
    decision. `group_size` rollouts make a group."""

    def __init__(self, scheduler, *, group_size):
        self._scheduler, self._group_size = scheduler, group_size
        self.lines, self.running, self.rounds = [], set(), 0
        self.admitted, self.trained = {}, {}  # group -> round
        self._clock, self._since = 0, []
        self.counts = Counter()

    def admit(self, capacity, clock):
        self._clock = clock
        requests = self._scheduler.admit(capacity, clock)
        for request in requests:
            id = request.rollout_id
            key = id.epoch, id.prompt_id
            assert id not in self.running, f"{id} is on its way twice"
            assert key not in self.trained, f"{key} was trained on already"
            self.running.add(id)
            self.admitted.setdefault(key, self.rounds)
        self._log("admit", [[list(r.rollout_id), r.replica, r.prefix is not None and len(r.prefix)] for r in requests])
        return requests

    def complete(self, rollout):
        self.running.discard(rollout.id)
        stop = self._scheduler.complete(rollout)
        assert isinstance(stop, Stop)
        self._log("complete", [list(rollout.id), rollout.finish_clock, [list(id) for id in stop.park]])
        return stop

    def parked(self, rollouts):
        for rollout in rollouts:
            assert rollout.finish is Finish.PARKED
            self.running.discard(rollout.id)
        self._scheduler.parked(rollouts)
        self._log("parked", [[list(r.id), len(r)] for r in rollouts])

    def due(self):
        groups = self._scheduler.due()
        self._log("due", [_key(group) for group in groups])
        return groups

    def scored(self, group):
        self._scheduler.scored(group)

    def take(self):
        parts = self._scheduler.take()
        for part in parts:
            for group in part.fresh:
                key, samples = tuple(_key(group)), [rollout.id.sample for rollout in group.rollouts]
                assert key not in self.trained, f"{key} is trained on twice"
                assert len(samples) == self._group_size and samples == sorted(set(samples)), samples
                assert all(
                    r.finish is not Finish.PARKED and tuple(_key(group)) == (r.id.epoch, r.id.prompt_id)
                    for r in group.rollouts
                )
                assert len({r.id.attempt for r in group.rollouts}) == 1
                self.trained[key] = self.rounds
            self._since.append(part)
            if part.publish:
                self._round_over(Part.joined(self._since))
        self._log("take", [[_key(group) for group in part.groups] for part in parts])
        return parts

    def layout(self):
        return self._scheduler.layout()

    def _round_over(self, whole):
        assert not self.running, f"weights change while {self.running} are on their way"
        assert {tuple(_key(g)) for g in whole.fresh} == {tuple(_key(g)) for g in whole.groups}
        self.rounds += 1
        self._since = []

    def metrics(self):
        counts = self._scheduler.metrics()
        self.counts.update({name: value for name, value in counts.items() if "/num_" in name and "queued" not in name})
        self.counts["sched/num_groups_queued"] = counts.get("sched/num_groups_queued", 0.0)
        return counts

    def _log(self, event, told):
        self.lines.append(json.dumps([event, self._clock, told]))

    def settle(self, *, size, steps, filtered):
        """At the end of the run: every group that was admitted ended once, and the counts say how."""
        self.metrics()
        told = {name.removeprefix("sched/num_"): int(value) for name, value in self.counts.items()}
        assert len(self.trained) == told["groups_trained"] == size * steps and told["rounds"] == steps >= self.rounds
        ends = told["groups_trained"] + told["groups_filtered"] + told["groups_refused"] + told["groups_queued"]
        assert told["groups_admitted"] == ends, told
        if not filtered:
            assert told["groups_admitted"] == size * steps and not told["groups_queued"]
        return told

    def longest_wait(self):
        """Rounds between a group's first admission and its training, at most."""
        return max(self.trained[key] - self.admitted[key] for key in self.trained)


def bound(size, over, together=1):
    """Rounds that a group can wait at most, without filters: until the queue fills a long round, and for those before it."""
    surplus, full = math.ceil(over * size - 1e-9) - size, size * together
    return math.ceil(full / surplus) + (full + surplus - 1) // full + 1 if surplus else 0


def _key(group):
    id: RolloutId = group.rollouts[0].id
    return [id.epoch, group.prompt.id]
