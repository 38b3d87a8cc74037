"""A function of small arrays, computed by one kernel on NVIDIA GPUs.

A step of the engine has chains of sums over some hundred whole numbers. XLA makes a kernel of each sum, because a sum has
to end before its result is used. One block of threads, in Pallas-Triton, computes such a chain from its beginning to its end.

Registers hold 64 pairs a thread at most. Of 256 rows and slots, some are kept in the chip's nearest cache for a while.

The function is the same everywhere, so there is one law. It may use what Pallas-Triton lowers: no indexing of values, no
slices, no sort. What it reads by index are tables, which stay in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxrl_post.kernels.pallas_triton import pl, triton

MOST = 1 << 16  # pairs of numbers that a block of 1,024 threads compares at once, 64 of them each
WARPS = 32


def run(function: Callable, values: Any, tables: Sequence[jax.Array] = (), in_place: int = 0) -> Any:
    """Returns function(values, *reads): XLA's form.

    Args:
      function: (values, *reads) -> a tree of arrays. A read takes an index for each axis of its table, arrays of equal shape that
        lie inside the table, and returns the table's numbers there.
      in_place: leaves of values, the first ones, in whose memory a kernel may write the first leaves of the result.
    """
    return function(values, *map(_read, tables))


def _read(table: jax.Array) -> Callable:
    return lambda *index: table[index]


def fits(values: Any) -> bool:
    """Returns whether a kernel serves these values: lengths are powers of 2, and no two make more than MOST pairs."""
    sizes = [size for x in jax.tree.leaves(values) for size in x.shape]
    return all(size & (size - 1) == 0 for size in sizes) and max(sizes) ** 2 <= MOST


def run_as_kernel(
    function: Callable, values: Any, tables: Sequence[jax.Array] = (), in_place: int = 0, *, interpret: bool = False
) -> Any:
    """Returns what `run` returns, by one kernel. Values that do not fit one are computed by XLA."""
    made = jax.eval_shape(functools.partial(run, function), values, tables)
    if not fits((values, made)):
        return run(function, values, tables)
    given, tree = jax.tree.flatten(values)
    shapes, out_tree = jax.tree.flatten(made)

    def kernel(*refs: Any) -> None:
        own, seen = refs[: len(given)], refs[len(given) : len(given) + len(tables)]
        found = function(tree.unflatten([ref[...] for ref in own]), *map(_load, seen))
        for ref, x in zip(refs[len(given) + len(tables) :], jax.tree.leaves(found), strict=True):
            ref[...] = x

    out = pl.pallas_call(
        kernel,
        out_shape=shapes,
        input_output_aliases={at: at for at in range(in_place)},
        compiler_params=triton.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name=_name(function),
    )(*given, *tables)
    return out_tree.unflatten(out)


def _load(ref: Any) -> Callable:
    return lambda *index: triton.load(ref.at[index])


def _name(function: Callable) -> str:
    return getattr(function, "func", function).__name__.strip("_")
