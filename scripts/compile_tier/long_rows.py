"""Compiles the train step of a preset with long rows for a slice that is not there, and counts what it does, as JSON.

    python scripts/compile_tier/long_rows.py CHOICE SLICE

CHOICE is one of configs/models/long_qwen3.py. The step is a micro-batch, forward and backward, at full depth. Run it with the
Python of the compile tier. All rows are one text, the dearest case. Of a device:

- memory: the program's own, and what the learner holds beside it.
- FLOPs over useful ones: 6 a weight and token, and causal attention (test_train.useful).
- attention: bytes that its kernels move (scripts/kernel_costs.py), over those of kernels that read each key once for every
  block of queries that sees it.
- links: bytes of collectives, counted by their results, over their floor. It is matrices gathered twice in bfloat16 and their
  gradients summed once, the same of keys and values, and the head's activations. A sum counts whole: XLA:TPU writes one
  whose parts stay apart as a whole sum and a slice.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
CONFIG = "configs/models/long_qwen3.py"


def main(choice: str, where: str) -> dict[str, float]:
    import kernel_costs
    import traffic
    from targets import memory, shard_bytes
    from test_train import useful

    from jaxrl_post.config import load, resolve
    from jaxrl_post.launch.parts import build, inputs
    from jaxrl_post.launch.plan import chips, device_less
    from jaxrl_post.models import decoder

    there = chips.read(where)
    config = resolve(load(f"{ROOT / CONFIG}:{choice}"), platform=there.chip.platform)
    model = inputs.shape(config)
    devices = build.device_plan(config, list(device_less.mesh(there, (there.devices, 1, 1, 1)).devices.flat))
    learner = build.learner(config, model, decoder.abstract(model), devices)
    small, given = learner.jitted()["zeros"]
    small.lower(*given).compile()  # starts the compiler
    program, shapes = learner.jitted()["accumulate"]
    begun = time.process_time()
    compiled = program.lower(*shapes).compile()
    seconds, text = time.process_time() - begun, compiled.as_text()
    sizes = blocks(config, model, there.chip.platform)
    name = "flash" if there.chip.platform == "gpu" else "branches"
    heads = model.heads, model.kv_heads, model.head_dim
    found = traffic.count(text, kernel_costs.walked(name, met(config, sizes), sizes, *heads))
    assert not found.unknown, found.unknown
    kernels = found.bytes(r"attend/")
    kept = shard_bytes(learner.state) - shard_bytes(learner.params)
    used = memory(compiled)
    return {
        "cpu_s": seconds,
        "memory_mib": (used["total"] + kept) / 2**20,
        "hbm_mib": there.chip.memory / 2**20,
        "flops_over_useful": found.flops() * config.mesh.context / useful(model, config.batch.tokens),
        "gb": found.bytes() / 1e9,
        "attention_gb": kernels / 1e9,
        "links_gb": found.linked / 1e9,
        "links_over_floor": found.linked / link_floor(config, model),
    }


def blocks(config, model, platform: str) -> dict[str, tuple[int, int]]:
    """Returns tokens of the block that stays and of the one that is walked, by walk."""
    import math

    from jaxrl_post.kernels import flash_gpu, flash_tpu

    if platform == "gpu":
        tile = flash_gpu.TILES[model.head_dim]
        return {
            "forward": (tile.forward.queries, tile.forward.keys),
            "queries": (tile.by_queries.queries, tile.by_queries.keys),
            "keys": (tile.by_keys.keys, tile.by_keys.queries),
        }
    stretch = config.batch.tokens // (2 * config.mesh.context)
    return dict.fromkeys(
        ("forward", "queries", "keys"), (math.gcd(stretch, flash_tpu.OWN), math.gcd(stretch, flash_tpu.OTHER))
    )


def met(config, sizes: dict[str, tuple[int, int]]) -> dict[str, float]:
    """Returns the pairs of blocks that meet on a device whose row is one text, by walk.

    All devices have the same number: each has a stretch from the front of the row and its mirror image.
    """
    tokens, parts = config.batch.tokens, 2 * config.mesh.context
    out = {}
    for walk, (own, other) in sizes.items():
        queries, keys = (other, own) if walk == "keys" else (own, other)
        size = tokens // parts
        starts = [*range(0, size, queries), *range(tokens - size, tokens, queries)]  # of the first device
        out[walk] = sum(-(-(start + queries) // keys) for start in starts)
    return out


def link_floor(config, model) -> float:
    """Returns bytes of the collectives that a micro-batch needs on a device, counted by their results."""
    from jaxrl_post.models import cache_kinds

    m, tokens = config.mesh, config.batch.tokens
    rows = config.batch.rows // m.shards
    layer = model.embed * (2 * model.heads + 2 * model.kv_heads) * model.head_dim + 3 * model.embed * model.ffw
    matrices = model.layers * layer * 2
    entries = sum(one.entry for one in cache_kinds.paged(model.kept))
    keys = rows * tokens * entries * 2
    own = rows * tokens // m.context
    head = 2 * own * m.fsdp * model.embed * 2  # gathered, forward and backward
    return 3 * (matrices + keys) + head + own * model.embed * 4


if __name__ == "__main__":
    from jaxrl_post.launch.plan import device_less

    device_less.take_none()
    print(json.dumps(main(*sys.argv[1:])))
