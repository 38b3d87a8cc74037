"""Trains by a config until an evaluation has reached a reward: python scripts/until_reward.py FOLDER METRIC REWARD CONFIG [A.B=VALUE ...]

The run ends at the first row of metrics whose METRIC is at least REWARD, or after its steps. FOLDER/metrics.jsonl holds the curve.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import jaxrl_post  # noqa: E402


class Reached(Exception):
    """Ends the run."""


def main(arguments: Sequence[str]) -> int:
    folder, metric, reward, config, *overrides = arguments

    def look(row: dict) -> None:
        if row.get(metric, float("-inf")) >= float(reward):
            raise Reached

    try:
        jaxrl_post.train(config, callbacks=look, overrides=overrides, folder=folder)
    except Reached:
        print(f"{metric} has reached {reward}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
