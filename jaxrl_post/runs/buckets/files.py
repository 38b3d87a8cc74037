"""A file or a folder of a bucket as a local one, for what is read from paths.

Folders of this machine stand for places in a bucket. They lie below the system's folder for temporary files (TMPDIR).

Invariant: a copy is of one listing of the bucket, and is whole or not there. It is used again while no object changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxrl_post.config.address import Address, is_bucket, parse
from jaxrl_post.runs.buckets.objects import Objects
from jaxrl_post.runs.buckets.store import Changed

_AT_ONCE = 8  # objects under way


def own_folder(address: Address) -> Path:
    """Returns the folder of this user for an address, made where it is not there.

    Raises:
      ValueError: it belongs to another user.
    """
    above = Path(tempfile.gettempdir()) / f"jaxrl_post-{os.getuid()}"
    above.mkdir(mode=0o700, exist_ok=True)
    if above.is_symlink() or above.stat().st_uid != os.getuid():
        raise ValueError(f"{above} belongs to another user: name another folder for temporary files by TMPDIR")
    digest = hashlib.blake2b(str(address).encode(), digest_size=4).hexdigest()
    place = above / f"{address.name.rpartition('/')[2][:60]}-{digest}"
    place.mkdir(mode=0o700, exist_ok=True)
    return place


def remove_unused(own: Path, lock: str) -> None:
    """Removes the folders below `own` with a file `lock` that no process has locked."""
    for old in own.iterdir():
        if (old / lock).is_file():
            # Another process has locked it, or removes it too.
            with contextlib.suppress(OSError), open(old / lock, "r+", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old)


def local(text: str, option: str) -> str:
    """Returns the path of a local copy of SCHEME://BUCKET/NAME, or any other text as it is.

    NAME is an object, or a folder: all objects below NAME/.

    Args:
      option: what holds the text, which begins every error.

    Raises:
      ValueError: there is nothing of that name, the bucket refuses, or it changes while it is read.
      Unreachable: the bucket does not answer.
    """
    if not is_bucket(text):
        return text
    address = parse(text, option)
    above, _, last = address.name.rpartition("/")
    objects = Objects(dataclasses.replace(address, name=above))
    there = {name: version for name, version in objects.listed(last).items() if not name.endswith("/")}
    if any(part in ("", ".", "..") for name in there for part in name.split("/")):
        raise ValueError(f"{option}={text}: an object below it has a name that no file can have")
    if not there:
        raise ValueError(f"{option}={text}: there is no object of this name, and none below it")
    digest = hashlib.blake2b(repr(there).encode(), digest_size=8).hexdigest()
    place = own_folder(address) / f"files-{digest}"
    if not place.is_dir():
        try:
            made_whole(place, lambda part: _copy(objects, there, part))
        except Changed as error:
            raise ValueError(f"{option}={text}: {error}; start again") from error
    return str(place / last)


def made_whole(place: Path, write: Callable[[Path], object]) -> None:
    """Makes a folder that is there only once it is whole, by `write`. Two processes may do so at once."""
    part = Path(tempfile.mkdtemp(dir=place.parent, prefix=f"{place.name.partition('-')[0]}.part-"))
    try:
        write(part)
        try:
            part.rename(place)
        except OSError:
            if not place.is_dir():  # else another process of this machine was faster
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _copy(objects: Objects, there: dict[str, str], folder: Path) -> None:
    """Writes the objects below a folder."""
    for name in there:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch") as pool:
        list(pool.map(lambda name: objects.save(name, there[name], folder / name), there))
