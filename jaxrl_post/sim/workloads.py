"""What is to be generated: prompts in an endless order, and of each the law of its answers' lengths.

Invariant: a prompt and its law are functions of (seed, index); the order of an epoch of (seed, epoch). A prompt keeps its
law over the epochs, so a history of it is worth something.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxrl_post.sim import laws
from jaxrl_post.types import Prompt


class Prompts:
    """A PromptOrder of `count` prompts of `tokens` tokens each; each epoch in an order of its own.

    Raises:
      ValueError: no prompts, or prompts without a token.
    """

    def __init__(self, count: int, *, tokens: int = 256, seed: int = 0):
        if count < 1 or tokens < 1:
            raise ValueError(f"workload: {count} prompts of {tokens} tokens; there must be at least 1 of at least 1")
        self._count, self._tokens, self._seed = count, np.zeros(tokens, np.int32), seed
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def __len__(self) -> int:
        """Prompts per epoch."""
        return self._count

    def at(self, position: int) -> tuple[int, Prompt]:
        """(epoch, prompt) at a position counted from 0 over all epochs."""
        epoch, index = divmod(position, self._count)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._seed, 0, epoch)).permutation(self._count)
        return epoch, Prompt(id=str(self._order[index]), tokens=self._tokens)


LawOf = Callable[[Prompt], laws.Law]


def rollpacker(count: int, *, cap: int, seed: int = 0) -> LawOf:
    """Fitted to the 24 rollout times of RollPacker's figure 11 (arXiv 2509.21009): prompt i has mu ~ N(ln 560, 0.566^2) and
    a chance c ~ Beta(0.40, 10) that an answer runs away; the body is exp(mu + 0.566 z), the runaways are log-uniform from
    2000 to 16 caps, before the cap."""
    rng = np.random.default_rng((seed, 1))
    mu = rng.normal(np.log(560.0), 0.566, count).tolist()
    runaway = rng.beta(0.40, 10.0, count).tolist()
    heavy = laws.LogUniform(2000.0, 16.0 * cap)
    return lambda prompt: laws.Mixture(laws.LogNormal(mu[int(prompt.id)], 0.566), heavy, runaway[int(prompt.id)])


def uniform(longest: int) -> LawOf:
    """1 to `longest` tokens for every prompt."""
    law = laws.Uniform(longest)
    return lambda prompt: law


def lognormal(count: int, *, mean: float, tail: float, group: int, within: float = 1.0, seed: int = 0) -> LawOf:
    """Log-normal lengths of that mean (before the cap), whose longest of `group` answers to one prompt is on average `tail`
    times that prompt's mean. `within`: the share of the logarithm's variance that lies within a prompt; the rest is between
    prompts.

    Raises:
      ValueError: `within` is no share above 0, or no such tail.
    """
    if not 0 < within <= 1:
        raise ValueError(f"workload: within={within} must be above 0 and at most 1, where 1 makes all prompts alike")
    sigma = laws.spread(tail, group)
    between = sigma * np.sqrt(1 / within - 1)
    middle = np.log(mean) - (sigma**2 + between**2) / 2
    mu = np.random.default_rng((seed, 1)).normal(middle, between, count).tolist()
    return lambda prompt: laws.LogNormal(mu[int(prompt.id)], sigma)


def trace(lengths: Sequence[int]) -> LawOf:
    """Lengths that were seen, for every prompt alike: in a trace that names no prompts nothing is known of them."""
    law = laws.Empirical(lengths)
    return lambda prompt: law


def groups(lengths: Sequence[Sequence[int]]) -> LawOf:
    """Lengths that were seen, of each prompt its own; prompts beyond the list begin it again."""
    found = [laws.Empirical(own) for own in lengths]
    return lambda prompt: found[int(prompt.id) % len(found)]


def read_lengths(path: str | Path) -> list[int]:
    """Output lengths of a trace: a .jsonl with output_length (Mooncake), a .csv with GeneratedTokens (Azure), or a .txt of
    texts between lines of "=" (whose tokens are counted as 4 characters each). Empty answers are left out.

    Raises:
      ValueError: no such file, or none of these forms.
    """
    file = Path(path)
    if not file.is_file() or file.suffix not in _READERS:
        raise ValueError(f"workload: no trace {path}; it must be a file that ends in {', '.join(_READERS)}")
    try:
        lengths = [length for length in _READERS[file.suffix](file.read_text(encoding="utf-8")) if length > 0]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"workload: {path} is no trace of this form: {error!r}") from None
    if not lengths:
        raise ValueError(f"workload: {path} holds no answers")
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
