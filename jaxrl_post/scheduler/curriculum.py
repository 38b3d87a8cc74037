"""Which prompts of an epoch are drawn: by their success rates so far, and without those that teach nothing for now.

A pass goes through as many positions of the base order as there are prompts. Its plan is made when its first prompt is
drawn, from the rewards recorded until then. It is a list of these positions, in ascending order. So every (epoch,
prompt) is opened at most once, whatever the base order is. Passes over sources of different sizes mix.

1. The filter skips a prompt whose last groups were all solved or all hopeless, for some of its epochs.
2. The sampler draws a fixed number of the others. Systematic sampling in random order (Madow 1949) draws prompt i with
   exactly the inclusion probability pi_i, and no prompt twice.
3. A drawn prompt has the importance weight m / (n pi_i), for m draws of n prompts. The weighted mean over the draws is
   then an unbiased estimate of the plain mean over the n prompts (Horvitz and Thompson 1952).

Invariant: a plan depends on the seed, the base order and the records alone, never on time. It is saved, so a resumed run
has it too.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrl_post.ring.history import Past
from jaxrl_post.ring.types import Prompt
from jaxrl_post.scheduler.ledger import PromptOrder
from jaxrl_post.scheduler.rounds.around import AroundScheduler

UNKNOWN = 0.5  # the rate of a prompt without scores, which is drawn as often as any
INTERESTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "all": lambda rates: np.ones_like(rates),
    "variance": lambda rates: rates * (1 - rates),
    "failure": lambda rates: 1 - rates,
}
_COUNTERS = ("num_prompts_solved", "num_prompts_hopeless", "num_prompts_left", "num_prompts_planned", "num_passes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """How the prompts of a pass are chosen.

    Args:
      interest: a key of INTERESTS. Prompts are drawn in proportion to this function of their success rates.
      share: of the prompts that are not skipped, the share that a pass draws. Above 0, at most 1.
      uniform: share of the interest that is spread evenly, so that every prompt may be drawn. Above 0, at most 1.
      skip_epochs: epochs for which a solved or hopeless prompt is skipped. 0: none is.
      solved, hopeless: success rates from which on, and up to which, a prompt is.
      groups: the last groups of a prompt that its rate is taken from.
      weighted: whether the learner multiplies advantages by importance weights.
    """

    interest: str = "all"
    share: float = 1.0
    uniform: float = 0.1
    skip_epochs: int = 0
    solved: float = 1.0
    hopeless: float = 0.0
    groups: int = 1
    weighted: bool = False


class Curriculum:
    """A PromptOrder over a base order. `at` plans the next pass when it is asked beyond the last one.

    Args:
      base: the endless order of all prompts.
      size: positions of a pass.
      past: maps a prompt id to its records, newest first (history.History.of).
    """

    def __init__(self, base: PromptOrder, size: int, choice: Choice, seed: int, past: Callable[[str], Sequence[Past]]):
        self._base, self._size, self._choice, self._seed, self._past = base, size, choice, seed, past
        self._ends: list[int] = []  # of every pass, the position behind its last prompt
        self._places = np.zeros(0, np.int64)  # base position of each position so far
        self._weights = np.zeros(0)
        self._counts: Counter[str] = Counter()

    def at(self, position: int) -> tuple[int, Prompt]:
        """Returns the epoch and the prompt at a position. It has its importance weight where the choice asks so."""
        while position >= len(self._places):
            self._plan()
        epoch, prompt = self._base.at(int(self._places[position]))
        weight = float(self._weights[position]) if self._choice.weighted else 1.0
        return epoch, dataclasses.replace(prompt, weight=weight)

    def _plan(self) -> None:
        """Appends the positions and weights of the next pass, which may be none where all prompts are skipped."""
        number = len(self._ends)
        window = [(place, *self._base.at(place)) for place in range(number * self._size, (number + 1) * self._size)]
        open_ = [(place, self._rate(prompt)) for place, epoch, prompt in window if not self._skips(epoch, prompt)]
        if open_:
            rates = np.array([rate for _, rate in open_])
            count = max(round(self._choice.share * len(open_)), 1)
            chances = inclusion(INTERESTS[self._choice.interest](rates), count, self._choice.uniform)
            drawn = systematic(chances, np.random.default_rng([self._seed, number, 0x70726F6D]))
            self._places = np.append(self._places, np.array([place for place, _ in open_])[drawn])
            self._weights = np.append(self._weights, count / (len(open_) * chances[drawn]))
            self._counts.update(num_prompts_left=len(open_) - len(drawn), num_prompts_planned=len(drawn))
        self._ends.append(len(self._places))
        self._counts["num_passes"] += 1

    def _rate(self, prompt: Prompt) -> float:
        """Returns the mean reward of the last groups, within 0 and 1; UNKNOWN without a score."""
        pasts = self._past(prompt.id)[: self._choice.groups]
        rewards = np.concatenate([np.zeros(0), *(past.rewards[past.scored] for past in pasts)]).astype(np.float64)
        return float(np.clip(rewards.mean(), 0.0, 1.0)) if rewards.size else UNKNOWN

    def _skips(self, epoch: int, prompt: Prompt) -> bool:
        """Whether the filter skips a prompt in this epoch of it. Counts it."""
        pasts = self._past(prompt.id)[: self._choice.groups]
        recent = len(pasts) == self._choice.groups and epoch - pasts[0].epoch <= self._choice.skip_epochs
        if not recent or not all(past.scored.any() for past in pasts):
            return False
        rate = self._rate(prompt)
        kind = "solved" if rate >= self._choice.solved else "hopeless" if rate <= self._choice.hopeless else ""
        if kind:
            self._counts[f"num_prompts_{kind}"] += 1
        return bool(kind)

    def state_dict(self) -> dict:
        """Returns all plans so far, as plain values and arrays: 16 bytes a prompt."""
        return {
            "ends": list(self._ends),
            "places": self._places.copy(),
            "weights": self._weights.copy(),
            "counts": dict(self._counts),
        }

    def load_state_dict(self, state: Mapping) -> None:
        self._ends = [int(end) for end in state["ends"]]
        self._places, self._weights = state["places"].copy(), state["weights"].copy()
        self._counts = Counter(state["counts"])

    def metrics(self) -> dict[str, float]:
        """Returns counts since the last call, and figures of the newest pass's weights.

        - `num_prompts_solved`, `num_prompts_hopeless`: skipped by the filter.
        - `num_prompts_left`: not drawn. `num_prompts_planned`: drawn.
        - `weight/{mean, max}`: importance weights of the pass; `ess`: their effective share of the draws, (sum w)^2 / sum w^2 / m.
        """
        counts, self._counts = self._counts, Counter()
        out = {f"curriculum/{name}": float(counts[name]) for name in _COUNTERS}
        begin = self._ends[-2] if len(self._ends) > 1 else 0
        weights = self._weights[begin:]
        if weights.size:
            effective = weights.sum() ** 2 / np.square(weights).sum() / weights.size
            figures = {"weight/mean": np.mean(weights), "weight/max": np.max(weights), "ess": effective}
            out |= {f"curriculum/{name}": float(value) for name, value in figures.items()}
        return out


class Curricular(AroundScheduler):
    """A scheduler whose prompts come from a curriculum, which is saved with it. It may have rounds or not."""

    def __init__(self, scheduler, order: Curriculum):
        super().__init__(scheduler)
        self._order = order

    def state_dict(self) -> Mapping:
        return {"scheduler": self._inside.state_dict(), "order": self._order.state_dict()}

    def load_state_dict(self, state: Mapping) -> None:
        """Restores the plans first: open groups find their prompts by position."""
        self._order.load_state_dict(state["order"])
        self._inside.load_state_dict(state["scheduler"])

    def metrics(self) -> dict[str, float]:
        return self._inside.metrics() | self._order.metrics()


def inclusion(interest: np.ndarray, count: int, uniform: float) -> np.ndarray:
    """Returns f64[n], the probability with which each of n prompts is among `count` draws. Their sum is `count`.

    They are in proportion to the interest plus its even share, but for those that reach 1: these are drawn for sure.

    Args:
      interest: f64[n], at least 0.
      count: draws, from 1 to n.
      uniform: share of the interest that is spread evenly, above 0.
    """
    even = np.full(len(interest), 1 / len(interest))
    total = interest.sum()
    mass = uniform * even + (1 - uniform) * (interest / total if total > 0 else even)
    chances, sure = np.zeros(len(mass)), np.zeros(len(mass), bool)
    while True:
        chances[~sure] = (count - sure.sum()) * mass[~sure] / mass[~sure].sum()
        beyond = ~sure & (chances >= 1)
        if not beyond.any():
            return chances
        sure |= beyond
        chances[sure] = 1.0
        if sure.all():
            return chances


def systematic(chances: np.ndarray, noise: np.random.Generator) -> np.ndarray:
    """Returns int64[m], ascending indices, each drawn with its chance; m is the sum of the chances, a whole number.

    Chances are laid end to end in random order. Points at distance 1 from a random start fall into those that are drawn.
    """
    order = noise.permutation(len(chances))
    edges = np.cumsum(chances[order])
    points = noise.random() + np.arange(round(float(edges[-1])))
    found = np.searchsorted(edges, np.minimum(points, np.nextafter(edges[-1], 0)), side="right")
    return np.sort(order[np.unique(found)])
