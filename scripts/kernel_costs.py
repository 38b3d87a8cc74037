"""FLOPs and bytes of our kernels, as formulas of the shapes around them: what `traffic` asks where it sees a box.

Causal attention of packed rows walks pairs of blocks that are not above the diagonal. Segments are taken as whole rows,
the dearest case. A block of queries stays in the chip, so its arrays move once; the other side moves once for each pair.
Source of the walks: kernels/flash_gpu.py, kernels/flash_hopper.py, and jax's splash_attention_kernel.py for the TPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

from compiled_text import Array
from traffic import Kernel

LANES = 128
TPU_OWN, TPU_OTHER = 1024, 512
_NARROW = {"forward": (64, 64), "queries": (64, 64), "keys": (32, 64)}
GPU_TILES = {  # by head size: queries and keys of a pair (flash_gpu.TILES)
    64: _NARROW,
    128: _NARROW,
    256: {"forward": (64, 64), "queries": (64, 32), "keys": (64, 32)},
    512: {"forward": (64, 32), "queries": (32, 32), "keys": (16, 32)},
}
# Rows of a group, rows of a block of the other side (flash_hopper.TILES), and groups that share what is loaded.
HOPPER_TILES = {
    64: {"forward": (64, 128), "queries": (64, 64), "keys": (64, 64)},
    128: {"forward": (64, 128), "queries": (64, 64), "keys": (64, 64)},
}
HOPPER_GROUPS = 2
PRODUCTS = {"forward": 2, "queries": 3, "keys": 4}  # of a pair of blocks


def pairs(tokens: int, own: int, other: int) -> int:
    """Returns the pairs of blocks, of `own` queries and `other` keys, that reach below the diagonal."""
    return sum(-(-min(end + own, tokens) // other) for end in range(0, tokens, own))


def _splash(walk: str) -> Kernel:
    def cost(given: Sequence[Array], made: Sequence[Array]) -> tuple[float, float]:
        many = [one for one in (*given, *made) if len(one.dims) >= 3 and one.dtype == "bf16"]
        *rows, heads, tokens, head = max(many, key=lambda one: one.bytes).dims
        heads *= math.prod(rows)
        wide, size = math.gcd(tokens, TPU_OWN), math.gcd(tokens, TPU_OTHER)
        found, block = heads * pairs(tokens, wide, size), size * head * 2
        flops = PRODUCTS[walk] * 2.0 * wide * size * head * found
        own, ids = heads * tokens * head * 2, heads * tokens * LANES * 4
        if walk == "forward":  # queries and output once, keys and values for each pair; ids and masses fill lanes
            return flops, float(2 * own + 2 * block * found + 2 * ids)
        if walk == "queries":  # queries, slopes and result once, keys and values for each pair
            return flops, float(3 * own + 2 * block * found + ids)
        keys = math.prod(rows) * given_keys(given, tokens, head) * tokens * head * 2
        return flops, float(4 * keys + 2 * block * found + found * size * 4 * 3)  # queries and slopes for each pair

    return cost


def given_keys(given: Sequence[Array], tokens: int, head: int) -> int:
    """Returns the number of key heads: the fewest heads among arrays [heads, tokens, head]."""
    return min(one.dims[-3] for one in given if len(one.dims) >= 3 and one.dims[-2:] == (tokens, head))


def _flash(walk: str) -> Kernel:
    def cost(given: Sequence[Array], made: Sequence[Array]) -> tuple[float, float]:
        (rows, tokens, heads, head), keys = given[0].dims, given[1].dims[2]
        tile = GPU_TILES[head][walk]
        found, walked = rows * heads * pairs(tokens, *tile), tile[walk != "keys"]
        block = walked * head * given[0].dtype_bytes
        flops = PRODUCTS[walk] * 2.0 * tile[0] * tile[1] * head * found
        own, other = (rows * tokens * count * head * given[0].dtype_bytes for count in (heads, keys))
        once = {"forward": 2 * own, "queries": 3 * own, "keys": 4 * other}[walk]
        return flops, float(once + 2 * block * found)

    return cost


def _hopper(walk: str) -> Kernel:
    def cost(given: Sequence[Array], made: Sequence[Array]) -> tuple[float, float]:
        (rows, tokens, heads, head), keys = given[0].dims, given[1].dims[2]
        own, other = HOPPER_TILES[head][walk]
        multiplied, loaded = (rows * heads * pairs(tokens, size, other) for size in (own, HOPPER_GROUPS * own))
        flops = PRODUCTS[walk] * 2.0 * own * other * head * multiplied
        own, less = (rows * tokens * count * head * given[0].dtype_bytes for count in (heads, keys))
        once = {"forward": 2 * own, "queries": 3 * own, "keys": 4 * less}[walk]
        return flops, float(once + 2 * other * head * given[0].dtype_bytes * loaded)

    return cost


def walked(
    kernels: str, met: Mapping[str, float], sizes: Mapping[str, tuple[int, int]], heads: int, kv_heads: int, head: int
) -> Mapping[str, Kernel]:
    """Returns kernels that walk lists of blocks (kernels/branches.py), of 2-byte numbers.

    Args:
      kernels: what their names begin with.
      met: by walk, the pairs of blocks that a row's texts make meet.
      sizes: by walk, tokens of the block that stays, and of the one that is walked.
    """

    def cost(walk: str, given: Sequence[Array], made: Sequence[Array]) -> tuple[float, float]:
        own, other = sizes[walk]
        rows, *rest = made[0].dims
        pairs, line = rows * heads * met[walk], head * 2
        once = rows * {"forward": 2 * heads, "queries": 3 * heads, "keys": 4 * kv_heads}[walk] * max(rest) * line
        return PRODUCTS[walk] * 2.0 * own * other * head * pairs, float(once + 2 * other * line * pairs)

    ends = {"forward": "forward", "queries": "backward_queries", "keys": "backward_keys"}
    return {f"{kernels}_{end}": functools.partial(cost, walk) for walk, end in ends.items()}


PACKED_ROWS: Mapping[str, Kernel] = {
    "splash_mha_fwd": _splash("forward"),
    "splash_mha_dq": _splash("queries"),
    "splash_mha_dkv": _splash("keys"),
    "flash_forward_hopper": _hopper("forward"),
    "flash_backward_queries_hopper": _hopper("queries"),
    "flash_backward_keys_hopper": _hopper("keys"),
    "flash_forward": _flash("forward"),
    "flash_backward_queries": _flash("queries"),
    "flash_backward_keys": _flash("keys"),
}


GPU_PLACE = 64  # positions that the paged kernel of GPUs loads at once (kernels/attention_gpu.py), whatever the page
TPU_POSITIONS = 256  # that the paged kernel of TPUs multiplies at once (kernels/attention_tpu.py)
TPU_ROWS = 64  # of its largest tile, whose rows its name tells
GPU_TILE = 64  # rows of a tile of the paged kernel of GPUs, each a row of the program and a query head
SAMPLED = 4 * 1024  # bytes of a tile of logits, of which a row's sample and its likeliest id take one each
GPU_VALUES = 256  # columns of the values of a block of its grid, which makes all scores
STRETCH = 1024  # positions of one block of its grid, at least
CODED_STRETCH = 2048  # the same over pages of codes
STRETCHES = 8
Ends = Callable[[int], Sequence[float]]  # rows that share their pages -> positions that each such group reads


def paged(ends: Ends, rows: int, pages_alone: bool = False) -> Mapping[str, Kernel]:
    """Returns the kernels of the engine, whose bytes follow from the text's shapes and from what the slots hold.

    Attention reads the pages of each group of rows once. A kernel that samples, multiplies experts or walks recurrent rows
    moves what goes in and comes out.

    Args:
      rows: of the program on one device.
      pages_alone: queries, results and sums count nothing.
    """
    return {
        rf"paged_rows_by_{size}\b": functools.partial(_shared, ends=ends, size=size, pages_alone=pages_alone)
        for size in range(1, TPU_ROWS + 1)
    } | {
        r"pack_rows": _packed,
        r"combine_stretches": lambda given, made: _combined(given, made, ends, pages_alone),
        r"gpu\.triton.*/(rows_of|settled|joined)/": lambda given, made: (0.0, _vectors(given, made)),
        r"gpu\.triton.*/sample/": lambda given, made: (
            0.0,
            float(given[0].dims[0] * 2 * SAMPLED + _vectors(given, made)),
        ),
        r"attend_codes": lambda given, made: _coded(given, ends, rows, pages_alone),
        r"mosaic_gpu.*attend": lambda given, made: _tiled(given, made, ends, rows, pages_alone),
        r"mosaic_gpu|tpu_custom_call|gpu\.triton": lambda given, made: (
            0.0,
            float(sum(x.bytes for x in (*given, *made))),
        ),
    }


def _shared(
    given: Sequence[Array], made: Sequence[Array], ends: Ends, size: int, pages_alone: bool
) -> tuple[float, float]:
    """Reads whole pages once for each tile of `size` rows, and multiplies whole turns of TPU_POSITIONS."""
    pages = next(one for one in given if len(one.dims) == 4)
    (_, heads, wide), (many, page, lines, _) = made[0].dims, pages.dims
    groups = ends(size)
    read = sum(-(-end // page) * page for end in groups) * lines * wide * pages.dtype_bytes
    for scales in (
        one for one in given if len(one.dims) == 3 and one.dims[::2] == (many, page)
    ):  # of codes, along lanes
        read += sum(-(-end // page) for end in groups) * scales.dims[1] * max(page, LANES) * scales.dtype_bytes
    turns = sum(-(-end // TPU_POSITIONS) for end in groups)
    near = sum(0 if one.place else one.bytes for one in (made[0], *(x for x in given if x.dims == made[0].dims)))
    return 4.0 * size * heads * wide * TPU_POSITIONS * turns, float(read + (0 if pages_alone else near))


def _packed(given: Sequence[Array], made: Sequence[Array]) -> tuple[float, float]:
    """Reads a product, and writes queries and what the rows add to the pages."""
    product, (pages, queries) = next(one for one in given if len(one.dims) == 3 and one.dtype == "f32"), made
    wide = product.dims[2] * queries.dtype_bytes
    heads = wide - pages.dims[2] * pages.dims[3] * queries.dtype_bytes
    return 0.0, float(product.bytes + product.dims[1] * (heads + pages.dims[2] * pages.dims[3] * pages.dtype_bytes))


def _combined(given: Sequence[Array], made: Sequence[Array], ends: Ends, pages_alone: bool) -> tuple[float, float]:
    """Reads the stretches that each row reaches: values, peak and mass of each of its query heads.

    Stretches are taken as the shortest, where long tables have longer ones and fewer."""
    (values, peak), (rows, heads, head) = given[:2], made[0].dims
    stretch, reached = STRETCH if peak.dims[-1] > 1 else CODED_STRETCH, ends(1)
    turns = rows * sum(min(values.dims[0], -(-end // stretch)) for end in reached) / max(1, len(reached))
    return 0.0, 0.0 if pages_alone else float(turns * heads * (head + 2) * 4 + made[0].bytes)


def _vectors(given: Sequence[Array], made: Sequence[Array]) -> float:
    """Returns the bytes of a kernel's small arrays. Tables are read at some places alone."""
    own = [one for one in given if len(one.dims) == 1 or one.dims == made[0].dims]
    return float(sum(one.bytes for one in (*own, *made)))


