"""Small simulations for tests: requests, and an engine that goes one token at a time."""

from __future__ import annotations

import numpy as np

from jaxrl_post.engine.step_cost import DecodeCost
from jaxrl_post.ring.types import Prompt, Request, RolloutId, Sampling
from jaxrl_post.simulate import length_distributions
from jaxrl_post.simulate.engine import SimEngine
from jaxrl_post.simulate.pace import LockStep
from jaxrl_post.simulate.texts import SimTexts, spans_of

CAP = 40
FLAT = DecodeCost(weights_s=1.0, token_s=0.0, row_s=0.0)


def texts(tv=0.0, cap=CAP) -> SimTexts:
    law = length_distributions.Mixture(
        length_distributions.LogNormal(2.0, 0.8), length_distributions.LogUniform(10.0, 100.0), 0.2
    )
    return SimTexts(lambda prompt: law, cap=cap, tv=tv)


def engine(*, tv=0.0, replicas=1, slots=4, pace=None, kv_tokens=None, cap=CAP) -> SimEngine:
    return SimEngine(texts(tv, cap), replicas=replicas, slots=slots, pace=pace or LockStep(FLAT), kv_tokens=kv_tokens)


def request(number, *, replica=0, prefix=None, mode="recompute", cap=CAP, attempt=0) -> Request:
    name = RolloutId(0, "train", 0, str(number), 0, attempt)
    return Request(
        rollout_id=name,
        prompt=Prompt(id=str(number), tokens=[1, 2]),
        seed=name.seed(),
        max_tokens=cap,
        sampling=Sampling(),
        replica=replica,
        prefix=prefix,
        prefix_mode=mode,
    )


class TokenByToken:
    """One token for each running answer a step; tokens are looked up position by position from `path`. KV is endless."""

    def __init__(self, texts, replicas, slots):
        self.texts, self.slots = texts, slots
        self.waiting = [[] for _ in range(replicas)]
        self.running = [[] for _ in range(replicas)]
        self.clock = self.version = 0

    def submit(self, requests):
        for asked in requests:
            self.waiting[asked.replica].append(asked)
        self.fill()

    def fill(self):
        for waiting, running in zip(self.waiting, self.running):
            while waiting and len(running) < self.slots:
                asked = waiting.pop(0)
                tokens, versions = [], []
                if asked.prefix is not None and asked.prefix_mode == "recompute":
                    tokens, versions = asked.prefix.tokens.tolist(), asked.prefix.versions.tolist()
                elif asked.prefix is not None and asked.prefix_mode == "verify":
                    new = self.texts.path(asked.rollout_id, asked.prompt, ((0, self.version),))
                    while (
                        len(tokens) < min(len(asked.prefix), new.length)
                        and asked.prefix.tokens[len(tokens)] == new.tokens(len(tokens) + 1)[-1]
                    ):
                        tokens.append(int(asked.prefix.tokens[len(tokens)]))
                        versions.append(self.version)
                running.append([asked, tokens, versions])

    def answer(self, asked, versions):
        return self.texts.path(asked.rollout_id, asked.prompt, spans_of(np.array([*versions, self.version])))

    def step(self):
        """(id, clock, tokens, versions) of what finished."""
        self.clock += 1
        out = []
        for running in self.running:
            for live in list(running):
                asked, tokens, versions = live
                length = self.answer(asked, versions).length
                if len(tokens) < length:
                    tokens.append(int(self.answer(asked, versions).tokens(len(tokens) + 1)[-1]))
                    versions.append(self.version)
                if len(tokens) == length:
                    running.remove(live)
                    out.append((asked.rollout_id, self.clock, tokens, versions))
        self.fill()
        return out

    def drop(self, ids):
        for queue in self.waiting:
            queue[:] = [asked for asked in queue if asked.rollout_id not in ids]
        for queue in self.running:
            queue[:] = [live for live in queue if live[0].rollout_id not in ids]
        self.fill()
