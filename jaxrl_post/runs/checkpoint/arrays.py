"""The arrays of a checkpoint: how they are named, read and written with Orbax, and copied to host memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl_post.ring.json_text import said

SPARE = 1 << 20  # bytes beside the arrays that a save needs


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A valid step. `about`: the identity of the run that saved it. `host`: the state of this process."""

    step: int
    path: Path
    about: Mapping
    host: Mapping

    def arrays(self, like: Any) -> Any:
        """Returns the saved arrays as a tree like `like`, sharded like its leaves (arrays or ShapeDtypeStructs).

        Raises:
          ValueError: names, shapes or dtypes differ from the saved ones, or the files cannot be read.
          OSError, KeyError: a file is gone.
        """
        there, here = self.about["arrays"], kinds(named(like))
        return self._read(like, there, here, {})

    def part(self, like: Any, below: str, *, others: bool = False) -> Any:
        """Returns some of the saved arrays as a tree like `like`: those whose names begin with `below` and a dot.

        Args:
          others: such names may exist that `like` does not have. They are not read.

        Raises:
          ValueError, OSError, KeyError: as `arrays`.
        """
        there = {name: kind for name, kind in self.about["arrays"].items() if name.startswith(f"{below}.")}
        here = {f"{below}.{name}": kind for name, kind in kinds(named(like)).items()}
        there = {name: kind for name, kind in there.items() if name in here or not others}
        return self._read(like, there, here, {"partial_restore": True}, f"{below}.")

    def _read(self, like: Any, there: Mapping, here: Mapping, how: Mapping, prefix: str = "") -> Any:
        if there != here:
            name = next(n for n in sorted({*there, *here}) if there.get(n) != here.get(n))
            raise ValueError(
                f"{self.path} holds {there.get(name, 'no such array')} as {name}, the run needs "
                f"{here.get(name, 'no such array')}: it belongs to another model or optimizer"
            )
        wanted = {f"{prefix}{name}": x for name, x in named(like).items()}
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in wanted.items()}
        asked = ocp.args.PyTreeRestore(shapes, restore_args=ocp.checkpoint_utils.construct_restore_args(shapes), **how)
        with checkpointer(shapes) as reader, _Reading(self.path):
            found = reader.restore(self.path.absolute() / "arrays", args=asked)
        return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in wanted])


class _Reading:
    """Turns a failed read of an array into an error of one sentence: Orbax raises the class Exception itself."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is Exception:
            raise ValueError(f"{self._path}: an array cannot be read: {said(error.__cause__ or error)}") from error


@dataclass(frozen=True)
class OnHost:
    """Copies of arrays in host memory, by name."""

    named: Mapping[str, np.ndarray]


def on_host(tree: Any) -> OnHost:
    """Copies a tree of jax arrays to host memory, of one process. Later changes on the devices do not reach it."""
    found = views(named(tree))
    for view in found.values():
        view.copy_to_host_async()
    return OnHost({name: np.array(view) for name, view in found.items()})


def holders(named: Mapping[str, Any]) -> set[int]:
    """Returns the processes that have a device of the arrays. Copies in host memory are of this process."""
    leaves = [leaf for leaf in named.values() if not isinstance(leaf, np.ndarray)]
    found = {device.process_index for leaf in leaves for device in leaf.sharding.device_set}
    return found or {jax.process_index()}


def checkpointer(named: Mapping[str, Any]) -> ocp.Checkpointer:
    """Returns what reads and writes these arrays. Only processes that have a device of the arrays take part."""
    active = holders(named)
    among = ocp.options.MultiprocessingOptions(
        primary_host=min(active), active_processes=None if len(active) == jax.process_count() else active
    )
    return ocp.Checkpointer(handler(named, among), multiprocessing_options=among)


def handler(named: Mapping[str, Any], among: ocp.options.MultiprocessingOptions) -> ocp.PyTreeCheckpointHandler:
    """Returns what reads and writes these arrays, with a bound on bytes in flight: twice the largest, or an eighth.

    Orbax would copy all of them to host memory at once. The bound holds in each process, for bytes of whole arrays.

    Args:
      among: the process that writes what is to be written once. None: every process.
    """
    sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in named.values()]
    most = max(2 * max(sizes, default=0), sum(sizes) // 8, SPARE) / 10**9
    return ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=most,
        restore_concurrent_gb=most,
        save_device_host_concurrent_gb=most,
        multiprocessing_options=among,
    )


def named(tree: Any) -> dict[str, Any]:
    """Returns leaves by path, in the tree's order."""
    out = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    for name, leaf in out.items():  # Orbax restores a numpy scalar as another type
        if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
            raise TypeError(f"checkpoint: {name} is a {type(leaf).__name__}, only jax arrays are saved")
    return out


def views(named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns other arrays over the same buffers.

    Reading an array on the host leaves a view of its buffer. Donating that array later would copy the whole buffer.
    Copies on the host are returned as they are.
    """
    return {
        name: leaf
        if isinstance(leaf, np.ndarray)
        else jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding, [shard.data for shard in leaf.addressable_shards]
        )
        for name, leaf in named.items()
    }


def kinds(named: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in named.items()}
