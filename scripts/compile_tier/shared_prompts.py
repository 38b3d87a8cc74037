"""Counts an update of groups of long prompts, with shared prompts and without, as JSON.

    python scripts/compile_tier/shared_prompts.py SLICE PROMPT ANSWER TOKENS

SLICE is one of STEPS. Groups of 8 rollouts are packed in rows of TOKENS as the learner packs them. Without shared prompts
each rollout has a row of its own length: no flat row needs less. The train step of the model is compiled for the slice.
FLOPs and bytes of a row are counted in the compiled text (scripts/traffic.py), times the rows that the groups need. The
kernels count by the blocks that the packed texts make meet. Run it with the Python of the compile tier.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]
STEPS = {"v6e-16": (1, 16, 1), "8xh100": (1, 8, 1)}
MODEL, GROUP, GROUPS = "qwen2_5_1_5b", 8, 56  # so many groups fill rows of both layouts


def update(where: str, prompt: int, answer: int, tokens: int, shared: bool) -> dict[str, float]:
    """Returns FLOPs, bytes and rows of an update of GROUPS groups, and seconds of the compiler. Rows have `tokens`.

    A device has as many tokens at a time with shared prompts as without, to a row."""
    import kernel_costs
    import test_train
    import traffic

    from jaxrl_post.kernels import flash_gpu, flash_tpu
    from jaxrl_post.models.presets import PRESETS

    at_once = 1 if shared else tokens // (prompt + answer)
    tokens = tokens if shared else prompt + answer
    step, model = test_train.Step(MODEL, where, STEPS[where], tokens, rows=at_once, shared=shared), PRESETS[MODEL]
    made, seconds, *_ = test_train.compiled(step)
    rows, batches = packed(tokens, prompt, answer, shared)
    gpu = where.endswith("h100")
    if gpu:
        tile = flash_gpu.TILES[model.head_dim]
        sizes = {
            "forward": (tile.forward.queries, tile.forward.keys),
            "queries": (tile.by_queries.queries, tile.by_queries.keys),
            "keys": (tile.by_keys.keys, tile.by_keys.queries),
        }
    else:
        blocks = math.gcd(tokens, flash_tpu.OWN), math.gcd(tokens, flash_tpu.OTHER)
        sizes = dict.fromkeys(("forward", "queries", "keys"), blocks)
    heads = model.heads, model.kv_heads, model.head_dim
    kernels = kernel_costs.PACKED_ROWS
    if gpu or shared:
        name = "flash" if gpu else "branches"
        kernels = kernel_costs.walked(name, met(batches, sizes), sizes, *heads)
    found = traffic.count(made.as_text(), kernels)
    assert not found.unknown, found.unknown
    return {
        "rows": rows,
        "tflop": rows / at_once * found.flops() / 1e12,
        "gb": rows / at_once * found.bytes() / 1e9,
        "compile_s": seconds,
    }


def packed(tokens: int, prompt: int, answer: int, shared: bool) -> tuple[int, list]:
    """Returns the rows that GROUPS groups need, and where tokens of each row are seen until, and their positions."""
    import made_groups
    import numpy as np

    from jaxrl_post.ring.types import Group, Prompt
    from jaxrl_post.trainer import packing

    groups = []
    for g in range(GROUPS):
        own = Prompt(id=f"p{g}", tokens=np.arange(prompt))
        some = tuple(made_groups.rollout(own, i, np.arange(answer)) for i in range(GROUP))
        groups.append(Group(prompt=own, rollouts=some, rewards=[0] * GROUP, scored=[True] * GROUP))
    batches, _ = packing.pack(groups, None, rows=1, tokens=tokens, shared=shared)
    return len(batches), [(_until(batch), batch.positions) for batch in batches]


def _until(batch):
    """Returns where each token is no longer seen. Of segments alone it is their end."""
    import numpy as np

    if batch.until is not None:
        return batch.until
    ids, places = batch.segment_ids[0], np.arange(batch.segment_ids.shape[1])
    return np.where(ids > 0, np.searchsorted(np.where(ids > 0, ids, ids.max() + 1), ids, side="right"), places + 1)[
        None
    ]


def met(batches: list, sizes: dict[str, tuple[int, int]]) -> dict[str, float]:
    """Returns the pairs of blocks that meet in a row, by walk: the mean of all rows."""
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_post.kernels.branches import of_rows, visits

    out = {}
    for walk, (own, other) in sizes.items():
        queries, keys = (other, own) if walk == "keys" else (own, other)
        counts = [
            int(np.sum(visits(of_rows(*map(jnp.asarray, one)), queries, keys, None)[walk == "keys"].counts))
            for one in batches
        ]
        out[walk] = sum(counts) / len(counts)
    return out


def main(where: str, *sizes: str) -> dict:
    """Returns the figures of both. sizes: PROMPT, ANSWER and TOKENS."""
    begun = time.monotonic()
    found = {name: update(where, *map(int, sizes), shared) for name, shared in (("flat", False), ("shared", True))}
    return {f"{key}_{name}": value for name, own in found.items() for key, value in own.items()} | {
        "fewer_flop": found["flat"]["tflop"] / found["shared"]["tflop"],
        "fewer_bytes": found["flat"]["gb"] / found["shared"]["gb"],
        "wall_s": time.monotonic() - begun,
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
