"""Where the processes of a job write a step: on one disk that all share, or each on a disk of its own.

On disks of their own, each process has the files that it wrote. Process 0 signs the list of all files, and joins the
arrays. For both it gets messages: what each process hashed, and the index of its arrays, which is small. A folder
with the files of all processes is then the same as on one disk.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

from jaxrl_post.parallel import exchange
from jaxrl_post.ring import written
from jaxrl_post.runs.checkpoint.arrays import checkpointer, handler, holders, on_host, views
from jaxrl_post.runs.checkpoint.signed_files import HASHES, damage

_FILE = 1 << 26  # bytes of one file of arrays. Each process holds one in memory until it is full.
_WAIT_S = 600.0  # for the message of a process that writes the same step
_INDEX = "manifest.ocdbt"


class Disks:
    """A file system that all processes share, or the disk of a process by itself.

    `writes`: whether this process makes, renames and removes folders. `own`: whether each process has its own disk.
    """

    own = False

    @property
    def writes(self) -> bool:
        return jax.process_index() == 0

    def write(self, folder: Path, given: Mapping[str, Any]) -> None:
        """Writes arrays to a new folder. All processes call it."""
        if jax.process_index() in holders(given):
            with _silent(), written.naming(folder), checkpointer(given) as writer:
                writer.save(folder.absolute(), args=_asked(given))

    def bring(self, part: Path, own: Mapping) -> None:
        """Brings what this process hashed to process 0, as a file of a step that is being written."""
        if not self.writes:
            (part / f"{HASHES}{jax.process_index()}").write_text(json.dumps(own), encoding="utf-8")

    def whole(self, path: Path, key: Callable[[], bytes]) -> bool:
        """Returns whether a saved step has all of its files, as far as this disk should have them."""
        return not damage(path, key(), contents=False)


ONE_DISK = Disks()


class OwnDisks(Disks):
    """A disk for each process."""

    own = True

    @property
    def writes(self) -> bool:
        return True

    def write(self, folder: Path, given: Mapping[str, Any]) -> None:
        folder.mkdir()
        target, me = epath.Path(folder.absolute()), jax.process_index()
        if me in holders(given):
            handler(given, _primary(me)).save(target, args=_asked(given))
        mine = folder / f"ocdbt.process_{me}"
        entries = _of_others(_index(mine) if mine.is_dir() else "")
        others = {folder / f"ocdbt.process_{index}": text for index, text in entries if text}
        if me == 0:
            for place, text in others.items():
                _write_index(place, text)
            handler(given, _primary(None)).finalize(target)  # which compares no files of the others
            for place in others:
                shutil.rmtree(place)

    def bring(self, part: Path, own: Mapping) -> None:
        for index, text in _of_others(json.dumps(own)):
            (part / f"{HASHES}{index}").write_text(text, encoding="utf-8")

    def whole(self, path: Path, key: Callable[[], bytes]) -> bool:
        return True  # others have the rest; what the bucket has of a step is checked when it is fetched


def _of_others(text: str) -> list[tuple[int, str]]:
    """Returns on process 0 what every other process gives, by number. Others get nothing.

    Raises:
      TimeoutError: one gave nothing.
    """
    return [(index, one.decode()) for index, one in enumerate(exchange.gather(text.encode(), _WAIT_S)) if index]


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
    parts = [base64.b64encode(part).decode("ascii") for part in ((folder / _INDEX).read_bytes(), node)]
    return json.dumps({"manifest": parts[0], "file": file, "offset": int(offset), "node": parts[1]})


def _write_index(folder: Path, text: str) -> None:
    """Writes the index of another process's arrays, without the arrays."""
    packed = json.loads(text)
    (folder / packed["file"]).parent.mkdir(parents=True)
    (folder / _INDEX).write_bytes(base64.b64decode(packed["manifest"]))
    with open(folder / packed["file"], "wb") as data:
        data.seek(packed["offset"])
        data.write(base64.b64decode(packed["node"]))
