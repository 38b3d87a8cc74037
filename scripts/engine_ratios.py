"""Ratios of the learner's probabilities to the engine's, of every trained token of a whole run in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import trained

from jaxrl_post import main
from jaxrl_post.trainer import learner as learners


def log_ratios(config: str, options: Iterable[str]) -> tuple[np.ndarray, int]:
    """Runs a config file and returns log-ratios [tokens], and how many steps old the oldest token was."""
    seen: list[np.ndarray] = []
    real = learners.mismatch

    def mismatch(pairs):
        seen.extend(old - rollout for old, rollout in pairs)
        return real(pairs)

    learners.mismatch = mismatch
    try:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "run"
            if main.main([f"--config={config}", f"--run-dir={place}", *(f"--config.{option}" for option in options)]):
                raise RuntimeError(f"the run of {config} failed")
            oldest = max(row["off_policy/max"] for row in trained.rows(place, "off_policy/max"))
    finally:
        learners.mismatch = real
    return np.concatenate(seen), oldest
