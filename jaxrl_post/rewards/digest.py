"""Hashes of scored texts and of the rollouts they belong to."""

from __future__ import annotations

import hashlib

import numpy as np

from jaxrl_post.types import Rollout


def of_parts(*parts: object) -> bytes:
    """Returns 16 bytes that depend on the texts of the parts and their order."""
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=16).digest()


def of_tokens(rollout: Rollout) -> str:
    """Returns a digest of a rollout's tokens, so that a journal's score is used for these tokens alone."""
    return of_ids(rollout.tokens)


def of_ids(tokens: np.ndarray) -> str:
    """Returns a digest of token ids."""
    return hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=8).hexdigest()