def _coded(given: Sequence[Array], ends: Ends, rows: int, pages_alone: bool) -> tuple[float, float]:
    """Reads whole places of codes and their scales, once for each tile, as `_tiled` does."""
    queries, pages, table, _, scales = given[:5]
    (keys, pairs, head), padded = queries.dims, (queries.dims[1] - GPU_TILE) // rows
    places = -(-table.dims[1] * pages.dims[1] // GPU_PLACE)
    stretch = GPU_PLACE * max(CODED_STRETCH // GPU_PLACE, -(-places // STRETCHES))
    groups = [-(-end // GPU_PLACE) * GPU_PLACE for end in ends(GPU_TILE // padded)]
    read = sum(groups) * (2 * keys * head * pages.dtype_bytes + scales.dims[1] * scales.dtype_bytes)
    turns, own = sum(-(-end // stretch) for end in groups), (pairs - GPU_TILE) / max(1, len(groups))
    near = queries.bytes + turns * keys * own * (head + 2) * 4
    return 4.0 * GPU_TILE * head * keys * sum(groups), float(read + (0 if pages_alone else near))


def _tiled(
    given: Sequence[Array], made: Sequence[Array], ends: Ends, rows: int, pages_alone: bool
) -> tuple[float, float]:
    """Reads whole places. Each stretch that a group reaches writes values and sums in float32, of the group's own rows.

    Queries count once: tiles load 64 rows each, and those of neighbours overlap in the cache of the device. So do keys, which
    two blocks load for heads of 512. Both make the scores.
    """
    queries, pages, table = given[:3]
    (keys, _, head), (_, page, _, _) = queries.dims, pages.dims
    padded, places = made[0].dims[2] // rows, -(-table.dims[1] * page // GPU_PLACE)
    stretch = GPU_PLACE * max(STRETCH // GPU_PLACE, -(-places // STRETCHES))
    groups = [-(-end // GPU_PLACE) * GPU_PLACE for end in ends(GPU_TILE // padded)]
    read = sum(groups) * 2 * keys * head * pages.dtype_bytes
    turns = sum(-(-end // stretch) for end in groups)
    own = made[0].dims[2] / max(1, len(groups))  # rows of a group, each a row of the program and a query head
    near = queries.bytes + turns * keys * own * (head + 32) * 4
    products = 1 + -(-head // GPU_VALUES)
    return 2.0 * products * GPU_TILE * head * keys * sum(groups), float(read + (0 if pages_alone else near))
