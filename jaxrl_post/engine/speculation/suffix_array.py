"""Suffix arrays over a prompt's last rollouts: how a text continued the last time it occurred.

Source: RhymeRL (arXiv 2508.18588, section HistoSpec), which uses a suffix tree. Three flat arrays take 12 bytes for
each pool token. The pool: rollouts one after another, each behind the end of its prompt and before a separator -1.
The order: the suffixes by their first 32 tokens. The priority: a running sum in that order, which gives the suffix in
the weighted middle of an interval. Invariant: a function of rollouts and rewards alone. Numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

DEPTH = 32
SEPARATOR = -1
TAIL = 7  # tokens of the prompt before each rollout: the longest match
STEPS = 15  # priorities are whole numbers, 1 to 1 + STEPS
MOST = ((1 << 30) - 1) // (1 + STEPS)  # suffixes: an int32 holds twice the sum of their priorities


class Suffixes(NamedTuple):
    """`pool` int32[n]. `order` int32[n]: starts of the sorted suffixes. `priority` int32[n]: running sum in `order`."""

    pool: np.ndarray
    order: np.ndarray
    priority: np.ndarray


def build(
    rollouts: Sequence[np.ndarray], context: np.ndarray, priorities: Int[np.ndarray, " G"] | None = None
) -> Suffixes:
    """Returns the suffix array of one epoch's rollouts, int32[T] each.

    `context`: the end of the prompt. `priorities` None: 1 each; then the middle of an interval is in its most frequent
    branch, where one branch has the majority.

    Raises:
      ValueError: the rollouts have more tokens than sums of priorities can count.
    """
    tail = np.asarray(context, np.int32)[-TAIL:]
    end = np.array([SEPARATOR], np.int32)
    pool = np.concatenate([np.zeros(0, np.int32), *(part for answer in rollouts for part in (tail, answer, end))])
    sizes = [tail.size + len(answer) + 1 for answer in rollouts]
    if pool.size > MOST:
        raise ValueError(
            f"drafting from suffixes: {len(rollouts)} rollouts of a prompt have {pool.size:,} tokens, at most {MOST:,}; "
            "a smaller scheduler.group_size has fewer, and speculation.drafter='off' needs none"
        )
    weight = np.repeat(np.ones(len(rollouts), np.int64) if priorities is None else priorities, sizes)
    order = sort(pool)
    return Suffixes(pool.astype(np.int32), order, np.cumsum(weight[order]).astype(np.int32))


def sort(pool: np.ndarray) -> Int[np.ndarray, " n"]:
    """Returns int32[n]: the suffixes of int tokens >= -1, sorted by their first 32 tokens.

    A shorter suffix comes first; equal ones are sorted by their start. Prefix doubling (Manber and Myers 1993), stopped
    at depth 32."""
    n = pool.size
    rank = np.unique(pool, return_inverse=True)[1].astype(np.int64) + 1  # 0 stands for the end
    order, depth = np.argsort(rank, kind="stable"), 1
    while depth < DEPTH:
        behind = np.zeros(n, np.int64)
        behind[: max(n - depth, 0)] = rank[depth:]
        both = rank * (n + 2) + behind
        order = np.argsort(both, kind="stable")
        sorted_ = both[order]
        rank[order] = np.cumsum(np.concatenate([np.ones(min(n, 1), bool), sorted_[1:] != sorted_[:-1]]))
        depth *= 2
    return order.astype(np.int32)


def priorities(rewards: Float[np.ndarray, " G"], scored: Bool[np.ndarray, " G"]) -> Int[np.ndarray, " G"]:
    """Returns int64[G]: 1 for the lowest reward to 16 for the highest, linear between.

    All are 1 where rewards are equal. A rollout without a score counts like the lowest.
    """
    out = np.ones(rewards.size, np.int64)
    known = rewards[scored].astype(np.float64)
    if known.size and known.max() > known.min():
        out[scored] += np.rint(STEPS * (known - known.min()) / (known.max() - known.min())).astype(np.int64)
    return out
