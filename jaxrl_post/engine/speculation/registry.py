"""The drafters by name. For the contract of a drafter, see `jaxrl_post.engine.speculation.interface`.

- off: never drafts
- ngram: hashed n-grams of the sequence's own text, prompt included
- histospec: suffix array of the prompt's last epoch (RhymeRL, arXiv 2508.18588)
- histospec_rewards: the same, with branches chosen by reward
- ours: hashed n-grams with back-off over three sources: running rollouts of the prompt, its past rollouts, and past
  rollouts of all prompts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxrl_post.engine.speculation import ngrams
from jaxrl_post.engine.speculation.interface import Drafter
from jaxrl_post.engine.speculation.ngram_drafter import Backoff
from jaxrl_post.engine.speculation.suffix_drafter import Histospec


def ngram(*, vocab: int, width: int, entries: int, live: int) -> Backoff:
    """Returns a drafter with a live table alone, in which every slot has its own row."""
    ngrams.check_vocab(vocab)
    return Backoff(width=width, live=live, sources=("live",), siblings=False, watches=False)


def ours(*, vocab: int, width: int, entries: int, live: int) -> Backoff:
    """Returns the n-gram drafter with all three sources.

    `entries`: of the tables of prompts and of all prompts together. `live`: of one prompt's row of the live table."""
    ngrams.check_vocab(vocab)
    return Backoff(width=width, entries=entries, live=live)


# Each takes the sizes that it needs. For histospec they are the largest window, which is 32 in the paper, and the tokens
# of the suffix arrays of all prompts together.
DRAFTERS: Mapping[str, Callable[..., Drafter]] = {
    "off": lambda **sizes: Drafter(),
    "ngram": ngram,
    "histospec": lambda *, width, entries, **sizes: Histospec(width=width, entries=entries),
    "histospec_rewards": lambda *, width, entries, **sizes: Histospec(width=width, entries=entries, reward_aware=True),
    "ours": ours,
}
