"""HistoPipe: prompts are ranked by the lengths of their past rollouts, and each rank group gets replicas of its own
(RhymeRL, arXiv 2508.18588, section 5).

- Odd steps assign ascending ranks to the replicas in order, even steps descending ranks. So over two steps all replicas
  work about equally long.
- Rank groups with longer rollouts get more replicas (`allocate`).
- Outliers, longer than their rank group expected, move to the rank group of the longest rollouts.

When this changes device time: only replicas that step independently gain. They gain only where they begin the next step
before the others finish this one, on weights that are one step old. Behind a barrier, alternating the order gains
nothing. With one program over all replicas (lock-step), a step lasts as long as that of the busiest replica. The rank
group of the longest rollouts is busiest to the end, so rank groups cost time there. On our fitted lengths outliers are
unpredictable. Ranks then gain only together with the moves (scripts/results/placements.json).

Invariant: no placement changes a token, and every decision follows from history, lengths and costs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxrl_post.ring.history import Past
from jaxrl_post.ring.types import Capacity, Request, Rollout, RolloutId
from jaxrl_post.scheduler.forecast import ReplicaCapacity, replay, share
from jaxrl_post.scheduler.placement.placement import went_on

RANKS = 4
LAST = 0.1  # share of a rank group's rollouts; when so few remain they may be outliers
TILTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # height of a line at the first replica, as a share of its height at the last
HALVINGS = 40  # steps of the bisection

# ---- 1. How many replicas each rank group gets


def curve(replica: ReplicaCapacity, work: Sequence[tuple[int, int]], most: int) -> np.ndarray:
    """Returns float64[most], seconds of 1, 2, .. replicas, non-increasing.

    Args:
      replica: slots, KV capacity and step cost.
      work: (prompt tokens, rollout tokens) of each rollout.
      most: the largest number of replicas.
    """
    return np.minimum.accumulate([replay(replica, share(work, count)).seconds for count in range(1, most + 1)])


def spread(curves: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Returns seconds of each replica when rank group m has `sizes[m]` replicas."""
    return np.repeat([seconds[size - 1] for seconds, size in zip(curves, sizes, strict=True)], sizes)


def barrier(seconds: np.ndarray) -> float:
    """Returns seconds of a step where the next step waits for all replicas."""
    return float(seconds.max())


def two_steps(seconds: np.ndarray) -> float:
    """Returns seconds of an ascending and a descending step together, where replicas do not wait for each other."""
    return float((seconds + seconds[::-1]).max())


def allocate(curves: np.ndarray, replicas: int, objective: Callable[[np.ndarray], float]) -> list[int]:
    """Returns the number of replicas of each rank group, at least 1 each. All replicas are used. If the objective is
    indifferent, sizes are as even as possible.

    Args:
      curves: float[M, W], seconds of rank group m on 1 .. W replicas, non-increasing along W.
      replicas: replicas to distribute.
      objective: maps the seconds of each replica to the value to minimise: `barrier` or `two_steps`.

    Raises:
      ValueError: fewer replicas than rank groups.
    """
    if replicas < len(curves):
        raise ValueError(
            f"rank_groups: {len(curves)} rank groups for {replicas} replicas; the nearest valid number of rank groups "
            f"is {replicas}"
        )
    starts = [[len(block) for block in np.array_split(np.arange(replicas), len(curves))]]
    starts += [found for found in (_line(curves, replicas, tilt) for tilt in TILTS) if found]
    return min((_climb(curves, sizes, objective) for sizes in starts), key=lambda end: end[0])[1]


