"""The independent sampler that the engine is held against: one full numpy forward per token, no cache, its own noise.

It shares no code with the engine. Threefry is written with Python integers after Salmon et al. (SC 2011), the law after
the text of kernels/sampling.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy_llama

MASK = 0xFFFFFFFF
# A key or a value between two codes may be rounded to either, by the order of a sum.
CLOSE = 0.05 if numpy_llama.ROUNDS in ("kv", "both") else 1e-4


def threefry(key: tuple[int, int], counter: tuple[int, int]) -> int:
    """First output word of threefry-2x32-20."""
    k = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + k[0]) & MASK, (counter[1] + k[1]) & MASK
    for i in range(20):
        turn = (13, 15, 26, 6, 17, 29, 16, 24)[i % 8]
        x = (x + y) & MASK
        y = (((y << turn) | (y >> (32 - turn))) & MASK) ^ x
        if i % 4 == 3:
            j = i // 4 + 1
            x, y = (x + k[j % 3]) & MASK, (y + k[(j + 1) % 3] + j) & MASK
    return x


def gumbel(seed, position: int, word: int) -> float:
    u = min(((threefry((int(seed[0]), int(seed[1])), (position, word)) >> 1) + 0.5) * 2.0**-31, 1 - 2.0**-24)
    return -math.log(-math.log1p(-u))


@dataclass
class Draw:
    """A token with its log-prob, the entropy, and the score gap to the runner-up, tile or id, whichever is closer. `edge`:
    how far an id is from being cut off or let in by top-k (in scores) or top-p (in mass)."""

    token: int
    logprob: float
    entropy: float
    gap: float
    edge: float = math.inf
    kept: tuple[int, ...] = ()  # the ids that the cuts left, where something is cut


def cut(scores: np.ndarray, temperature: float, top_k: int, top_p: float) -> tuple[np.ndarray, float]:
    """Which ids may be drawn, [V] bool, by sorting; and how far that is from being another set."""
    z, edge = scores.astype(np.float64) / temperature, math.inf
    order = np.argsort(-z, kind="stable")
    lowest, falling = -math.inf, z[order]
    if 0 < top_k < z.size:
        lowest = falling[top_k - 1]
        below = falling[falling < lowest]
        edge = float(lowest - below[0]) if below.size else edge
    if top_p < 1:
        held = falling[falling >= lowest]
        mass = np.cumsum(np.exp(held - held[0]))
        mass /= mass[-1]
        last = int(np.argmax(mass >= top_p))
        edge = min([edge, *np.abs(mass[:-1] - top_p).tolist()])
        lowest = held[last]
    return z >= lowest, edge


def draw(
    scores: np.ndarray,
    seed,
    position: int,
    temperature: float,
    tile_tag: int = 2**31,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Draw:
    """One token of sampling law 1 from scores [V]."""
    edge, kept = math.inf, ()
    if temperature > 0 and (top_k or top_p < 1):
        allowed, edge = cut(scores, temperature, top_k, top_p)
        scores, kept = np.where(allowed, scores, -np.inf), tuple(np.flatnonzero(allowed).tolist())
    z = scores.astype(np.float64) / (temperature or 1.0)
    logp = numpy_llama.log_softmax(z)
    entropy = float(-(np.exp(logp) * np.where(logp > -np.inf, logp, 0.0)).sum())
    if temperature == 0:
        first, gap = _best(z)
        return Draw(first, float(logp[first]), entropy, gap)
    tiles = [np.arange(a, min(a + 1024, z.size)) for a in range(0, z.size, 1024)]
    tile_scores = [_lse(z[ids]) + gumbel(seed, position, tile_tag + t) for t, ids in enumerate(tiles)]
    best_tile, tile_gap = _best(np.array(tile_scores))
    ids = tiles[best_tile]
    inside, gap = _best(np.array([z[i] + gumbel(seed, position, int(i)) for i in ids]))
    token = int(ids[inside])
    return Draw(token, float(logp[token]), entropy, min(gap, tile_gap), edge, kept)


def _lse(z: np.ndarray) -> float:
    return float(np.logaddexp.reduce(z)) if (z > -np.inf).any() else -math.inf


def _best(scores: np.ndarray) -> tuple[int, float]:
    best = int(np.argmax(scores))
    others = np.delete(scores, best)
    return best, float(scores[best] - others.max()) if others.size else math.inf


def generate(
    params, config, prompt, seed, max_tokens: int, temperature: float, ends=(), top_k: int = 0, top_p: float = 1.0
) -> list[Draw]:
    """An answer, token by token."""
    text, draws = [int(t) for t in prompt], []
    while len(draws) < max_tokens and not (draws and draws[-1].token in ends):
        scores = numpy_llama.forward(params, config, text)[-1]
        draws.append(draw(scores, seed, len(text), temperature, top_k=top_k, top_p=top_p))
        text.append(draws[-1].token)
    return draws


def disagreement(
    draws: list[Draw], tokens, logprobs, entropies, *, near: float = CLOSE, close: float = CLOSE, records=None, most=16
) -> str:
    """Returns one sentence about the first place where an answer and the sampler disagree, or an empty text.

    Tokens must be equal up to a first difference that is a near tie. Up to there log-probs and entropies must lie within `close`.
    `records`: the ids that the engine recorded for each token, in order. A token that keeps more than `most` ids has none.
    """
    for i, (want, token) in enumerate(zip(draws, tokens)):
        if want.token != token:
            return (
                ""
                if min(want.gap, want.edge) < near
                else (f"token {i} is {token}, sampler says {want.token} by a gap of {want.gap:.2e}")
            )
        if want.edge < near:
            continue  # one id more or less is allowed: another log-prob and entropy, and the same token
        if abs(want.logprob - logprobs[i]) > close:
            return f"log-prob {i} is {logprobs[i]}, sampler says {want.logprob}"
        if abs(want.entropy - entropies[i]) > close * max(1.0, want.entropy):
            return f"entropy {i} is {entropies[i]}, sampler says {want.entropy}"
        if records is not None and records[i] != list(want.kept if len(want.kept) <= most else ()):
            return f"ids {records[i]} are recorded for token {i}, sampler keeps {want.kept}"
    return "" if len(draws) == len(tokens) else f"length {len(tokens)}, sampler says {len(draws)}"
