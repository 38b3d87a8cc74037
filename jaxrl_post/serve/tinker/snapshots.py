"""Saved weights of clients: files of a folder, named by tinker:// paths.

tinker://RUN/weights/NAME lies at FOLDER/RUN/weights/NAME.safetensors, and what is saved for sampling beside it, at
sampler_weights/NAME. Where keys have owners, RUN lies in the folder of its owner. A file holds float32 leaves by their path
in the tree, and what they are in its header.

Invariant: a file appears whole or not at all. It refuses names that could lead out of the folder, and an owner's paths lead
to that owner's files alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import traverse_util
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl_post.models.model_config import Lora
from jaxrl_post.ring.json_text import said, shown
from jaxrl_post.serve.schema import Refusal


class Saved(NamedTuple):
    """A tinker:// path as its owner names it."""

    owner: str
    path: str


KINDS = ("weights", "sampler_weights")
_SCHEME = "tinker://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Weights at one moment, float32 in host memory.

    `base`: the name of the model that they belong to, and `mark`: what else must agree to use them again; see
    Trainer.check. `lora`: None where all weights were trained. `trees`: "weights", and with the optimizer's state also
    "first" and "second". `steps`: optimizer steps so far.
    """

    base: str
    mark: str
    lora: Lora | None
    steps: int
    trees: Mapping[str, Any]


class Snapshots:
    """The folder of saved weights."""

    def __init__(self, folder: Path):
        self._folder = folder

    def path(self, owner: str, run: str, kind: str, name: str, *, replace: bool = False) -> Saved:
        """Returns the tinker:// path of a name. Refused: no name of a file, or one that is taken."""
        if not _NAME.fullmatch(name):
            raise Refusal(f"path={shown(name)} must be letters, digits, '.', '_' and '-', at most 200", "path")
        saved = Saved(owner, f"{_SCHEME}{run}/{kind}/{name}")
        if not replace and self._file(saved).exists():
            raise Refusal(f"{saved.path} was saved before; choose another name, or overwrite it", "path", status=409)
        return saved

    def write(self, saved: Saved, one: Snapshot) -> None:
        """Writes a file. Refused: one that cannot be written, as where the disk is full. Then nothing is left of it."""
        file = self._file(saved)
        flat = traverse_util.flatten_dict(dict(one.trees), sep="/")
        leaves = {name: np.ascontiguousarray(leaf) for name, leaf in flat.items()}
        about = {"base": one.base, "mark": one.mark, "lora": one.lora and one.lora._asdict(), "steps": one.steps}
        part = file.with_suffix(".part")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file(leaves, part, {"jaxrl_post": json.dumps(about)})
            os.replace(part, file)
        except (OSError, SafetensorError) as error:
            _remove(part)
            raise Refusal(f"{saved.path} cannot be written: {said(error)}", "path", status=500) from error

    def read(self, saved: Saved, *, whole: bool = True) -> Snapshot:
        """Returns what was saved, without its numbers where not `whole`. Refused: no such path, or a damaged file."""
        file = self._file(saved)
        if not file.is_file():
            raise _missing(saved.path)
        try:
            with safe_open(file, framework="np") as opened:
                about = json.loads(opened.metadata()["jaxrl_post"])
                added = about["lora"]
                given = None if added is None else Lora(**{**added, "targets": tuple(added["targets"])})
                found = {"base": about["base"], "mark": about["mark"], "lora": given, "steps": about["steps"]}
                leaves = {name: opened.get_tensor(name) for name in (opened.keys() if whole else ())}
        except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
            raise Refusal(f"{shown(saved.path)} is damaged: {said(error)}; save it again", "path") from error
        return Snapshot(**found, trees=traverse_util.unflatten_dict(leaves, sep="/"))

    def stamp(self, saved: Saved) -> tuple[int, int]:
        """Returns what tells a file from one that replaced it. Refused: no such path."""
        try:
            found = self._file(saved).stat()
        except FileNotFoundError:
            raise _missing(saved.path) from None
        return found.st_ino, found.st_mtime_ns

    def remove(self, saved: Saved) -> None:
        """Removes a file, if it is there. One that cannot be removed stays."""
        _remove(self._file(saved))

    def _file(self, saved: Saved) -> Path:
        """Returns the file of a path. Refused: what is no tinker:// path."""
        path = saved.path
        parts = path.removeprefix(_SCHEME).split("/")
        whole = path.startswith(_SCHEME) and len(parts) == 3 and parts[1] in KINDS
        if not (whole and _NAME.fullmatch(parts[0]) and _NAME.fullmatch(parts[2])):
            raise Refusal(
                f"{shown(path)} must be {_SCHEME}RUN/weights/NAME or {_SCHEME}RUN/sampler_weights/NAME", "path"
            )
        return self._folder.joinpath(saved.owner, *parts[:2], f"{parts[2]}.safetensors")


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


def _missing(path: str) -> Refusal:
    return Refusal(
        f"there is no {shown(path)} here; save_state and save_weights_for_sampler return paths", "path", status=404
    )
