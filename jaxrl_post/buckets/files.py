"""A file or a folder of a bucket as a local one, for what is read from paths.

Invariant: a copy is of one listing of the bucket, and is whole or not there. It is used again while no object changes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxrl_post.buckets.address import is_bucket, parse
from jaxrl_post.buckets.objects import Objects
from jaxrl_post.buckets.scratch import own_folder
from jaxrl_post.buckets.store import Changed

_AT_ONCE = 8  # objects under way


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
            _copy(objects, there, place)
        except Changed as error:
            raise ValueError(f"{option}={text}: {error}; start again") from error
    return str(place / last)


def _copy(objects: Objects, there: dict[str, str], place: Path) -> None:
    """Writes the objects below a folder, which is there only once it is whole. Two processes may do so at once."""
    part = Path(tempfile.mkdtemp(dir=place.parent, prefix="files.part-"))
    try:
        for name in there:
            (part / name).parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch") as pool:
            list(pool.map(lambda name: objects.save(name, there[name], part / name), there))
        try:
            part.rename(place)
        except OSError:
            if not place.is_dir():  # else another process of this machine was faster
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
