"""Moves arrays from devices of some processes to devices of others. No byte passes the memory of a host.

Both kinds of devices take part in one program: a collective permutation, in which each device that gets a piece gets it
from one device that has it. Bits are copied, never added.

`jax.device_put` between processes needs a backend that supports it, and equal shardings on both sides (jax 0.11). CPUs do
not support it.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel import relayout

Rounds = tuple[tuple[tuple[int, int], ...], ...]


class _Way(NamedTuple):
    """How one array crosses: its pieces on the devices that give, those on the devices that get, and who gives to whom."""

    cut: NamedSharding
    landing: NamedSharding
    rounds: Rounds


def crossed(leaves: Sequence[Any], homes: Sequence[NamedSharding], dtype: Any) -> list[Any]:
    """Returns the leaves in shardings over devices of other processes. The leaves stay in place.

    All processes of both sides call it alike. A process without a device of an array gives, and gets, its
    ShapeDtypeStruct with a sharding.

    Args:
      leaves: all over the same devices.
      homes: all over the same devices, none of them a leaf's.
      dtype: what they are cast to before they move.
    """
    ways = [_way(leaf.shape, leaf.sharding, home) for leaf, home in zip(leaves, homes, strict=True)]
    line = (*leaves[0].sharding.mesh.devices.flat, *homes[0].mesh.devices.flat)
    homes_in_line = meshes.in_line(line)
    own = [*_given(leaves, ways, dtype), *_places([leaf.shape for leaf in leaves], ways, dtype)]
    parts: list[dict[jax.Device, jax.Array]] = [{} for _ in leaves]
    for at, array in own:
        parts[at] |= {shard.device: shard.data for shard in array.addressable_shards}
    joined = [
        _joined(part, way.landing.shard_shape(leaf.shape), homes_in_line, dtype)
        for part, way, leaf in zip(parts, ways, leaves, strict=True)
    ]
    moved = _program(homes_in_line, tuple(way.rounds for way in ways))(*joined)
    return _landed(moved, [leaf.shape for leaf in leaves], ways, homes, dtype)


@functools.cache
def _way(shape: tuple[int, ...], source: NamedSharding, home: NamedSharding) -> _Way:
    """Returns the way of an array. Of the nearest devices that have a piece, the one that gave least gives it."""
    landing = relayout.landing_of(source, home)
    cut = relayout.cut_of(source, landing)
    place = {device: at for at, device in enumerate((*source.mesh.devices.flat, *home.mesh.devices.flat))}
    having: dict[tuple, list[jax.Device]] = {}
    for device, index in cut.devices_indices_map(shape).items():
        having.setdefault(relayout.bounds(index, shape), []).append(device)
    given: collections.Counter[jax.Device] = collections.Counter()
    rounds: list[list[tuple[int, int]]] = []
    for device, index in landing.devices_indices_map(shape).items():
        holders = having[relayout.bounds(index, shape)]
        giver = min(holders, key=lambda one: (relayout.distance(one, device), given[one], place[one]))
        if given[giver] == len(rounds):
            rounds.append([])
        rounds[given[giver]].append((place[giver], place[device]))
        given[giver] += 1
    return _Way(cut, landing, tuple(map(tuple, rounds)))


def _given(leaves: Sequence[Any], ways: Sequence[_Way], dtype: Any) -> list[tuple[int, jax.Array]]:
    """Returns the leaves as they are given, by number, in a process that has some of their devices."""
    if not meshes.is_here(leaves[0].sharding.mesh):
        return []
    ready = all(leaf.dtype == dtype and leaf.sharding == way.cut for leaf, way in zip(leaves, ways, strict=True))
    return list(enumerate(leaves if ready else relayout.relaid(leaves, [way.cut for way in ways], jnp.dtype(dtype))))


def _places(shapes: Sequence[tuple[int, ...]], ways: Sequence[_Way], dtype: Any) -> list[tuple[int, jax.Array]]:
    """Returns arrays for the pieces to arrive in, by number, in a process that has some of the devices that get them."""
    if not meshes.is_here(ways[0].landing.mesh):
        return []
    made = _zeros(tuple(shapes), jnp.dtype(dtype), tuple(way.landing for way in ways))()
    return list(enumerate(made))


@functools.cache
def _zeros(shapes: tuple[tuple[int, ...], ...], dtype: Any, homes: tuple[NamedSharding, ...]) -> Callable[[], tuple]:
    return jax.jit(lambda: tuple(jnp.zeros(shape, dtype) for shape in shapes), out_shardings=homes)


def _joined(parts: dict[jax.Device, jax.Array], part: tuple[int, ...], home: NamedSharding, dtype: Any) -> jax.Array:
    """Returns the pieces of this process as an array in line."""
    whole = (home.mesh.size * part[0], *part[1:])
    own = [parts[device] for device in home.addressable_devices_indices_map(whole)]
    return jax.make_array_from_single_device_arrays(whole, home, own, dtype=jnp.dtype(dtype))


@functools.cache
def _program(home: NamedSharding, rounds: tuple[Rounds, ...]) -> Callable[..., tuple]:
    """Returns the jitted program that moves one piece of each array to each device that gets one."""
    moves = [meshes.permuted(home, own) for own in rounds]
    return jax.jit(lambda *arrays: tuple(move(x) for move, x in zip(moves, arrays, strict=True)))


def _landed(
    moved: Sequence[jax.Array],
    shapes: Sequence[tuple[int, ...]],
    ways: Sequence[_Way],
    homes: Sequence[NamedSharding],
    dtype: Any,
) -> list[Any]:
    """Returns the arrays in their homes, of what has arrived on devices of this process."""
    if not meshes.is_here(homes[0].mesh):
        return [jax.ShapeDtypeStruct(shape, dtype, sharding=home) for shape, home in zip(shapes, homes, strict=True)]
    arrived = []
    for array, shape, way in zip(moved, shapes, ways, strict=True):
        there = {shard.device: shard.data for shard in array.addressable_shards}
        own = [there[device] for device in way.landing.addressable_devices_indices_map(shape)]
        arrived.append(jax.make_array_from_single_device_arrays(shape, way.landing, own))
    return relayout.relaid(arrived, homes) if any(w.landing != h for w, h in zip(ways, homes)) else arrived
