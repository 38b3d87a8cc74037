"""A folder as objects that never change: files are cut into pieces, and a tree lists the pieces of every file.

Invariants:
- A piece's name has the term of the holder that wrote it and the hash of its bytes. So nobody writes over another's
  piece, and bytes that were cut or exchanged are found when they are read.
- A log that grew has its old pieces and a new last one.
- Checkpoints are taken before everything else. So a tree has every log at least up to the marks of its steps.
- Checkpoints are taken as links, which stay while they are uploaded, however soon the run prunes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jaxrl_post.runs.buckets.objects import Objects

PIECE = 8 << 20  # bytes
PIECES, TREES = "pieces/", "trees/"
_STEPS = "checkpoints/"  # below a run's folder
_AT_ONCE = 8  # pieces under way
_LEFT_OUT = re.compile(r"\.lock|.*\.part|.*\.gone")  # of this machine, half-written, or half-deleted
_STEP = re.compile(r"step_([0-9]{6,18})")

Tree = dict[str, list[str]]  # names of pieces by file, in order


@dataclass(frozen=True, kw_only=True)
class FolderSnapshot:
    """Files of a run in one folder at one moment, and the steps that were saved there."""

    files: Tree
    steps: frozenset[int]


class Damaged(ValueError):
    """A tree or a piece is missing, or has other bytes than were written."""


def steps(folder: Path) -> list[int]:
    """Returns the numbers of the steps saved below a run's folder, in order."""
    return _numbers(folder / _STEPS)


def _numbers(place: Path) -> list[int]:
    names = [path.name for path in place.iterdir()] if place.is_dir() else []
    return sorted(int(found[1]) for name in names if (found := _STEP.fullmatch(name)))


def newest(tree: Tree) -> int:
    """Returns the number of the newest step that a tree has, 0 without any."""
    return max(map(_step_of, tree), default=0)


def joined(parts: Iterable[FolderSnapshot]) -> Tree:
    """Returns the tree of a run whose processes have a folder each: all files, and the steps that every folder has."""
    every = list(parts)
    whole = frozenset.intersection(*(one.steps for one in every))
    return {name: pieces for one in every for name, pieces in one.files.items() if _step_of(name) in (0, *whole)}


def _step_of(name: str) -> int:
    """Returns the number of the step that a file belongs to, 0 for none."""
    found = _STEP.fullmatch(name.split("/")[1]) if name.startswith(_STEPS) else None
    return int(found[1]) if found else 0


def _files(folder: Path, linked: Path) -> Iterator[tuple[str, Path]]:
    """Yields the files of a run's folder by name: checkpoints as links first, then what is there only after them."""
    for path in _below(linked):
        yield _STEPS + path.relative_to(linked).as_posix(), path
    for place in sorted(folder.iterdir()):
        for path in _below(place) if place.name != _STEPS.rstrip("/") else ():
            yield path.relative_to(folder).as_posix(), path


def _below(path: Path) -> Iterator[Path]:
    if _LEFT_OUT.fullmatch(path.name) or path.is_symlink():
        return
    if path.is_dir():
        for inner in sorted(path.iterdir()):
            yield from _below(inner)
    else:
        yield path


