"""Groups of threads of a Hopper kernel: two that multiply, one that loads, and the ring of shared memory between them.

Each multiplying group (a warpgroup, of 128 threads) keeps rows of its own, and walks blocks of another side. The ring holds what
either needs. A group multiplies what its own rows need, and frees the rest unread. Every group meets every turn of the ring,
because barriers count turns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxrl_post.kernels import flash
from jaxrl_post.kernels.pallas_gpu import pl, plgpu

GROUPS = 2  # of threads that multiply; one more loads
ROWS = 64  # of one wgmma
# Registers of a thread that multiplies, and of one that loads. A multiprocessor has 512 for each of the threads of a group.
MULTIPLYING, LOADING = 240, 24
# A score that no query sees, and the peak before the first block. Their distance keeps weights of unseen keys at 0.
UNSEEN, LOWEST = -1e30, -1e29


@dataclass(frozen=True)
class Tile:
    """Sizes of one kernel.

    - own: rows of each group that multiplies
    - walked: rows of a block of the other side
    - places: blocks that the ring holds
    """

    own: int
    walked: int
    places: int


class Walk(NamedTuple):
    """Blocks of a walk: from `begin` to before `end` for both groups, and of these `first` to before `last` for this one."""

    begin: Any
    first: Any
    last: Any
    end: Any

    def run(self, places: int, step: Callable, skipped: Callable, start: Any, place: Any = 0) -> tuple[Any, Any]:
        """Returns the carry behind this group's blocks, and the place of the ring behind all blocks.

        Args:
          places: of the ring.
          step: (block, place, carry) -> carry. skipped: (place), for blocks of the other group alone.
          place: of the first block.
        """

        def following(place: Any) -> Any:
            return jnp.where(place == places - 1, 0, place + 1)

        def skip(_: Any, place: Any) -> Any:
            skipped(place)
            return following(place)

        def turn(block: Any, carry: tuple) -> tuple:
            return following(carry[0]), step(block, *carry)

        place = lax.fori_loop(self.begin, self.first, skip, place)
        place, made = lax.fori_loop(self.first, self.last, turn, (place, start))
        return made, lax.fori_loop(self.last, self.end, skip, place)


def over_keys(tile: Tile, first: Any, row: Any, base: Any, mine: Any) -> Walk:
    """Returns the walk of a group's queries.

    Args:
      first: [B, T], the first key that each query sees.
      base: the first query of both groups. mine: the first one of this group.
    """
    return Walk(
        begin=lax.div(first[row, base], tile.walked),
        first=lax.div(first[row, mine], tile.walked),
        last=lax.div(mine + tile.own - 1, tile.walked) + 1,
        end=lax.div(base + GROUPS * tile.own - 1, tile.walked) + 1,
    )


def over_queries(tile: Tile, last: Any, row: Any, base: Any, mine: Any) -> Walk:
    """Returns the walk of a group's keys, of one query head. last: [B, T], the last query that sees each key. Others: as above."""
    return Walk(
        begin=lax.div(base, tile.walked),
        first=lax.div(mine, tile.walked),
        last=lax.div(last[row, mine + tile.own - 1], tile.walked) + 1,
        end=lax.div(last[row, base + GROUPS * tile.own - 1], tile.walked) + 1,
    )


def beside(vector: Array, shape: tuple[int, int], axis: int) -> Array:
    """Returns a vector as a matrix, along `axis` of it."""
    return lax.broadcast_in_dim(vector, shape, [axis])


def smem(how: flash.How, *shape: int, dtype: Any) -> Any:
    """Returns matrices in shared memory, in the order that wgmma and the TMA know."""
    wide = 128 // jnp.dtype(dtype).itemsize
    order = (plgpu.TilingTransform((8, wide)), plgpu.SwizzleTransform(128)) if how.interpret is None else ()
    return plgpu.SMEM(shape, dtype, transforms=order)


def product(a: Any, b: Any, meanwhile: Callable[[], Any] = lambda: None) -> tuple[Array, Any]:
    """Returns a product of matrices in shared memory, and what `meanwhile` returns, which runs before the product is there."""

    def multiply(sums: Any) -> tuple[Array, Any]:
        plgpu.wgmma(sums, a, b)
        other = meanwhile()
        return sums[...], other

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), flash.wide(a)))


