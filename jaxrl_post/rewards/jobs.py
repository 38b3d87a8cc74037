"""What the reward pool knows of a rollout, and of a group that a function of TRL's signature gets as a whole.

Invariant: a call's numbers count only for exactly the rollouts that it was made for. A group whose rollouts changed
since gets a new call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxrl_post.types import Rollout

COUNTERS = ("unscored", "retries", "overruns", "exceptions")


def _no_counts() -> dict[str, int]:
    return dict.fromkeys(COUNTERS, 0)


@dataclass(eq=False)
class Job:
    """One rollout: the numbers of every function that gets it alone, or its journaled record from before a resume.

    Attributes:
      numbers: by the index of a function; none where it failed.
      waiting: functions that have not answered.
      call: of its group, by the functions that get groups.
    """

    rollout: Rollout
    digest: str
    text: str = ""
    limit_s: float = 0.0
    journaled: Mapping | None = None
    waiting: int = 0
    call: Call | None = None
    numbers: dict[int, dict[str, float]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=_no_counts)

    @property
    def members(self) -> tuple[Job, ...]:
        """Returns the rollouts of a task of this job."""
        return (self,)

    @property
    def rollouts(self) -> str:
        """Returns what a message calls it."""
        return str(self.rollout.id)

    def take(self, function: int, numbers: Sequence[dict[str, float]]) -> None:
        """Takes the numbers of one function."""
        self.numbers[function] = numbers[0]
        self.waiting -= 1

    def give_up(self) -> None:
        """Notes that a function failed for the last time."""
        self.waiting -= 1
        self.counts["unscored"] = 1

    def found(self, functions: int) -> list[dict[str, float] | None]:
        """Returns the numbers of every function; None where it failed."""
        alone = [self.numbers.get(index) for index in range(functions)]
        if self.call is None:
            return alone
        place = self.call.members.index(self)
        return [
            self.call.numbers[index][place] if index in self.call.numbers else one for index, one in enumerate(alone)
        ]

    def counted(self) -> dict[str, int]:
        """Returns its counts. What its group's call needed counts for the group's first rollout, once."""
        out = dict(self.counts)
        if self.call is not None:
            for name, count in self.call.counts.items():
                out[name] += count if name != "unscored" and self.call.members[0] is self else 0
            out["unscored"] = max(out["unscored"], self.call.counts["unscored"])
        return out


@dataclass(eq=False)
class Call:
    """A group, for the functions that get it as a whole: `numbers` by function, one entry for each member."""

    members: tuple[Job, ...]
    waiting: int
    numbers: dict[int, Sequence[dict[str, float]]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=_no_counts)

    @property
    def rollouts(self) -> str:
        """Returns what a message calls it."""
        return f"the {len(self.members)} rollouts of prompt {self.members[0].rollout.id.prompt_id!r}"

    def take(self, function: int, numbers: Sequence[dict[str, float]]) -> None:
        """Takes the numbers of one function."""
        self.numbers[function] = numbers
        self.waiting -= 1

    def give_up(self) -> None:
        """Notes that a function failed for the last time: none of the group's rollouts has a score."""
        self.waiting -= 1
        self.counts["unscored"] = 1

    def is_of(self, jobs: Sequence[Job]) -> bool:
        """Returns whether it was made for exactly these rollouts, in this order."""
        return len(jobs) == len(self.members) and all(a is b for a, b in zip(jobs, self.members, strict=True))


@dataclass(eq=False)
class Task:
    """One function on one rollout, or on one group."""

    owner: Job | Call
    function: int
    arguments: object
    retried: bool = False

    @property
    def members(self) -> tuple[Job, ...]:
        """Returns the rollouts that it is about."""
        return self.owner.members