class Uploads:
    """The pieces that one holder of a run may name: its own, and those of the trees that it found.

    Args:
      term: of the holder.
    """

    def __init__(self, objects: Objects, term: int):
        self._objects, self._term = objects, term
        self._there: dict[str, str] = {}  # names of pieces by their hash
        self._seen: dict[Path, tuple[tuple, list[str]]] = {}

    def found(self, trees: Iterable[Tree]) -> None:
        """Takes note of trees whose pieces are in the bucket and stay there."""
        self._there |= {_digest_of(name): name for tree in trees for name in names(tree)}

    def part(self, folder: Path, linked: Path, mine: Callable[[str], bool] = lambda name: True) -> FolderSnapshot:
        """Uploads every piece of the folder that the bucket lacks, and returns what it has.

        Args:
          linked: a folder for links to the checkpoints, on the same disk.
          mine: says by its name whether a file is wanted.

        Raises:
          OSError: a file went while it was read, for example with a pruned step.
          Unreachable, ValueError: of the bucket. What was uploaded by then is not uploaded again.
        """
        shutil.rmtree(linked, ignore_errors=True)
        if (folder / _STEPS).is_dir():
            left_out = shutil.ignore_patterns("*.part", "*.gone")
            shutil.copytree(folder / _STEPS, linked, copy_function=os.link, ignore=left_out)
        saved = frozenset(_numbers(linked))
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="upload") as pool:
            found = {name: self._pieces(path, pool) for name, path in _files(folder, linked) if mine(name)}
        shutil.rmtree(linked, ignore_errors=True)
        return FolderSnapshot(files=found, steps=saved)

    def keep(self, trees: Iterable[Tree]) -> None:
        """Forgets all pieces but those of these trees: others may be deleted from the bucket."""
        self._there = {}
        self.found(trees)
        there = {*self._there.values()}
        self._seen = {path: seen for path, seen in self._seen.items() if there >= {*seen[1]}}

    def forget(self, gone: set[str]) -> None:
        """Takes back pieces that are deleted from the bucket."""
        self._there = {digest: name for digest, name in self._there.items() if name not in gone}
        self._seen = {path: seen for path, seen in self._seen.items() if not gone & {*seen[1]}}

    def _pieces(self, path: Path, pool: ThreadPoolExecutor) -> list[str]:
        about = path.stat()
        state = (about.st_ino, about.st_size, about.st_mtime_ns)
        if path in self._seen and self._seen[path][0] == state:
            return self._seen[path][1]
        out: list[str] = []
        with open(path, "rb") as file:
            while batch := [data for _ in range(_AT_ONCE) if (data := file.read(PIECE))]:
                out += pool.map(self._piece, batch)
        self._seen[path] = (state, out)
        return out

    def _piece(self, data: bytes) -> str:
        digest = _digest(data)
        name = self._there.get(digest)
        if name is None:
            name = f"{PIECES}{self._term:06d}-{digest}"
            self._objects.write(name, data)
            self._there[digest] = name
        return name


def names(tree: Tree) -> set[str]:
    """Returns the names of all pieces of a tree."""
    return {name for pieces in tree.values() for name in pieces}


def write(objects: Objects, term: int, tree: Tree) -> str:
    """Writes a tree and returns its name. Errors are those of Objects.write."""
    data = json.dumps(tree, sort_keys=True).encode("utf-8")
    name = f"{TREES}{term:06d}-{_digest(data)}"
    objects.write(name, data)
    return name


def read(objects: Objects, name: str) -> Tree:
    """Returns the tree of that name.

    Raises:
      Damaged: it is missing, or its bytes are not those that were written.
      Unreachable: no answer came in time.
    """
    return json.loads(_whole(objects, name))


def fetch(objects: Objects, tree: Tree, folder: Path, only: Callable[[str], bool] = lambda name: True) -> None:
    """Writes the files of a tree below a folder.

    Args:
      only: says by its name whether a file is wanted.

    Raises:
      Damaged: a piece is missing, or its bytes are not those that were written.
      Unreachable: no answer came in time.
    """
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch") as pool:
        for name, pieces in tree.items():
            if not only(name):
                continue
            path = folder / name
            if folder.resolve() not in path.resolve().parents:
                raise Damaged(f"{objects.address}: a tree names a file outside of the run: {name[:100]!r}")
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                for first in range(0, len(pieces), _AT_ONCE):
                    for data in pool.map(lambda one: _whole(objects, one), pieces[first : first + _AT_ONCE]):
                        file.write(data)


def _whole(objects: Objects, name: str) -> bytes:
    """Returns an object's bytes, which are those that its name has the hash of."""
    found = objects.read(name)
    if found is None:
        raise Damaged(f"{objects.address}/{name} is missing")
    if _digest(found) != _digest_of(name):
        raise Damaged(f"the bytes of {objects.address}/{name} are not those that were written")
    return found


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=20).hexdigest()


def _digest_of(name: str) -> str:
    return name.rpartition("-")[2]


def garbage(there: set[str], kept: Mapping[str, Tree]) -> set[str]:
    """Returns the objects that no kept tree needs.

    Args:
      there: names of pieces and trees in the bucket.
      kept: trees by name.
    """
    return there - {*kept} - {name for tree in kept.values() for name in names(tree)}
