"""The kernel that samples, against its reference, and its time beside that of reading the logits once."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from gpu import timing
from gpu.part import Part

from jaxrl_post.kernels import choice, hardware, sampling, thresholds, verify

ROWS = (32, 160, 1280)  # 32 rollouts; with 4 drafts; 256 rollouts with 4 drafts
VOCABULARY = 152064


def inputs(rows: int, vocab: int, seed: int = 0) -> tuple:
    """Returns logits of a standard deviation of 3, seeds, positions and temperatures."""
    noise = np.random.default_rng(seed)
    logits = 3 * jax.random.normal(jax.random.key(seed), (rows, vocab), jnp.float32)
    return (
        logits,
        jnp.asarray(noise.integers(0, 2**32, (rows, 2), dtype=np.uint32)),
        jnp.asarray(noise.integers(0, 4096, rows), jnp.int32),
        jnp.asarray(np.resize([1.0, 0.7, 0.0, 1.3], rows), jnp.float32),
    )


def against_reference(part: Part, shapes=((3, 1024), (160, 4100), (256, VOCABULARY))) -> None:
    """Compares tokens. They may differ at near ties only, where the tokens' scores are equal to 1e-3."""
    for rows, vocab in shapes:
        if not part.wants(f"verify_sample.cut_{rows}x{vocab}.max_plain_difference", 5.0):
            continue
        logits, seeds, at, heat = inputs(rows, vocab)
        top_k = jnp.asarray(np.resize([0, 5, 50, 512, 2 * vocab], rows), jnp.int32)
        top_p = jnp.asarray(np.resize([1.0, 0.9, 0.99], rows), jnp.float32)
        here, other = (finding(rows, vocab, bisected=one)(logits, heat, top_k, top_p) for one in (False, True))
        lowests = {"whole": jnp.full(rows, -jnp.inf), "cut": here}
        others = np.any(np.asarray((logits >= here[:, None]) != (logits >= other[:, None])), axis=1)
        part.figure(f"thresholds.{rows}x{vocab}.rows_cut_elsewhere", int(others.sum()), at_most=max(1, rows // 100))
        for name, lowest in lowests.items():
            got, want = (
                jax.jit(run)(logits, seeds, at, heat, lowest) for run in (verify.verify_sample, sampling.sample)
            )
            same = np.asarray(got.tokens == want.tokens)
            key = f"verify_sample.{name}_{rows}x{vocab}"
            part.figure(f"{key}.tokens_that_differ", int((~same).sum()), at_most=max(1, rows // 100))
            for field in ("logprobs", "entropies", "plain"):
                gap = np.abs(np.asarray(getattr(got, field)) - np.asarray(getattr(want, field)))[same]
                part.figure(f"{key}.max_{field}_difference", float(gap.max()), at_most=1e-3)


def finding(rows: int, vocab: int, *, bisected: bool = False) -> Callable:
    """Returns what finds thresholds in a run on this device, or the bisection. On a CPU that is the same."""
    platforms = hardware.platforms(jax.devices()[0], hardware.without_flash)
    forms = {} if bisected else choice.of_thresholds(rows, vocab, None, platforms)
    return jax.jit(lambda *cuts: thresholds.find(*cuts, forms))


def times(part: Part, rows_of=ROWS, vocab: int = VOCABULARY) -> None:
    """Times the kernel, its reference, and the thresholds of top-k and top-p."""
    for rows in rows_of:
        key = f"verify_sample.{rows}_rows"
        if not part.wants(key, 10.0):
            continue
        given = inputs(rows, vocab)
        floor = 4 * rows * vocab / part.bandwidth
        took = timing.seconds(jax.jit(verify.verify_sample), *given)
        few, many, none = (jnp.full(rows, k, jnp.int32) for k in (50, 2000, 0))
        share = jnp.full(rows, 0.9, jnp.float32)
        here, bisected = (finding(rows, vocab, bisected=one) for one in (False, True))

        part.figure(
            key,
            {
                "ms": 1e3 * took,
                "floor_ms": 1e3 * floor,
                "share_of_bandwidth": floor / took,
                "reference_ms": 1e3 * timing.seconds(jax.jit(sampling.sample), *given),
                "thresholds_ms": 1e3 * timing.seconds(here, given[0], given[3], few, share),
                "thresholds_top_p_alone_ms": 1e3 * timing.seconds(here, given[0], given[3], none, share),
                "thresholds_top_k_2000_ms": 1e3 * timing.seconds(here, given[0], given[3], many, share),
                "thresholds_bisected_ms": 1e3 * timing.seconds(bisected, given[0], given[3], few, share),
            },
        )
