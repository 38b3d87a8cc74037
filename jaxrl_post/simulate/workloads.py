"""The workload of a simulation: prompts in an endless order, and the distribution of each prompt's rollout lengths.

Invariant: a prompt and its distribution are functions of (seed, index). The order of an epoch is a function of (seed, epoch). A
prompt keeps its distribution in every epoch, so its history predicts its lengths.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxrl_post.ring.types import Prompt
from jaxrl_post.simulate import length_distributions


class SimPrompts:
    """A PromptOrder of `count` prompts with `tokens` tokens each. Every epoch has its own order.

    Raises:
      ValueError: no prompts, or prompts without a token.
    """

    def __init__(self, count: int, *, tokens: int = 256, seed: int = 0):
        if count < 1 or tokens < 1:
            raise ValueError(f"workload: {count} prompts of {tokens} tokens; there must be at least 1 of at least 1")
        self._count, self._tokens, self._seed = count, np.zeros(tokens, np.int32), seed
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def __len__(self) -> int:
        """Returns the number of prompts per epoch."""
        return self._count

    def at(self, position: int) -> tuple[int, Prompt]:
        """Returns (epoch, prompt) at a position that counts from 0 over all epochs."""
        epoch, index = divmod(position, self._count)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._seed, 0, epoch)).permutation(self._count)
        return epoch, Prompt(id=str(self._order[index]), tokens=self._tokens)


DistributionOf = Callable[[Prompt], length_distributions.LengthDistribution]


def rollpacker(count: int, *, cap: int, seed: int = 0) -> DistributionOf:
    """Returns distributions fitted to the 24 rollout times of RollPacker's figure 11 (arXiv 2509.21009).

    Prompt i has mu ~ N(ln 560, 0.566^2) and a chance c ~ Beta(0.40, 10) that a rollout is a runaway. Other rollouts
    have length exp(mu + 0.566 z). The lengths of runaways are log-uniform from 2000 to 16 * cap. None of these lengths
    is limited by the cap yet.
    """
    rng = np.random.default_rng((seed, 1))
    mu = rng.normal(np.log(560.0), 0.566, count).tolist()
    runaway = rng.beta(0.40, 10.0, count).tolist()
    heavy = length_distributions.LogUniform(2000.0, 16.0 * cap)
    return lambda prompt: length_distributions.Mixture(
        length_distributions.LogNormal(mu[int(prompt.id)], 0.566), heavy, runaway[int(prompt.id)]
    )


def uniform(longest: int) -> DistributionOf:
    """Returns the same distribution for every prompt: 1 to `longest` tokens, each equally likely."""
    distribution = length_distributions.Uniform(longest)
    return lambda prompt: distribution


def lognormal(
    count: int, *, mean: float, tail: float, group: int, within: float = 1.0, seed: int = 0
) -> DistributionOf:
    """Returns log-normal distributions with this mean over all prompts. Lengths are not limited by the cap yet.

    `tail`: longest of `group` rollouts of a prompt, divided by the prompt's mean, on average.
    `within`: share of the logarithm's variance within a prompt. The rest is between prompts.

    Raises:
      ValueError: `within` is not in (0, 1], or no distribution has this `tail`.
    """
    if not 0 < within <= 1:
        raise ValueError(f"workload: within={within} must be above 0 and at most 1, where 1 makes all prompts alike")
    sigma = length_distributions.spread(tail, group)
    between = sigma * np.sqrt(1 / within - 1)
    middle = np.log(mean) - (sigma**2 + between**2) / 2
    mu = np.random.default_rng((seed, 1)).normal(middle, between, count).tolist()
    return lambda prompt: length_distributions.LogNormal(mu[int(prompt.id)], sigma)


def trace(lengths: Sequence[int]) -> DistributionOf:
    """Returns the same distribution of observed lengths for every prompt, because a trace does not name prompts."""
    distribution = length_distributions.Empirical(lengths)
    return lambda prompt: distribution


def groups(lengths: Sequence[Sequence[int]]) -> DistributionOf:
    """Returns distributions of observed lengths, one list for each prompt. Further prompts start again with the first list."""
    found = [length_distributions.Empirical(own) for own in lengths]
    return lambda prompt: found[int(prompt.id) % len(found)]


def read_lengths(path: str | Path) -> list[int]:
    """Returns the output lengths of a trace, without empty outputs. The suffix of the file gives its format:

    - .jsonl: records with `output_length` (Mooncake).
    - .csv: a column `GeneratedTokens` (Azure).
    - .txt: texts between lines of "=". 4 characters count as one token.

    Raises:
      ValueError: the file does not exist, has another format, or has no outputs.
    """
    file = Path(path)
    if not file.is_file() or file.suffix not in _READERS:
        raise ValueError(f"workload: no trace {path}; it must be a file that ends in {', '.join(_READERS)}")
    try:
        lengths = [length for length in _READERS[file.suffix](file.read_text(encoding="utf-8")) if length > 0]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"workload: {path} is no trace of this form: {error!r}") from None
    if not lengths:
        raise ValueError(f"workload: {path} has no outputs")
    return lengths


def _jsonl(text: str) -> list[int]:
    return [int(json.loads(line)["output_length"]) for line in text.splitlines() if line.strip()]


def _csv(text: str) -> list[int]:
    return [int(row["GeneratedTokens"]) for row in csv.DictReader(text.splitlines())]


def _texts(text: str) -> list[int]:
    pieces, lines = [], []
    for line in [*text.splitlines(), "="]:
        if line.strip() and not line.strip("= "):
            pieces.append("\n".join(lines).strip())
            lines = []
        else:
            lines.append(line)
    return [-(-len(piece) // 4) for piece in pieces]


_READERS = {".jsonl": _jsonl, ".csv": _csv, ".txt": _texts}
