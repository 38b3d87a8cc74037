"""Rollouts of which a test needs little: what is not given of a token is zero, and every token was sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl_post.ring.types import Finish, Prompt, Rollout, RolloutId


def rollout(
    id: RolloutId, prompt: Prompt, tokens: Sequence, *, finish: Finish = Finish.EOS, clock: tuple = (0, 0), **given
) -> Rollout:
    """`clock`: of its start and its end. `given`: arrays, one value a token."""
    zeros = np.zeros(len(tokens))
    fields = dict.fromkeys(("logprobs", "entropies", "versions", "drafted"), zeros) | {"sampled": zeros == 0} | given
    return Rollout(
        id=id, prompt=prompt, tokens=tokens, finish=finish, start_clock=clock[0], finish_clock=clock[1], **fields
    )
