"""The real engine's tokens against the exact law, by chi-square; for the test and for the show spec-law.

The exact law is that of tests/sampler.py: numpy's full forward pass, softmax at the temperature, ids cut by sorting.
Every context that rollouts of one prompt can reach is one test. Their statistics and degrees of freedom are added.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import engine_lab as lab
import numpy as np
import sampler
import scipy.stats

from jaxrl_post.engine import row_numbers, row_program
from jaxrl_post.kernels import sampling, threefry, thresholds
from jaxrl_post.ring.types import Prompt, Request, RolloutId, Sampling

LAWS = {
    "plain": Sampling(),
    "temperature_0_7": Sampling(temperature=0.7),
    "top_k_5": Sampling(top_k=5),
    "top_p_0_8": Sampling(top_p=0.8),
    "all_three": Sampling(temperature=1.3, top_k=10, top_p=0.9),
}
FAVOURITES = 5
FEWEST = 5.0  # expected counts below it are pooled
PROMPT = (1, 0, 2, 1, 1, 0)


def model(vocab: int):
    return dataclasses.replace(lab.TINY, vocab_size=vocab)


@functools.cache
def engine(vocab: int):
    return lab.engine(
        lab.weights(0, model(vocab)),
        model(vocab),
        restricted=True,
        slots=64,
        pages=256,
        row_sizes=(256,),
        head_rows=256,
        max_length=32,
    )


def answers(engine, law: Sampling, count: int, length: int, *, attempt: int = 0, drafts=None) -> list[tuple[int, ...]]:
    """Returns `count` rollouts of at most `length` tokens of one prompt, each with its own seed.

    `drafts`: candidates, one text for each rollout."""
    prompt, asked = Prompt(id="law", tokens=PROMPT), []
    for sample in range(count):
        name = RolloutId(0, "train", 0, "law", sample, attempt)
        asked.append(Request(rollout_id=name, prompt=prompt, seed=name.seed(), max_tokens=length, sampling=law))
    if drafts is not None:
        asked = [lab.with_guesses(r, np.array(d, np.int32)) for r, d in zip(asked, drafts, strict=True)]
    engine.reset()
    engine.metrics()
    out = lab.run(engine, asked)
    return [tuple(out[r.rollout_id].tokens.tolist()) for r in asked]


def drafts(told: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns a few earlier rollouts, repeated.

    Candidates sampled anew for each rollout would follow the law themselves, and hide an acceptance without comparison.
    """
    return [told[i % FAVOURITES] for i in range(len(told))]


@functools.cache
def exact(vocab: int, text: tuple[int, ...], law: Sampling) -> np.ndarray:
    """Returns P(next token | prompt + text), [V] float64."""
    scores = sampler.numpy_llama.forward(lab.weights(0, model(vocab)), model(vocab), [*PROMPT, *text])[-1]
    allowed, edge = sampler.cut(scores, law.temperature, law.top_k, law.top_p)
    assert edge > 1e-5, "another seed of the weights: here rounding would decide which ids are allowed"
    return np.exp(sampler.numpy_llama.log_softmax(np.where(allowed, scores, -np.inf).astype(float) / law.temperature))


def by_context(vocab: int, law: Sampling, told: list[tuple[int, ...]], depth: int) -> float:
    """Returns the p-value of the first `depth` tokens, context by context."""
    statistic, freedom = 0.0, 0
    for length in range(depth):
        heads = Counter(t[:length] for t in told if len(t) > length)
        for head, visits in heads.items():
            counts = np.bincount([t[length] for t in told if len(t) > length and t[:length] == head], minlength=vocab)
            more, free = pearson(counts, visits * exact(vocab, head, law))
            statistic, freedom = statistic + more, freedom + free
    return float(scipy.stats.chi2.sf(statistic, freedom))


def by_sequence(vocab: int, law: Sampling, told: list[tuple[int, ...]], length: int) -> float:
    """Returns the p-value of whole rollouts against the product of the conditional laws, over all texts with an end."""
    expected, open_texts = {}, {(): 1.0}
    while open_texts:
        text, mass = open_texts.popitem()
        for token, p in enumerate(exact(vocab, text, law)):
            whole = (*text, token)
            ends = len(whole) == length or token in law.eos_ids
            (expected if ends else open_texts)[whole] = mass * p
    seen = Counter(told)
    assert set(seen) <= set(expected), "an answer that the law cannot give"
    return float(
        scipy.stats.chi2.sf(
            *pearson(np.array([seen[t] for t in expected]), len(told) * np.array(list(expected.values())))
        )
    )


def pearson(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Returns statistic and degrees of freedom, with small expected counts pooled. An impossible id that was seen gives
    infinity."""
    if counts[expected == 0].sum():
        return np.inf, 1
    order = np.argsort(-expected)
    counts, expected = counts[order], expected[order]
    often = int((expected >= FEWEST).sum())
    counts, expected = (np.append(x[:often], x[often:].sum()) for x in (counts, expected))
    if often and expected[-1] < FEWEST:
        counts, expected = (np.append(x[:-2], x[-2:].sum()) for x in (counts, expected))
    return float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1


# ---- planted faults, each on an engine compiled with it


def noise_shared_by_two_ids(monkeypatch):
    real = sampling.gumbel
    monkeypatch.setattr(sampling, "gumbel", lambda seeds, at, words: real(seeds, at, words & ~np.uint32(1)))


def a_draft_accepted_by_a_coin(monkeypatch):
    def accept(plan, guess, sampled, ended):
        jnp = row_program.jnp
        words = [x.astype(jnp.uint32) for x in (plan.head_slot, plan.head_rank, sampled, guess)]
        coin = (threefry.first_word(jnp, *words) & 1) == 1
        return real(plan, guess, jnp.where((guess >= 0) & coin, guess, sampled), ended)

    real = row_numbers.accept
    monkeypatch.setattr(row_numbers, "accept", accept)


def top_p_without_the_last_id(monkeypatch):
    real = thresholds.find
    monkeypatch.setattr(
        thresholds,
        "find",
        lambda logits, heat, k, p, *more: real(logits, heat, k, row_program.jnp.where(p < 1, p * 0.9, p), *more),
    )


FAULTS = (noise_shared_by_two_ids, a_draft_accepted_by_a_coin, top_p_without_the_last_id)
