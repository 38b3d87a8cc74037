"""The host's part of a checkpoint: plain values as JSON, arrays beside them, in one folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_post.ring import written

_ARRAY = "__array__"  # {"__array__": name} in state.json stands for an array of arrays.npz


def write_state(folder: Path, state: Mapping) -> None:
    """Nested dicts with names as keys, lists, None, bool, int, float, str, and numpy arrays and scalars.

    Raises:
      TypeError: anything else.
    """
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(_plain(state, arrays, "state"), sort_keys=True)
    folder.mkdir(parents=True)
    with written.naming(folder / "state.json"):
        (folder / "state.json").write_text(text, encoding="utf-8")
    with written.naming(folder / "arrays.npz"):
        np.savez(folder / "arrays.npz", **arrays)


def copied(state: Any) -> Any:
    """Returns a copy that no later change of the state reaches."""
    if isinstance(state, Mapping):
        return {key: copied(member) for key, member in state.items()}
    if isinstance(state, (list, tuple)):
        return [copied(member) for member in state]
    return state.copy() if isinstance(state, np.ndarray) else state


def read_state(folder: Path) -> dict:
    """What `write_state` got, with tuples as lists and numpy scalars as plain numbers."""
    with np.load(folder / "arrays.npz", allow_pickle=False) as arrays:
        return json.loads(
            (folder / "state.json").read_text(encoding="utf-8"),
            object_hook=lambda d: arrays[d[_ARRAY]] if _ARRAY in d else d,
        )


def _plain(value: Any, arrays: dict[str, np.ndarray], where: str) -> Any:
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) and key != _ARRAY for key in value):
            raise TypeError(f"checkpoint: the keys of {where} must be names, got {list(value)[:4]}")
        return {key: _plain(member, arrays, f"{where}.{key}") for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(member, arrays, f"{where}[{i}]") for i, member in enumerate(value)]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        arrays[f"a{len(arrays)}"] = value
        return {_ARRAY: f"a{len(arrays) - 1}"}
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"checkpoint: {where} is a {type(value).__name__}, which cannot be saved")
