"""Environments without processes, and conversations of the independent sampler, for the tests of turns."""

from __future__ import annotations

import hashlib

import engine_lab as lab
import numpy as np
import sampler

from jaxrl_post.ring.types import Request, Rollout


class Scripted:
    """protocols.Environments whose words follow from the tokens alone. About one turn in four ends a conversation.

    `started` counts the turns that were handed over, `joined` lists the ids in the order of joining."""

    def __init__(self, vocab: int = lab.TINY.vocab_size):
        self._vocab, self.started, self.joined, self._open = vocab, 0, [], {}

    def start(self, rollout: Rollout) -> None:
        self.started += 1
        self._open[rollout.id] = words(rollout.tokens, self._vocab)

    def join(self, rollout: Rollout) -> list[int] | None:
        self.joined.append(rollout.id)
        return self._open.pop(rollout.id)


def words(tokens: np.ndarray, vocab: int = lab.TINY.vocab_size) -> list[int] | None:
    """Returns one to five observed tokens behind these, or None where the conversation ends."""
    noise = hashlib.blake2b(np.asarray(tokens, "<i4").tobytes(), digest_size=8).digest()
    return None if noise[0] < 64 else [byte % vocab for byte in noise[1 : 2 + noise[7] % 5]]


def reference(request: Request, params, config=lab.TINY) -> tuple[list[sampler.Draw], list[bool]]:
    """Returns the independent sampler's conversation, and which of its tokens are sampled.

    Every turn is sampled from the text so far, as if that were a prompt."""
    law, draws, sampled = request.sampling, [], []
    prompt = request.prompt.tokens
    while len(draws) < request.max_tokens:
        text = np.concatenate([prompt, np.array([d.token for d in draws], np.int32)])
        left = request.max_tokens - len(draws)
        turn = sampler.generate(
            params, config, text, request.seed, left, law.temperature, law.eos_ids, law.top_k, law.top_p
        )
        draws += turn
        sampled += [True] * len(turn)
        ended = bool(turn) and turn[-1].token in law.eos_ids
        more = words(np.array([d.token for d in draws])) if ended else None
        if more is None or len(draws) + len(more) >= request.max_tokens:
            break
        draws += [sampler.Draw(token, 0.0, 0.0, 1.0) for token in more]
        sampled += [False] * len(more)
    return draws, sampled
