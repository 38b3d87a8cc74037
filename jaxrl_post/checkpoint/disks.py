"""Where the processes of a job write a step: on one disk that all share, or each on a disk of its own.

On disks of their own, each process has the files that it wrote. Process 0 signs the list of all files, and joins the
arrays. For both it gets messages: what each process hashed, and the index of its arrays, which is small. A folder
with the files of all processes is then the same as on one disk.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

from jaxrl_post import written
from jaxrl_post.checkpoint.arrays import checkpointer, handler, holders, on_host, views
from jaxrl_post.checkpoint.signed_files import HASHES, damage
from jaxrl_post.parallel.key_value import Board

_FILE = 1 << 26  # bytes of one file of arrays. Each process holds one in memory until it is full.
_WAIT_S = 600.0  # for the message of a process that writes the same step
_INDEX = "manifest.ocdbt"


class Disks(Protocol):
    """`writes`: whether this process makes, renames and removes folders. `own`: whether each process has its own disk."""

    @property
    def writes(self) -> bool: ...

    @property
    def own(self) -> bool: ...

    def write(self, folder: Path, given: Mapping[str, Any]) -> None:
        """Writes arrays to a new folder. All processes call it."""

    def bring(self, part: Path, own: Mapping) -> None:
        """Brings what this process hashed to process 0, as a file of a step that is being written."""

    def whole(self, path: Path, key: Callable[[], bytes]) -> bool:
        """Returns whether a saved step has all of its files, as far as this disk should have them."""


class OneDisk:
    """A file system that all processes share, or the disk of a process by itself."""

    own = False

    @property
    def writes(self) -> bool:
        return jax.process_index() == 0

    def write(self, folder: Path, given: Mapping[str, Any]) -> None:
        if jax.process_index() in holders(given):
            with _silent(), written.naming(folder), checkpointer(given) as writer:
                writer.save(folder.absolute(), args=_asked(given))

    def bring(self, part: Path, own: Mapping) -> None:
        if not self.writes:
            (part / f"{HASHES}{jax.process_index()}").write_text(json.dumps(own), encoding="utf-8")

    def whole(self, path: Path, key: Callable[[], bytes]) -> bool:
        return not damage(path, key(), contents=False)


ONE_DISK = OneDisk()


class OwnDisks:
    """A disk for each process.

    Args:
      board: of all processes of the job, for nothing else.
    """

    own = True
    writes = True

    def __init__(self, board: Board):
        self._board, self._rounds = board, itertools.count()

    def write(self, folder: Path, given: Mapping[str, Any]) -> None:
        folder.mkdir()
        target, me = epath.Path(folder.absolute()), jax.process_index()
        if me in holders(given):
            handler(given, _primary(me)).save(target, args=_asked(given))
        mine = folder / f"ocdbt.process_{me}"
        self._send(_index(mine) if mine.is_dir() else "")
        others = {folder / f"ocdbt.process_{index}": text for index, text in self._received() if text}
        if me == 0:
            for place, text in others.items():
                _write_index(place, text)
            handler(given, _primary(None)).finalize(target)  # which compares no files of the others
            for place in others:
                shutil.rmtree(place)

    def bring(self, part: Path, own: Mapping) -> None:
        self._send(json.dumps(own))
        for index, text in self._received():
            (part / f"{HASHES}{index}").write_text(text, encoding="utf-8")

    def whole(self, path: Path, key: Callable[[], bytes]) -> bool:
        return True  # others have the rest; what the bucket has of a step is checked when it is fetched

    def _send(self, text: str) -> None:
        self._round = next(self._rounds)
        if jax.process_index() != 0:
            self._board.put(f"{self._round}/{jax.process_index()}", text)

    def _received(self) -> list[tuple[int, str]]:
        """Returns what every other process sent. Only process 0 gets anything.

        Raises:
          TimeoutError: one sent nothing.
        """
        if jax.process_index() != 0:
            return []
        keys = {index: f"{self._round}/{index}" for index in range(1, jax.process_count())}
        found = [(index, self._board.get(key, _WAIT_S)) for index, key in keys.items()]
        self._board.remove(str(self._round))
        return found


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keeps Orbax from logging the stack of each of its threads at an error, which it then raises."""
    log = logging.getLogger("absl")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _asked(given: Mapping[str, Any]) -> Any:
    # Of several processes, Orbax takes arrays of one process alone from host memory only.
    alone = jax.process_count() > len(holders(given)) == 1
    leaves = dict(on_host(given).named) if alone else views(given)
    return ocp.args.PyTreeSave(leaves, ocdbt_target_data_file_size=_FILE)


def _primary(process: int | None) -> Any:
    return ocp.options.MultiprocessingOptions(primary_host=process)


def _index(folder: Path) -> str:
    """Returns the index of the arrays that a process wrote, as JSON: where each array lies in its files.

    OCDBT keeps it in the manifest and in the node that the manifest names. Other files hold values alone.
    https://google.github.io/tensorstore/kvstore/ocdbt/index.html
    """
    store = tensorstore.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    newest = tensorstore.ocdbt.dump(store).result()["versions"][-1]
    assert newest["root_height"] == 0, f"{folder}: an index of {newest['root_height'] + 1} levels"
    kind, _, file, offset, size = newest["root"]["location"].split(":")
    assert kind == "btreenode", f"{folder}: {newest['root']['location']}"
    with open(folder / file, "rb") as data:
        data.seek(int(offset))
        node = data.read(int(size))
    told = [base64.b64encode(part).decode("ascii") for part in ((folder / _INDEX).read_bytes(), node)]
    return json.dumps({"manifest": told[0], "file": file, "offset": int(offset), "node": told[1]})


def _write_index(folder: Path, text: str) -> None:
    """Writes the index of another process's arrays, without the arrays."""
    told = json.loads(text)
    (folder / told["file"]).parent.mkdir(parents=True)
    (folder / _INDEX).write_bytes(base64.b64decode(told["manifest"]))
    with open(folder / told["file"], "wb") as data:
        data.seek(told["offset"])
        data.write(base64.b64decode(told["node"]))
