"""HistoPipe: prompts ranked by the lengths of their past answers, each rank group on replicas of its own (RhymeRL, arXiv
2508.18588, section 5).

Odd steps lay ascending ranks on the replicas in order, even steps descending ones, so that over two steps every replica
works about equally long; rank groups of longer answers get more replicas (allocation.py); and outliers that a rank group
did not expect go on among the longest.

What of it changes device time: only replicas that step on their own gain, and the turn of the ranks gains only where they
begin the next step before the others are through with this one, on weights that are a step old. Replicas of one program
(lock-step) run until the longest answer of all ends and have the rows of the busiest: there a rank group gains nothing, and
costs where rows do. Invariant: no placement changes a token, and all of this follows from history, lengths and costs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxrl_post.history import Past
from jaxrl_post.scheduler.allocation import allocate, curve, two_steps
from jaxrl_post.scheduler.forecast import Replica
from jaxrl_post.types import Capacity, Request, Rollout, RolloutId

LAST = 0.1  # of a rank group's answers: when so few are left they may be outliers


@dataclass
class Rank:
    """Groups of like length: where they lie, the answers not finished, how many there were, the longest that was expected
    (inf: nothing was)."""

    home: list[int]
    size: int = 0
    longest: float = np.inf
    left: dict[RolloutId, Request] = field(default_factory=dict)


class RankGroups:
    """A Placement.

    Args:
      replica: one of them, with its cost: what curves are computed with.
      past: of a prompt's id, what is known, newest first (history.History.of).
      ranks: rank groups; fewer where there are fewer replicas or groups.
      objective: of the seconds of each replica: what the allocation makes small (allocation.two_steps or barrier).
      migrate: whether outliers move.
    """

    def __init__(self, replica: Replica, *, past: Callable[[str], Sequence[Past]], ranks: int = 4,
                 objective: Callable[[np.ndarray], float] = two_steps, migrate: bool = True):
        if ranks < 1:
            raise ValueError(f"balance: ranks={ranks} must be at least 1")
        self._replica, self._past, self._most, self._objective = replica, past, ranks, objective
        self._migrate = migrate
        self._growth = 1.0  # of the answers' lengths from one epoch to the next
        self._expected = self._found = 0.0  # tokens, of the answers finished since the last round that had a past
        self._round = -1
        self._placed: list[tuple[int, Sequence[Request]]] = []  # round, group
        self._waiting: list[Request] = []
        self._rank_of: dict[RolloutId, Rank] = {}
        self._last: Rank | None = None  # the longest, of the newest wave
        self._load: Counter[int] = Counter()
        self._here: dict[RolloutId, int] = {}
        self._mean: dict[RolloutId, float] = {}
        self._moved: set[RolloutId] = set()

    def place(self, groups: Sequence[Sequence[Request]], round: int) -> None:
        if round != self._round and self._expected:
            self._growth = max(1.0, self._found / self._expected)
            self._expected = self._found = 0.0
        self._round = round
        self._placed += [(round, group) for group in groups if group]

    def release(self, capacity: Capacity) -> list[Request]:
        """Everything; the longest expected first."""
        if self._placed:
            self._lay(len(capacity.slots))
        out, self._waiting = self._waiting, []
        return out

    def _lay(self, replicas: int) -> None:
        groups = [group for _, group in self._placed]
        lengths = [self._lengths(group) for group in groups]
        known = [float(own.mean()) for own in lengths if own is not None]
        means = [float(np.median(known)) if own is None and known else 0.0 if own is None else float(own.mean())
                 for own in lengths]
        order = sorted(range(len(groups)), key=lambda i: (means[i], i))
        count = min(self._most, replicas, len(groups)) if known else 1
        parts = [part.tolist() for part in np.array_split(np.array(order), count)]
        homes = self._homes([[lengths[i] for i in part] for part in parts], replicas)
        for part, home in zip(parts, homes, strict=True):
            self._fill(Rank(home), [(groups[i], means[i], lengths[i]) for i in part])
        self._waiting.sort(key=lambda request: -self._mean[request.rollout_id])
        self._placed = []

    def _lengths(self, group: Sequence[Request]) -> np.ndarray | None:
        past = self._past(group[0].prompt.id)
        return past[0].lengths if past else None

    def _homes(self, lengths: list[list[np.ndarray | None]], replicas: int) -> list[list[int]]:
        """Replicas of each rank group: side by side, from the left in odd steps, from the right in even ones."""
        if len(lengths) == 1:
            return [list(range(replicas))]
        most = replicas - len(lengths) + 1
        work = [[(0, int(n)) for own in rank if own is not None for n in own] for rank in lengths]
        sizes = allocate(np.array([curve(self._replica, mine, most) for mine in work]), replicas, self._objective)
        ends = np.cumsum(sizes)
        homes = [list(range(end - size, end)) for size, end in zip(sizes, ends.tolist())]
        return homes if self._round % 2 == 0 else [[replicas - 1 - at for at in home] for home in homes]

    def _fill(self, rank: Rank, groups: list[tuple[Sequence[Request], float, np.ndarray | None]]) -> None:
        """Deals a rank group's prompts to its replicas, the longest first, each to the least expected load."""
        tokens = {at: 0.0 for at in rank.home}
        for group, mean, lengths in reversed(groups):
            at = min(rank.home, key=lambda home: (tokens[home], self._load[home], home))
            tokens[at] += max(mean, 1.0) * len(group)
            for request in group:
                self._enter(dataclasses.replace(request, replica=at), rank)
                self._mean[request.rollout_id] = mean
        known = [float(lengths.max()) for _, _, lengths in groups if lengths is not None]
        rank.size, rank.longest = len(rank.left), max(known, default=np.inf)
        self._last = rank

    def _enter(self, request: Request, rank: Rank) -> None:
        rank.left[request.rollout_id] = request
        self._rank_of[request.rollout_id] = rank
        self._here[request.rollout_id] = request.replica
        self._load[request.replica] += 1
        self._waiting.append(request)

    def learn(self, rollout: Rollout) -> tuple[RolloutId, ...]:
        """Where a rank group is all but through and its answers are longer than it ever expected, the others move."""
        rank = self._rank_of.get(rollout.id)
        if rank is None:
            return ()
        if np.isfinite(rank.longest):
            self._expected += self._mean[rollout.id]
            self._found += len(rollout)
        self._forget(rollout.id)
        outliers = len(rank.left) <= LAST * rank.size and len(rollout) > self._growth * rank.longest
        if not self._migrate or rank is self._last or not outliers:
            return ()
        chosen = tuple(id for id in rank.left if id not in self._moved)
        self._moved.update(chosen)
        return chosen

    def moved(self, rollouts: Sequence[Rollout]) -> None:
        """They go on among the longest, where the fewest are."""
        for rollout in rollouts:
            request = self._rank_of[rollout.id].left[rollout.id]
            mean = self._mean[rollout.id]
            self._forget(rollout.id)
            at = min(self._last.home, key=lambda home: (self._load[home], home))
            self._enter(dataclasses.replace(request, replica=at, prefix=rollout, prefix_mode="recompute"), self._last)
            self._mean[rollout.id] = mean
            self._moved.add(rollout.id)

    def withdraw(self, ids: Iterable[RolloutId]) -> None:
        gone = set(ids)
        for id in gone & self._rank_of.keys():
            self._forget(id)
        self._waiting = [request for request in self._waiting if request.rollout_id not in gone]

    def _forget(self, id: RolloutId) -> None:
        del self._rank_of.pop(id).left[id]
        del self._mean[id]
        self._load[self._here.pop(id)] -= 1
        self._moved.discard(id)

    def state_dict(self) -> dict:
        """Between two rounds nothing is on its way."""
        assert not self._rank_of and not self._placed, f"{len(self._rank_of)} answers are on their way"
        return {"growth": self._growth, "expected": self._expected, "found": self._found, "round": self._round}

    def load_state_dict(self, state: Mapping) -> None:
        self._growth, self._expected, self._found = state["growth"], state["expected"], state["found"]
        self._round = state["round"]
