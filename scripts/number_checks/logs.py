"""The rollouts of a run's log as bits, and how many of two runs differ."""

from __future__ import annotations

from pathlib import Path

from jaxrl_post.runs import rollout_log

Bits = dict[tuple, tuple]


def rollouts(place: Path) -> Bits:
    """Name -> the tokens, log-probs, entropies and versions of every training rollout, as bytes."""
    return {
        tuple(one.id): tuple(x.tobytes() for x in (one.tokens, one.logprobs, one.entropies, one.versions))
        for file in sorted((place / "rollouts").glob("*.npz"))
        for group in rollout_log.read(file)
        for one in group.rollouts
    }


def differing(one: Bits, other: Bits) -> int:
    """How many rollouts are not in both with the same bits."""
    return sum(one.get(name) != other.get(name) for name in one.keys() | other.keys())