def _line(curves: np.ndarray, replicas: int, tilt: float) -> list[int] | None:
    """Returns the sizes under the lowest line under which all rank groups fit, found by bisection. Replicas that remain
    go to the last rank group.
    """
    low, high = 0.0, float(curves.max()) * 2 * replicas
    found = _below(curves, replicas, tilt, high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        sizes = _below(curves, replicas, tilt, middle)
        low, high, found = (low, middle, sizes) if sizes else (middle, high, found)
    return found and [*found[:-1], found[-1] + replicas - sum(found)]


def _below(curves: np.ndarray, replicas: int, tilt: float, top: float) -> list[int] | None:
    """Returns the fewest replicas for each rank group so that its middle lies below the line. None: there are not
    enough replicas.
    """
    sizes: list[int] = []
    counts = np.arange(1, curves.shape[1] + 1)
    for seconds in curves:
        allowed = top * (tilt + (1 - tilt) * (sum(sizes) + counts / 2) / replicas)
        fitting = np.flatnonzero(seconds <= allowed)
        if not fitting.size:
            return None
        sizes.append(int(counts[fitting[0]]))
    return sizes if sum(sizes) <= replicas else None


def _climb(curves: np.ndarray, sizes: list[int], objective: Callable[[np.ndarray], float]) -> tuple[float, list[int]]:
    """Moves one replica at a time from one rank group to another while the objective improves."""
    best = objective(spread(curves, sizes)), sizes
    while True:
        _, sizes = best
        moves = [
            [size + (m == to) - (m == of) for m, size in enumerate(sizes)]
            for of in range(len(sizes))
            for to in range(len(sizes))
            if of != to and sizes[of] > 1
        ]
        better = min(((objective(spread(curves, move)), move) for move in moves), default=best)
        if better[0] >= best[0]:
            return best
        best = better


# ---- 2. The placement


@dataclass
class Rank:
    """A rank group: groups of similar length."""

    home: list[int]  # its replicas
    refuge: Rank = field(init=False)  # the rank group of the longest rollouts, to which outliers move
    size: int = 0  # rollouts that it had at first
    longest: float = np.inf  # rollout that was expected, in tokens; inf: none was
    left: dict[RolloutId, Request] = field(default_factory=dict)  # unfinished requests


@dataclass
class Way:
    """Where an unfinished rollout runs."""

    rank: Rank  # its rank group
    replica: int  # its replica
    mean: float  # expected mean length of its group, in tokens
    known: bool  # whether its prompt has a history
    moved: bool = False  # whether it has moved


class Expected(NamedTuple):
    """A group that waits for a place, and the expected lengths of its rollouts in tokens."""

    requests: Sequence[Request]
    lengths: np.ndarray
    known: bool

    @property
    def mean(self) -> float:
        return float(self.lengths.mean())


class RankGroups:
    """A Placement that releases all requests at once, longest expected rollout first.

    Args:
      replica: a replica with its step cost, for the curves.
      past: maps a prompt id to its records, newest first (history.History.of).
      ranks: number of rank groups. It is lower with fewer replicas or groups, and 1 while no prompt has a history.
      objective: what the allocation minimises (`two_steps` or `barrier`).
      migrate: whether outliers move.
    """

    def __init__(
        self,
        replica: ReplicaCapacity,
        *,
        past: Callable[[str], Sequence[Past]],
        ranks: int = RANKS,
        objective: Callable[[np.ndarray], float] = two_steps,
        migrate: bool = True,
    ):
        if ranks < 1:
            raise ValueError(f"rank_groups: ranks={ranks} must be at least 1")
        self._replica, self._past, self._most, self._objective = replica, past, ranks, objective
        self._migrate = migrate
        self._round = -1
        self._growth = 1.0  # of lengths, from the history to the last round
        self._sums = [0.0, 0.0]  # tokens of this round's rollouts with a history: expected, found
        self._placed: list[Sequence[Request]] = []
        self._waiting: list[Request] = []
        self._ways: dict[RolloutId, Way] = {}
        self._load: Counter[int] = Counter()

    def place(self, groups: Sequence[Sequence[Request]], round: int) -> None:
        """Queues the requests of a wave. A new round updates the growth of lengths."""
        if round != self._round and self._sums[0]:
            self._growth, self._sums = max(1.0, self._sums[1] / self._sums[0]), [0.0, 0.0]
        self._round = round
        self._placed += groups

    def release(self, capacity: Capacity) -> list[Request]:
        if self._placed:
            self._lay(self._expected([group for group in self._placed if group]), len(capacity.slots))
            self._placed = []
        out, self._waiting = self._waiting, []
        return out

    def _expected(self, groups: Sequence[Sequence[Request]]) -> list[Expected]:
        """Returns groups with their expected lengths, shortest first. A prompt without history is expected to have the
        median length.
        """
        past = [self._past(group[0].prompt.id) for group in groups]
        known = [own[0].lengths for own in past if own]
        middle = float(np.median([lengths.mean() for lengths in known])) if known else 1.0
        found = [
            Expected(group, own[0].lengths if own else np.full(len(group), middle), bool(own))
            for group, own in zip(groups, past)
        ]
        return sorted(found, key=lambda group: group.mean)

    def _lay(self, groups: list[Expected], replicas: int) -> None:
        """Divides the groups into rank groups and assigns replicas."""
        count = min(self._most, replicas, len(groups)) if any(group.known for group in groups) else 1
        parts = [[groups[i] for i in part] for part in np.array_split(np.arange(len(groups)), count)]
        ranks = [Rank(home) for home in self._homes(parts, replicas)]
        for rank, part in zip(ranks, parts):
            rank.refuge = ranks[-1]
            self._fill(rank, part)
        self._waiting.sort(key=lambda request: -self._ways[request.rollout_id].mean)

    def _homes(self, parts: list[list[Expected]], replicas: int) -> list[list[int]]:
        """Returns the replicas of each rank group, side by side: from the left in odd steps, from the right in even
        steps.
        """
        if len(parts) <= 1:
            return [list(range(replicas))]
        work = [[(0, int(length)) for group in part for length in group.lengths] for part in parts]
        curves = np.array([curve(self._replica, mine, replicas - len(parts) + 1) for mine in work])
        ends = np.cumsum([0, *allocate(curves, replicas, self._objective)]).tolist()
        homes = [list(range(begin, end)) for begin, end in itertools.pairwise(ends)]
        return homes if self._round % 2 == 0 else [[replicas - 1 - at for at in home] for home in homes]

    def _fill(self, rank: Rank, groups: list[Expected]) -> None:
        """Distributes groups over the replicas of a rank group. The longest goes first, each to the replica with the
        least expected load.
        """
        tokens = dict.fromkeys(rank.home, 0.0)
        for group in reversed(groups):
            at = min(rank.home, key=lambda home: (tokens[home], self._load[home], home))
            tokens[at] += max(group.mean, 1.0) * len(group.requests)
            for request in group.requests:
                self._enter(request, Way(rank, at, group.mean, group.known))
        rank.size = len(rank.left)
        rank.longest = max((float(group.lengths.max()) for group in groups if group.known), default=np.inf)

    def _enter(self, request: Request, way: Way) -> None:
        self._ways[request.rollout_id] = way
        way.rank.left[request.rollout_id] = request
        self._load[way.replica] += 1
        self._waiting.append(dataclasses.replace(request, replica=way.replica))

    def _leave(self, id: RolloutId) -> Way:
        """Removes a rollout from its replica and returns where it ran."""
        way = self._ways.pop(id)
        del way.rank.left[id]
        self._load[way.replica] -= 1
        return way

    def learn(self, rollout: Rollout) -> tuple[RolloutId, ...]:
        """Removes a finished rollout.

        Returns the unfinished rollouts of its rank group if only outliers remain. This requires that at most `LAST` of
        the rank group remains and that this rollout was longer than expected.
        """
        if rollout.id not in self._ways:
            return ()
        way = self._leave(rollout.id)
        rank = way.rank
        if way.known:
            self._sums = [self._sums[0] + way.mean, self._sums[1] + len(rollout)]
        outliers = len(rank.left) <= LAST * rank.size and len(rollout) > self._growth * rank.longest
        if not (self._migrate and outliers) or rank is rank.refuge:
            return ()
        chosen = tuple(id for id in rank.left if not self._ways[id].moved)
        for id in chosen:
            self._ways[id].moved = True
        return chosen

    def moved(self, rollouts: Sequence[Rollout]) -> None:
        """Moves parked rollouts to the refuge, into the replica with the fewest rollouts."""
        for rollout in rollouts:
            request = self._ways[rollout.id].rank.left[rollout.id]
            way = self._leave(rollout.id)
            at = min(way.rank.refuge.home, key=lambda home: (self._load[home], home))
            self._enter(
                went_on(request, rollout), dataclasses.replace(way, rank=way.rank.refuge, replica=at, moved=True)
            )

    def withdraw(self, ids: Iterable[RolloutId]) -> None:
        gone = set(ids)
        for id in gone & self._ways.keys():
            self._leave(id)
        self._waiting = [request for request in self._waiting if request.rollout_id not in gone]
        self._placed = [[request for request in group if request.rollout_id not in gone] for group in self._placed]

    def state_dict(self) -> dict:
        """Returns the state between two rounds, when no rollout is unfinished."""
        assert not self._ways and not self._placed, f"{len(self._ways)} rollouts are unfinished"
        return {"round": self._round, "growth": self._growth, "sums": self._sums}

    def load_state_dict(self, state: Mapping) -> None:
        self._round, self._growth, self._sums = state["round"], state["growth"], list(state["sums"])
        self._placed, self._waiting, self._ways, self._load = [], [], {}, Counter()
