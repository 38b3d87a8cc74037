"""What is drafted from: the arrays of a prompt, made from what the history holds of it.

Invariant: the arrays of a prompt are a function of what the history holds of it and of its tokens, so they are never saved:
a restored history gives the same ones. Host numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt32

from jaxrl_post import ngrams, suffixes
from jaxrl_post.history import Past
from jaxrl_post.types import Prompt


def grams(pasts: Sequence[Past], prompt: Prompt) -> UInt32[np.ndarray, " size"]:
    """The n-gram table over all remembered epochs of a prompt (`pasts`, newest first), 3 entries a token; size 0 where nothing
    is known."""
    return ngrams.build([ngrams.Texts(prompt.tokens, past.answers, past.texts_to_learn) for past in reversed(pasts)])


def sorted_suffixes(pasts: Sequence[Past], prompt: Prompt, *, by_reward: bool) -> suffixes.Suffixes:
    """The suffix array over the last epoch of a prompt; `by_reward`: answers weigh by their rewards, else alike."""
    if not pasts:
        return suffixes.build([], prompt.tokens)
    last = pasts[0]
    weights = suffixes.priorities(last.rewards, last.scored) if by_reward else None
    return suffixes.build(last.answers, prompt.tokens, weights)
