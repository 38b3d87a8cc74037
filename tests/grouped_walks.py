"""What the grouped kernels read of the experts' matrices: their own visits and index maps, on numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.kernels import grouped_gpu, grouped_tpu

BYTES = 2  # of a number


def routings(rng: np.random.Generator, count: int, rows: int, experts: int, per_token: int) -> np.ndarray:
    """Returns the rows of each expert [count, E] in random routings. A row's experts all differ."""
    scores = rng.random((count, rows, experts))
    chosen = np.argpartition(scores, per_token, axis=-1)[..., :per_token]
    return np.stack([np.bincount(one.reshape(-1), minlength=experts) for one in chosen]).astype(np.int32)


def chosen(sizes: np.ndarray, inputs: int, outputs: int) -> np.ndarray:
    """Returns the bytes of the experts that have rows, of each routing."""
    return np.sum(sizes > 0, axis=1) * inputs * outputs * BYTES


def read_on_tpu(sizes: np.ndarray, rows: int, inputs: int, outputs: int) -> np.ndarray:
    """Returns the bytes of all blocks that come into the chip: those whose index differs from the one before."""
    padded = -(-rows // grouped_tpu.TILE) * grouped_tpu.TILE
    walks, counts = jax.vmap(functools.partial(grouped_tpu.visits, rows=padded))(jnp.asarray(sizes))
    axis = 2 if grouped_tpu.turned(inputs, outputs) else 1
    wide, _, where = grouped_tpu.matrix_blocks(axis, inputs, outputs, BYTES)
    read = []
    for walk, count in zip(zip(*map(np.asarray, walks), strict=True), np.asarray(counts), strict=True):
        total, last = 0, None
        for block in range(-(-outputs // wide)):
            at = np.stack(np.broadcast_arrays(*where(block, np.arange(count), *walk)))
            new = (
                1
                + np.any(np.diff(at, axis=1) != 0, axis=0).sum()
                - (last is not None and np.array_equal(last, at[:, 0]))
            )
            total, last = total + new * inputs * min(wide, outputs - block * wide) * BYTES, at[:, -1]
        read.append(total)
    return np.array(read)


def read_on_gpu(sizes: np.ndarray, rows: int, inputs: int, outputs: int) -> np.ndarray:
    """Returns the bytes that all programs read. A program has one block, over all inputs, and only one with rows reads."""
    most = max(rows, grouped_gpu.ROWS)
    walks = jax.vmap(functools.partial(grouped_gpu.visits, rows=most))(jnp.asarray(sizes))
    wide = grouped_gpu.width(outputs, grouped_gpu.WIDEST)
    read = []
    for walk in map(grouped_gpu.Visits, *map(np.asarray, walks)):
        busy = np.flatnonzero(walk.first < walk.end)
        blocks = [grouped_gpu.matrix_at(block, busy, walk) for block in range(outputs // wide)]
        read.append(sum(len(group) for group, _ in blocks) * inputs * wide * BYTES)
    return np.array(read)


READ = {"tpu": read_on_tpu, "cuda": read_on_gpu}
