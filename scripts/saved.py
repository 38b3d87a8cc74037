"""What checkpoints of two runs hold, compared by their bytes."""

from __future__ import annotations

from pathlib import Path


def differing(one: Path, two: Path) -> list[str]:
    """Returns the names of the final weights, moments and counters whose bytes differ, as Orbax reads them."""
    import numpy as np
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        first, second = (reader.restore(path.absolute()) for path in (one, two))
    return sorted(first.keys() ^ second.keys()) + [
        name
        for name in sorted(first.keys() & second.keys())
        if np.asarray(first[name]).tobytes() != np.asarray(second[name]).tobytes()
    ]
