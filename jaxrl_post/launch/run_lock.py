"""The lock of a run's folder: one job at a time writes there. It ends with its process, however that ends.

Process 0 of a job holds it for all, or each process that of its own disk. The file `.lock` names the holder's host and
process while it is held. The kernel releases the lock with the process, so a killed run leaves none behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
from pathlib import Path

from jaxrl_post import written
from jaxrl_post.checkpoint.disks import ONE_DISK, Disks
from jaxrl_post.parallel.processes import any_text

NAME = ".lock"


def hold(folder: Path, stack: contextlib.ExitStack, disks: Disks = ONE_DISK) -> None:
    """Locks the folder for this job until `stack` closes.

    Raises:
      ValueError: another process holds it, or the folder cannot be written.
    """
    refusal = ""
    if disks.writes:
        try:
            stack.enter_context(_held(folder))
        except BlockingIOError:
            refusal = (
                f"{folder} is in use by {_holder(folder)}: a run is written by one job at a time; end that one first"
            )
        except OSError as error:
            refusal = (
                f"{folder} cannot be written: {error.strerror or error} ({error.filename}); name a --run-dir that can"
            )
    refusal = any_text(refusal)
    if refusal:
        raise ValueError(refusal)


@contextlib.contextmanager
def _held(folder: Path):
    with open(folder / NAME, "ab", buffering=0, opener=_own) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        about = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with written.naming(folder / NAME):
            file.truncate(0)
            written.put(file, json.dumps(about))
        try:
            yield
        finally:
            file.truncate(0)


def _own(path: str, flags: int) -> int:
    """Opens a file that nothing else names: what is written into a link would be lost to its target.

    Raises:
      OSError: it is a link, has a second name, or is no file.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EEXIST, "it is no file of this folder alone; remove it", path)
    return descriptor


def _holder(folder: Path) -> str:
    """Describes who holds the lock."""
    try:
        about = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return f"process {about['pid']} on host {about['host']} since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
