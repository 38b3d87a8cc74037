"""python scripts/refused_publish.py FILE --config=... : a run of main whose third publish is tried with wrong weights
first.

Each process writes FILE.N.json: for each check the error and the version in use after it. Weights that are not finite
are so in one process alone. The others have to refuse them all the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NUMBER = 3


def run(file: str, arguments: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    import jax

    from jaxrl_post.engine.row_engine import RowEngine
    from jaxrl_post.main import main

    swap, calls = RowEngine.swap, []

    def trying(engine: RowEngine, params, version: int) -> None:
        calls.append(1)
        if len(calls) == NUMBER:
            out = {}
            for check, (wrong, number) in _wrong(params, version, engine.version).items():
                try:
                    swap(engine, wrong, number)
                    said = "nothing"
                except ValueError as error:
                    said = str(error)
                out[check] = {"said": said, "version": engine.version, "before": version - 1}
            Path(f"{file}.{jax.process_index()}.json").write_text(json.dumps(out))
        swap(engine, params, version)

    RowEngine.swap = trying
    return main(arguments)


def _wrong(params, version: int, current: int) -> dict:
    """Returns the wrong weights, made on the host, as nothing may be compiled any more."""
    import jax
    import numpy as np

    from jaxrl_post.parallel import mesh

    with jax.transfer_guard("allow"):
        norm, split = params["final_norm"], params["embed"]  # one lies whole on every process, the other in pieces
        factor = np.float32(np.nan if jax.process_index() == jax.process_count() - 1 else 1.0)
        pieces = [jax.device_put(np.asarray(shard.data) * factor, shard.device) for shard in split.addressable_shards]
        local = jax.make_array_from_single_device_arrays(split.shape, split.sharding, pieces)
        longer = mesh.put(np.ones(2 * norm.size, np.float32), norm.sharding)
        return {
            "tree": ({name: leaf for name, leaf in params.items() if name != "final_norm"}, version),
            "shape": ({**params, "final_norm": longer}, version),
            "finite": ({**params, "embed": local}, version),
            "version": (params, current),
        }


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
