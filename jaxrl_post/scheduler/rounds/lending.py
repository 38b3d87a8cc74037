"""Lends engine devices to the learner while a round drains, until the round is over.

RollPacker's stream trainer (arXiv 2509.21009, section 5.3) halves the replicas of a long round once 20 to 50 % of its
rollouts have finished. It requires that the KV cache of the running rollouts fits into the remaining replicas. The
freed devices train on complete groups. This scheduler does the same by counts. A loan begins when a given share of
rollouts has finished and every running rollout finds a slot in half of the replicas.

Invariant: devices are lent at most once per round, and never in a race, whose losers leave anyway. They return before
the last groups of a round are handed out and before the next round admits anything. Loans never change which groups a
round trains on.

Where weights are published within a round, loans change the clock of the publish. A rollout that moves gets its older
KV cache recomputed, which the engine counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from jaxrl_post.ring.history import Past
from jaxrl_post.ring.types import Capacity, Layout, Part, Request
from jaxrl_post.scheduler.forecast import ReplicaCapacity
from jaxrl_post.scheduler.ledger import PendingGroup
from jaxrl_post.scheduler.rounds.around import AroundScheduler, RoundScheduler


@dataclass
class LendingState:
    """The plain values that a checkpoint holds."""

    lent: bool = False  # whether devices are on loan
    clock: int = 0  # of the latest `admit`, in engine steps
    away: bool = False  # whether devices were on loan from that clock on


class Lending(AroundScheduler):
    """Lends devices to the learner, around streamed rounds.

    Args:
      rounds: the scheduler to wrap.
      all_of_them: the layout with all engine devices.
      half: the layout while devices are lent.
      share: share of a round's rollouts that must have finished before a loan.
      replica: slots and KV capacity of one replica.
      past: maps a prompt id to its records in the history, newest first.
      apart: whether the learner also has devices of its own. If so, it trains on complete groups before a loan. If not,
        complete groups wait for a loan, since training on generating devices would only delay the round.
    """

    def __init__(
        self,
        rounds: RoundScheduler,
        *,
        all_of_them: Layout,
        half: Layout,
        share: float,
        replica: ReplicaCapacity,
        past: Callable[[str], Sequence[Past]],
        apart: bool,
    ):
        super().__init__(rounds)
        self._share, self._replica, self._past, self._apart = share, replica, past, apart
        self._layouts = all_of_them, half
        self._state = LendingState()
        self._told = all_of_them
        self._counts: Counter[str] = Counter()

    def __str__(self) -> str:
        return f"{self._inside}, {self._told}"

    def layout(self) -> Layout | None:
        """Returns the layout where it changes, else None."""
        if not self._state.lent and self._may_be_lent():
            self._state.lent = True
            self._counts["num_lendings"] += 1
        layout = self._layouts[self._state.lent]
        if layout == self._told:
            return None
        self._told = layout
        return layout

    def _may_be_lent(self) -> bool:
        """Whether enough rollouts have finished, and half of the replicas have slots and KV cache for all others."""
        late = self._inside.stragglers()
        missing, half = sum(len(opened.missing) for opened in late), self._layouts[True].replicas
        if not 0 < missing <= half * self._replica.slots:
            return False
        done = 1 - missing / self._inside.num_rollouts
        return done >= self._share and sum(map(self._expected, late)) <= half * self._replica.kv_tokens

    def _expected(self, opened: PendingGroup) -> int:
        """Returns tokens of KV cache that a group's missing rollouts will need.

        Each is expected to be as long as the longest known rollout of its prompt. Known are finished siblings, prefixes
        from before a deferral, and the newest record in the history. Without any, the largest allowed length is
        expected.
        """
        here = [*opened.rollouts.values(), *opened.prefixes.values()]
        known = [*map(len, here), *(int(max(record.lengths)) for record in self._past(opened.prompt.id)[:1])]
        return len(opened.missing) * (opened.prompt.tokens.size + max(known, default=self._inside.max_tokens))

    def admit(self, capacity: Capacity, clock: int) -> list[Request]:
        self._counts["lent_steps"] += self._state.away * (clock - self._state.clock)
        self._state.clock, self._state.away = clock, self._state.lent
        return self._inside.admit(capacity, clock)

    def take(self) -> list[Part]:
        """Returns parts for the learner. Once a round is full, its devices return first and its last groups follow in
        the next call.
        """
        away = self._told == self._layouts[True]
        if self._inside.full:
            self._state.lent = False
            return [] if away else self._inside.take()
        return self._inside.take() if away or self._apart else []

    def state_dict(self) -> dict:
        return asdict(self._state) | {
            "told": list(self._told),
            "lendings": dict(self._counts),
            "rounds": self._inside.state_dict(),
        }

    def load_state_dict(self, state: Mapping) -> None:
        self._state = LendingState(**{field.name: state[field.name] for field in fields(LendingState)})
        self._told, self._counts = Layout(*state["told"]), Counter(state["lendings"])
        self._inside.load_state_dict(state["rounds"])

    def metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        return self._inside.metrics() | {
            f"sched/{name}": float(counts[name]) for name in ("num_lendings", "lent_steps")
        }
