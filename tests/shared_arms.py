"""Groups whose rollouts share more than a prompt: conversations that branch. tests/ and scripts/shows/shared_prompts.py train on them."""

from __future__ import annotations

import dataclasses

import made_groups
import numpy as np

from jaxrl_post.models.model_config import Experts
from jaxrl_post.ring.types import Group, Prompt

SHARED = dict(shared_prompts=True)
MODELS = {
    "plain": made_groups.MODEL,
    "windows": dataclasses.replace(made_groups.MODEL, windows=(5, None)),
    "sinks": dataclasses.replace(made_groups.MODEL, windows=(7, None), sinks=True),
    "experts": dataclasses.replace(made_groups.MODEL, experts=Experts(4, 2, 12)),
}


def conversations(count: int = 3, seed: int = 5) -> list[Group]:
    """Groups of five rollouts of a prompt. The first one is sampled, observes and is sampled again. The second and the third
    continue its first answer: they were given its tokens. The fourth continues the third's. The fifth stands alone, with a
    first token like the first one's, which both sampled."""
    rng, out = np.random.default_rng(seed), []

    def some(low, high):
        return rng.integers(0, 32, int(rng.integers(low, high)))

    for g in range(count):
        prompt = Prompt(id=f"c{g}", tokens=some(3, 8))
        answer, seen, third = some(2, 5), some(1, 4), some(2, 4)
        texts = [
            [(answer, True), (seen, False), (some(1, 4), True)],
            [(answer, False), (seen, False), (some(1, 5), True)],
            [(answer, False), (some(1, 3), False), (third, True)],
        ]
        texts.append([*((part, False) for part, _ in texts[2]), (some(1, 4), True)])
        texts.append([(np.concatenate([answer[:1], some(1, 4)]), True)])
        rollouts = []
        for i, parts in enumerate(texts):
            tokens = np.concatenate([part for part, _ in parts])
            sampled = np.concatenate([np.full(len(part), own) for part, own in parts])
            how = dict(sampled=sampled, logprobs=-3 * rng.random(len(tokens)))
            rollouts.append(made_groups.rollout(prompt, i, tokens, **how))
        rewards = rng.integers(0, 4, len(texts)) / 3
        out.append(Group(prompt=prompt, rollouts=tuple(rollouts), rewards=rewards, scored=np.ones(len(texts), bool)))
    return out
