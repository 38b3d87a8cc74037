"""Experts over 2, 4 and 8 devices compute what one device does: sums, gradients of every leaf, and the engine's tokens.

First the layer of experts alone, with routes that load devices unevenly, in float64 and float32. Then the learner's gradient of a
model with experts, with routers' losses. Each distance is the largest per-leaf relative 2-norm. Last the engine: tokens of one
device but for near ties, and one layout's own bits under other batching. A planted fault, sums that devices do not
add up, must be far outside.
"""

from __future__ import annotations

import os

import engine_lab as lab
import divided_experts as arms
import jax
import numpy as np
import pytest

from jaxrl_post.parallel import mesh as meshes

MINUTES = 6.0
PLATFORM = "cpu"
BOUNDS = {np.float64: 1e-12, np.float32: 5e-6}
LAYERS = ("expert2", "expert4", "expert8", "expert2-tensor2", "data2-expert2", "fsdp2-expert2", "data2-expert2-tensor2")
LEARNERS = ("expert2", "expert4", "expert8", "fsdp2-expert4", "data2-expert2-tensor2")
ENGINES = ("expert2", "expert4", "expert8", "expert2-tensor2", "data2-expert2-tensor2")

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")


def show(record) -> None:
    for dtype, bound in BOUNDS.items():
        short, one = np.dtype(dtype).name, arms.layer(dtype, None)
        for split in LAYERS:
            for leaf, gap in arms.gaps(arms.layer(dtype, arms.sizes(split)), one).items():
                record.figure(f"{short}.layer.{split}{leaf}", gap, at_most=bound)
        one = arms.gradient(dtype, {})
        for split in LEARNERS:
            found = arms.gaps(arms.gradient(dtype, arms.sizes(split)), one)
            record.figure(f"{short}.learner.{split}", max(found.values()), at_most=bound)
    _engines(record)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "psum_scatter", lambda x, axis, tiled: x[: x.shape[0] // jax.lax.axis_size(axis)])
        found = arms.gaps(arms.layer(np.float64, arms.sizes("expert2")), arms.layer(np.float64, None))
    record.figure("planted_no_sum", max(found.values()), at_least=1e-3)


def _engines(record) -> None:
    asked = lab.requests(16, temperatures=(1.0,), seed=3)
    weights = lab.weights(0, arms.SAMPLED)

    def made(split: str):
        return lab.engine(weights, arms.SAMPLED, meshes.make_mesh(**arms.sizes(split)))

    one = lab.run(made("data1"), asked)
    for split in ENGINES:
        engine = made(split)
        requests = lab.requests(16, temperatures=(1.0,), seed=3, replicas=engine.layout.replicas)
        many = lab.run(engine, requests)
        near, worst = lab.first_differences(one, many, asked, weights, arms.SAMPLED)
        record.figure(f"engine.{split}.logprobs", worst, at_most=1e-5)
        record.figure(f"engine.{split}.score_gap_where_tokens_differ", max(near, default=0.0), at_most=1e-4)
        engine.reset()
        again = lab.run(engine, requests, submit_at=[3 * at for at in range(len(requests))])
        record.figure(f"engine.{split}.same_bits_one_after_another", lab.same_bits(again, many), equals=True)
