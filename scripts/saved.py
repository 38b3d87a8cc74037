"""What checkpoints of two runs hold, compared by their bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def differing(one: Path, two: Path) -> list[str]:
    """Returns the names of the final weights, moments and counters whose bytes differ, as Orbax reads them.

    `one` and `two` are the folders `arrays` of two steps. Whatever devices they lay on, they are read onto one.
    """
    first, second = _arrays(one.absolute()), _arrays(two.absolute())
    return sorted(first.keys() ^ second.keys()) + [
        name for name in sorted(first.keys() & second.keys()) if first[name].tobytes() != second[name].tobytes()
    ]


def _arrays(path: Path) -> dict[str, Any]:
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {}
    for name, kind in json.loads((path.parent / "about.json").read_text())["arrays"].items():
        dtype, _, shape = kind.rstrip("]").partition("[")
        like[name] = jax.ShapeDtypeStruct([int(size) for size in shape.split(",") if size], dtype, sharding=here)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        found = reader.restore(path, args=ocp.args.StandardRestore(like))
    return {name: np.asarray(leaf) for name, leaf in found.items()}
