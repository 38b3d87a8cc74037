"""python scripts/arrivals.py FILE --config=... : a run of main that checks the engine's weights at every publish.

Each process writes FILE.N.jsonl, a line for each publish. The line has the seconds, the bytes of the weights in the
engine's dtype, and the number of pieces that the engine holds in this process. It also has the number of pieces that
differ in a bit from what the learner has there. A process without devices that generate holds no piece.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(file: str, arguments: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    import jax

    from jaxrl_post import main
    from jaxrl_post.parallel.weight_sync import WeightLayout

    replace = WeightLayout.replace

    def watched(layout: WeightLayout, old, new, owned=True):
        jax.block_until_ready(new)
        begun = time.perf_counter()
        arrived = jax.block_until_ready(replace(layout, old, new, owned))
        seconds = time.perf_counter() - begun
        pieces, differing = _compared(arrived, new)
        line = {
            "seconds": seconds,
            "bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrived)),
            "pieces": pieces,
            "differing": differing,
        }
        with open(f"{file}.{jax.process_index()}.jsonl", "a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        return arrived

    WeightLayout.replace = watched
    return main.main(arguments)


def _compared(arrived, new) -> tuple[int, int]:
    """Returns the number of pieces of the engine's weights in this process, and of those that differ from the
    learner's.
    """
    import jax

    pieces = differing = 0
    with jax.transfer_guard("allow"):
        for leaf, own in zip(jax.tree.leaves(arrived), jax.tree.leaves(new), strict=True):
            whole = _on_host(own).astype(leaf.dtype)
            for shard in leaf.addressable_shards if isinstance(leaf, jax.Array) else ():
                pieces += 1
                differing += jax.device_get(shard.data).tobytes() != whole[shard.index].tobytes()
    return pieces, differing


def _on_host(own):
    """Returns the learner's array on every host. Where whole hosts learn, process 0 tells it to the others."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    from jaxrl_post.parallel import mesh, processes

    there = own.sharding.mesh
    if len(mesh.processes(there)) == jax.process_count():
        return multihost_utils.process_allgather(own, tiled=True)
    held = processes.gathered(own, own.dtype) if mesh.is_here(there) else np.empty(own.shape, own.dtype)
    return _told().broadcast_array(held)


@functools.cache
def _told():
    from jaxrl_post.parallel import exchange

    return exchange.Relays().open("arrivals", 0)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
