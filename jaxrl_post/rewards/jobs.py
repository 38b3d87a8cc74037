"""Jobs of a reward pool: what it knows of a rollout, what it asks its processes, and how records become a scored group.

Invariant: a call's numbers count only for exactly the rollouts that it was made for. A group whose rollouts changed
since gets a new call.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxrl_post.rewards import NoScores
from jaxrl_post.rewards.processes import FAILED, Process, Task, check_numbers
from jaxrl_post.rewards.sandbox import wire
from jaxrl_post.ring.types import Group, Rollout

_log = logging.getLogger(__name__)
COUNTERS = ("unscored", "retries", "overruns", "exceptions")


@dataclass(eq=False)
class Call:
    """Rollouts that functions get together: one alone, or a group as a whole.

    Attributes:
      about: what a message calls them.
      numbers: by the index of a function, with one entry for each member; none where it failed.
      waiting: functions that have not answered.
    """

    members: tuple[ScoringJob, ...]
    about: str
    waiting: int = 0
    numbers: dict[int, Sequence[dict[str, float]]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))

    def is_of(self, jobs: Sequence[ScoringJob]) -> bool:
        """Returns whether it was made for exactly these rollouts, in this order."""
        return len(jobs) == len(self.members) and all(a is b for a, b in zip(jobs, self.members, strict=True))


@dataclass(eq=False)
class ScoringJob:
    """One rollout, or its journaled record from before a resume.

    Attributes:
      alone: the call of the functions that get it alone.
      together: that of the functions that get its group, once there is one.
    """

    rollout: Rollout
    digest: str
    text: str = ""
    limit_s: float = 0.0
    journaled: Mapping | None = None
    together: Call | None = None

    def __post_init__(self):
        self.alone = Call((self,), str(self.rollout.id))

    @property
    def calls(self) -> list[Call]:
        """Returns its calls."""
        return [self.alone, *([self.together] if self.together else [])]

    def found(self, functions: int) -> list[dict[str, float] | None]:
        """Returns the numbers of every function; None where it failed."""
        known: dict[int, dict[str, float]] = {}
        for call in self.calls:
            place = call.members.index(self)
            known |= {index: numbers[place] for index, numbers in call.numbers.items()}
        return [known.get(index) for index in range(functions)]

    def counted(self) -> dict[str, int]:
        """Returns its counts. What its group's call needed counts for the group's first rollout, once."""
        out = dict.fromkeys(COUNTERS, 0)
        for call in self.calls:
            for name, count in call.counts.items():
                out[name] += count if name != "unscored" and call.members[0] is self else 0
            out["unscored"] = max(out["unscored"], call.counts["unscored"])
        return out


@dataclass(eq=False, kw_only=True)
class Score(Task):
    """One function on one rollout, or on one group. `index`: of the function."""

    call: Call
    index: int

    def check(self, reply: Mapping) -> None:
        """Raises wire.Broken unless there are finite numbers for each rollout of the task."""
        numbers = reply.get("numbers", self.call.members)
        if len(numbers) != len(self.call.members):
            raise wire.Broken("numbers of another count of rollouts")
        for one in reply.get("numbers", ()):
            check_numbers(one)

    def take(self, reply: Mapping) -> None:
        self.counts["overruns"] += reply["overrun"]
        self.call.numbers[self.index] = reply["numbers"]
        self.call.waiting -= 1

    def give_up(self, reason: str) -> None:
        """Leaves its rollouts without a score."""
        self.call.waiting -= 1
        self.counts["unscored"] = 1
        _log.info("reward %s failed twice on %s, which stays unscored: %s", self.function, self.about, reason)


class GraderProcess(Process[Score]):
    """A process that runs reward functions (worker.py)."""

    main = "jaxrl_post.rewards.worker"
    forms = (
        {"numbers": list, "overrun": bool, "seconds": float, "restarts": int, "task": int},
        {"budget": float, "task": int},
        FAILED,
    )
    forms_at_start = ({"ready": list, "sandbox": dict}, {"refused": str})


def scored_group(group: Group, records: Sequence[Mapping], shuffle_seed: int | None = None) -> Group:
    """Returns the group with the rewards of one record for each of its rollouts.

    Args:
      shuffle_seed: permutes the scores of training rollouts, a control from which nothing can be learned. None: they
        stay. Components are not permuted.
    """
    rewards = np.array([record["reward"] for record in records], np.float64)
    known = np.array([record["scored"] for record in records], bool)
    names = dict.fromkeys(name for record in records for name in record["components"])
    components = {name: np.array([record["components"].get(name, np.nan) for record in records]) for name in names}
    if shuffle_seed is not None:
        _permute(group, rewards, known, shuffle_seed)
    return Group(prompt=group.prompt, rollouts=group.rollouts, rewards=rewards, scored=known, components=components)


def _permute(group: Group, rewards: np.ndarray, known: np.ndarray, seed: int) -> None:
    """Permutes scored training rewards in place. Position i gets the score of the i-th smallest hash."""
    places = [i for i, rollout in enumerate(group.rollouts) if known[i] and rollout.id.purpose == "train"]
    order = sorted(places, key=lambda i: digest_of_parts(seed, group.prompt.id, group.rollouts[i].id.epoch, i))
    rewards[places] = rewards[order]


def digest_of_parts(*parts: object) -> bytes:
    """Returns 16 bytes that depend on the texts of the parts and their order."""
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=16).digest()


def digest_of_tokens(rollout: Rollout) -> str:
    """Returns a digest of a rollout's tokens, so that a journal's score is used for these tokens alone."""
    return digest_of_ids(rollout.tokens)


def digest_of_ids(tokens: np.ndarray) -> str:
    """Returns a digest of token ids."""
    return hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=8).hexdigest()


class FirstScores:
    """Refuses a run whose first `groups` groups, a round, hold no score. Later rounds are not checked: the metrics count
    their unscored rollouts."""

    def __init__(self, groups: int):
        self._groups = groups
        self._seen = self._rollouts = 0
        self._found = False

    def scored(self, group: Group) -> None:
        """Listens to the ring's event `scored`.

        Raises:
          NoScores: the first round is complete and holds no score.
        """
        self._found |= bool(group.scored.any())
        self._seen += 1
        self._rollouts += len(group.rollouts)
        if self._seen == self._groups and not self._found:
            raise NoScores(
                f"training: none of the first {self._groups} groups' {self._rollouts} rollouts could be scored: the "
                "graders failed, twice each, as the warnings above say, or apply to none of the prompts"
            )
