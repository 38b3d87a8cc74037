"""The drafters by name. What one is: see `jaxrl_post.engine.speculation.interface`.

off        nothing
ngram      hashed n-grams of the answer's own text, prompt included
histospec, histospec_rewards  the suffix array of the prompt's last epoch, as RhymeRL does it (arXiv 2508.18588)
ours       hashed n-grams with back-off: the running answers to the prompt, its past answers, those to all prompts
"""

from __future__ import annotations

from jaxrl_post.engine.speculation import ngrams
from jaxrl_post.engine.speculation.interface import Off
from jaxrl_post.engine.speculation.ngram_drafter import Backoff
from jaxrl_post.engine.speculation.suffix_drafter import Histospec

Drafter = Off | Backoff | Histospec


def off(*, vocab: int, width: int, entries: int, live: int) -> Off:
    """Never a draft, whatever the sizes."""
    return Off()


def ngram(*, vocab: int, width: int, entries: int, live: int) -> Backoff:
    """The live table alone, a row a slot."""
    ngrams.check_vocab(vocab)
    return Backoff(width=width, entries=0, live=live, sources=("live",), siblings=False, watches=False)


def histospec(*, vocab: int, width: int, entries: int, live: int) -> Histospec:
    """`width`: the largest window, 32 in the paper; `entries`: tokens of the arrays of all prompts at once."""
    return Histospec(width=width, entries=entries)


def histospec_rewards(*, vocab: int, width: int, entries: int, live: int) -> Histospec:
    """As `histospec`; of several branches the one of the highest rewards."""
    return Histospec(width=width, entries=entries, reward_aware=True)


def ours(*, vocab: int, width: int, entries: int, live: int) -> Backoff:
    """`entries`: of the tables of prompts and all prompts together; `live`: of the row of one prompt's running answers."""
    ngrams.check_vocab(vocab)
    return Backoff(width=width, entries=entries, live=live)


DRAFTERS = {"off": off, "ngram": ngram, "histospec": histospec, "histospec_rewards": histospec_rewards, "ours": ours}
