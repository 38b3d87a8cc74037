"""Folders of this machine that stand for places in a bucket, below the system's folder for temporary files (TMPDIR)."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from jaxrl_post.buckets.address import Address


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
