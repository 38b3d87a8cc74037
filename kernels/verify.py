"""verify_sample: sampling law 1, by the platform's kernel where one serves the shapes.

Every row samples from its own logits. A candidate is right when it equals the sample, so to verify is to sample. On TPU
and on NVIDIA GPUs a kernel reads the vocabulary once (sampling_tpu.py, sampling_gpu.py), and kernels/tiles.py samples
from its statistics. Elsewhere, and for shapes that no kernel serves, the reference runs (kernels/sampling.py).

Invariant: law and noise are the reference's on every platform. Sums may round differently, so tokens differ across
platforms at near ties only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxrl_post.kernels import hardware, sampling, sampling_gpu, sampling_tpu, tiles

KERNELS = {"tpu": sampling_tpu, "cuda": sampling_gpu}


class Shards(NamedTuple):
    """A vocabulary split over several devices.

    `run(draw)` is `draw(logits, ...)`, run by each device on its own ids, in rising order along the mesh axis `axis` of
    `count` devices."""

    run: Callable
    axis: str
    count: int


def verify_sample(
    logits: Float[Array, "R V"],
    seeds: UInt32[Array, "R 2"],
    positions: Int[Array, " R"],
    temperatures: Float[Array, " R"],
    thresholds: Float[Array, " R"] | None = None,
    shards: Shards | None = None,
    platforms: frozenset[str] = hardware.PLATFORMS,
    given: Int[Array, " R"] | None = None,
) -> sampling.Drawn:
    """Samples as sampling.sample does, or returns the log-probs of `given` ids.

    `shards`: how kernels, which the compiler cannot split, run on several devices. `platforms`: those whose kernel may
    be used."""
    rows, vocab = logits.shape
    here = vocab if shards is None else _padded(vocab, shards) // shards.count
    drawing = {
        platform: drawn_by(kernel.statistics, shards, drawing=kernel.sampled)
        for platform, kernel in KERNELS.items()
        if platform in platforms and kernel.serves(rows, here)
    }
    numbers = (seeds, positions, temperatures, thresholds, *(() if given is None else (given,)))
    if not drawing:
        return sampling.sample(logits, *numbers)
    return jax.lax.platform_dependent(logits, *numbers, default=sampling.sample, **drawing)


def drawn_by(statistics: Callable, shards: Shards | None = None, drawing: Callable = tiles.sampled) -> Callable:
    """Returns sampling.sample, made from a kernel for the statistics of tiles. drawing: a form of tiles.sampled."""

    def draw(logits, seeds, positions, temperatures, thresholds, given=None):
        found = _folded(statistics)(logits, *tiles.row_numbers(temperatures, thresholds))
        if shards is None or shards.count == 1:
            return drawing(logits, found, seeds, positions, temperatures, thresholds, given)
        first = jax.lax.axis_index(shards.axis) * found.mass.shape[-1]
        part = tiles.part(logits, found, seeds, positions, temperatures, thresholds, first)
        part = part if given is None else tiles.given_part(part, logits, given, temperatures, thresholds, first)
        return tiles.drawn(jax.lax.all_gather(part, shards.axis), temperatures)

    def spread(logits, *numbers):
        more = _padded(logits.shape[-1], shards) - logits.shape[-1]
        return shards.run(draw)(jnp.pad(logits, ((0, 0), (0, more)), constant_values=-jnp.inf), *numbers)

    return draw if shards is None else spread


def _padded(vocab: int, shards: Shards) -> int:
    """Returns the next vocabulary size that gives every device the same number of whole tiles."""
    whole = tiles.TILE * shards.count
    return -(-vocab // whole) * whole


def _folded(statistics: Callable) -> Callable:
    """Returns `statistics`, which under vmap is one call with all rows, because rows are independent."""
    run = jax.custom_batching.custom_vmap(statistics)

    @run.def_vmap
    def mapped(size, batched, logits, lowest, inverse):
        assert batched[0], "rows are mapped by their logits"
        outer, rows, vocab = logits.shape
        lowest, inverse = (jnp.broadcast_to(x, (outer, rows)).reshape(-1) for x in (lowest, inverse))
        found = statistics(logits.reshape(outer * rows, vocab), lowest, inverse)
        return tiles.Statistics(*(x.reshape(outer, rows, -1) for x in found)), tiles.Statistics(True, True, True, True)

    return run
