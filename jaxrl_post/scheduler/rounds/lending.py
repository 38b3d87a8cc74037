"""Devices that a draining round no longer needs, lent to the learner until the round is over.

RollPacker's stream trainer (arXiv 2509.21009, section 5.3) halves the replicas of a long round once 20 to 50 % of its answers
are done, if the KV of the others fits, and trains on groups that are whole meanwhile. So does this, at counts: from a given share
on, as soon as every answer that is not done finds a slot in half of the replicas. Invariant: devices are lent at most once a
round, never in a race, whose losers leave anyway, and they are back before a round's last groups are handed out and the next one
admits anything; which groups a round trains on is decided without it. Where weights come in the midst of rounds, they come at
other clocks with loans than without, and an answer that moves gets the KV of its older tokens anew (counted by the engine).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from jaxrl_post.history import Past
from jaxrl_post.scheduler.forecast import Replica
from jaxrl_post.scheduler.groups import Open
from jaxrl_post.scheduler.rounds.around import AroundRounds, RoundScheduler
from jaxrl_post.types import Capacity, Layout, Part, Request


@dataclass
class LendingState:
    """`lent`: whether devices are on loan. `clock`: of the latest step; `away`: whether they were on loan from there on."""

    lent: bool = False
    clock: int = 0
    away: bool = False


class Lending(AroundRounds):
    """A protocols.Scheduler around rounds that are streamed.

    Args:
      all_of_them: how the engine lies while it has all its devices; half: while the others are lent.
      share: of a round's answers, that must be done before.
      replica: slots and KV of one.
      past: what is known of a prompt, newest record first.
      apart: the learner has devices of its own too, for groups that are whole before. Else those wait for a loan: trained on by
        devices that generate, they would only hold the round up.
    """

    def __init__(
        self,
        rounds: RoundScheduler,
        *,
        all_of_them: Layout,
        half: Layout,
        share: float,
        replica: Replica,
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
        """Where it changes."""
        if not self._state.lent and self._may_be_lent():
            self._state.lent = True
            self._counts["num_lendings"] += 1
        layout = self._layouts[self._state.lent]
        if layout == self._told:
            return None
        self._told = layout
        return layout

    def _may_be_lent(self) -> bool:
        """Whether enough answers are done, and half of the replicas hold the others."""
        late = self._inside.late()
        missing, half = sum(len(opened.missing) for opened in late), self._layouts[True].replicas
        if not 0 < missing <= half * self._replica.slots:
            return False
        done = 1 - missing / self._inside.num_rollouts
        return done >= self._share and sum(map(self._expected, late)) <= half * self._replica.kv_tokens

    def _expected(self, opened: Open) -> int:
        """Tokens of KV that a group's missing answers will need: as many as its longest sibling has, or had when it was put off,
        or last time's longest, and where nobody knows as many as can be."""
        here = [*opened.rollouts.values(), *opened.prefixes.values()]
        known = [*map(len, here), *(int(max(record.lengths)) for record in self._past(opened.prompt.id)[:1])]
        return len(opened.missing) * (opened.prompt.tokens.size + max(known, default=self._inside.max_tokens))

    def admit(self, capacity: Capacity, clock: int) -> list[Request]:
        self._counts["lent_steps"] += self._state.away * (clock - self._state.clock)
        self._state.clock, self._state.away = clock, self._state.lent
        return self._inside.admit(capacity, clock)

    def take(self) -> list[Part]:
        """A round that is full gets its devices back first, then its last groups are trained on."""
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
        """Counts since the last call: loans, and engine steps that they lasted."""
        counts, self._counts = self._counts, Counter()
        return self._inside.metrics() | {
            f"sched/{name}": float(counts[name]) for name in ("num_lendings", "lent_steps")
        }