def call(
    how: flash.How, body: Callable, given: Sequence[Array], made: Any, scratch: tuple, grid: tuple, name: str
) -> Any:
    """Runs a kernel of (given, made, scratch). Blocks of the grid that share keys run beside each other."""
    return plgpu.kernel(
        body,
        out_type=made,
        scratch_types=scratch,
        grid=grid,
        grid_names=("row", "tile", "head"),
        num_threads=GROUPS + 1,
        thread_name="group",
        kernel_name=f"{name}_hopper",
        interpret=how.interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(*given)


class Place(NamedTuple):
    """Where a group works: the row of the batch, its head, and the group's number.

    - base: the first token of what all groups keep
    - mine: the first token of what this one keeps
    - some: its tokens
    """

    row: Any
    head: Any
    group: Any
    base: Any
    mine: Any
    some: Any

    @property
    def tokens(self) -> Array:
        """Returns this group's tokens, as numbers."""
        return self.mine + lax.broadcasted_iota(jnp.int32, (self.some.size,), 0)

    def of(self, ref: Any) -> Any:
        """Returns this group's part of an array [B, T, heads, H]."""
        return ref.at[self.row, self.some, self.head]

    def numbers(self, ref: Any, *, of_head: bool = True) -> Array:
        """Returns this group's numbers of an array [B, heads, T], or [B, T]."""
        at = (self.row, self.head, self.some) if of_head else (self.row, self.some)
        return plgpu.load(ref.at[at], optimized=False)


def place(tile: Tile, *, backwards: int = 0) -> Place:
    """Returns where this group works. backwards: the number of tiles, where the last one begins first: it has the most keys."""
    row, number, head, group = (lax.axis_index(name) for name in ("row", "tile", "head", "group"))
    base = (backwards - 1 - number if backwards else number) * (GROUPS * tile.own)
    mine = pl.multiple_of(base + group * tile.own, tile.own)
    return Place(row, head, group, base, mine, pl.ds(mine, tile.own))


def by_group(multiply: Callable[[], None], load: Callable[[], None]) -> None:
    """Runs what a group does: the first two multiply, and the last one loads."""

    @pl.when(lax.axis_index("group") < GROUPS)
    def _() -> None:
        plgpu.set_max_registers(MULTIPLYING, action="increase")
        multiply()

    @pl.when(lax.axis_index("group") == GROUPS)
    def _() -> None:
        plgpu.set_max_registers(LOADING, action="decrease")
        load()


class Ring(NamedTuple):
    """Shared memory of what walks, and of both lines of it the barriers of each place.

    - numbers: of each row that walks, one beside each matrix
    - ready, free: copied, and read by both groups
    """

    matrices: tuple[Any, Any]
    numbers: tuple[Any, ...]
    ready: tuple[Any, Any]
    free: tuple[Any, Any]

    def fill(self, fetch: Callable[[int, Any, Any], None], steps: Any) -> None:
        """Copies what each step needs, as soon as its place is free. Ends when all is read.

        fetch: (line, step, place), starts the copies of a line.
        """
        places = self.matrices[0].shape[0]

        def turn(step: Any, _: None) -> None:
            place = lax.rem(step, places)
            for line, free in enumerate(self.free):
                pl.when(step >= places)(functools.partial(plgpu.barrier_wait, free.at[place]))
                fetch(line, step, place)

        def read(step: Any, _: None) -> None:
            for free in self.free:
                plgpu.barrier_wait(free.at[lax.rem(step, places)])

        lax.fori_loop(0, steps, turn, None)
        lax.fori_loop(jnp.maximum(steps - places, 0), steps, read, None)

    def skip(self, place: Any) -> None:
        """Frees a place that this group does not read. Barriers count every turn of every group."""
        for ready, free in zip(self.ready, self.free, strict=True):
            plgpu.barrier_wait(ready.at[place])
            plgpu.barrier_arrive(free.at[place])


def ring(how: flash.How, tile: Tile, width: int, dtype: Any, numbers: Any = None) -> Ring:
    """Returns a ring of two matrices. numbers: their dtype, where rows have some."""
    matrices = (smem(how, tile.places, tile.walked, width, dtype=dtype),) * 2
    more = () if numbers is None else (plgpu.SMEM((tile.places, tile.walked), numbers),) * 2
    ready = plgpu.Barrier(num_barriers=tile.places, num_arrivals=1 if numbers is None else 2)
    free = plgpu.Barrier(num_barriers=tile.places, num_arrivals=GROUPS)
    return Ring(matrices, more, (ready,) * 2, (free,) * 2)


class Seen(NamedTuple):
    """What a group's rows see of the other side: from `low` to `high`. most, least: the highest low and the lowest high."""

    low: Array
    high: Array
    most: Any
    least: Any

    def masked(self, scores: Array, begin: Any) -> Array:
        """Returns the scores with those of unseen pairs replaced. begin: the first token of the other side's block."""

        def mask(scores: Array) -> Array:
            low, high = (beside(x, scores.shape, 0) for x in (self.low, self.high))
            seen = _inside(lax.broadcasted_iota(jnp.int32, scores.shape, 1) + begin, low, high)
            return jnp.where(seen, scores, UNSEEN)

        whole = (begin >= self.most) & (begin + scores.shape[1] - 1 <= self.least)
        return lax.cond(whole, lambda scores: scores, mask, scores)


def _inside(token: Array, low: Array, high: Array) -> Array:
    return (token >= low) & (token <= high)


def seen_by_queries(tile: Tile, where: Place, first: Any) -> Seen:
    """Returns which keys this group's queries see. first: as `over_keys` takes it."""
    low = where.numbers(first, of_head=False)
    return Seen(low, where.tokens, first[where.row, where.mine + tile.own - 1], where.mine)


def seen_by_keys(tile: Tile, where: Place, last: Any) -> Seen:
    """Returns which queries see this group's keys. last: as `over_queries` takes it."""
    high = where.numbers(last, of_head=False)
    return Seen(where.tokens, high, where.mine + tile.own - 1, last[where.row, where.mine])
