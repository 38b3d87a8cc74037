"""Compiled programs of a bucket: JAX_COMPILATION_CACHE_DIR=SCHEME://BUCKET/NAME.

A process copies all of them to a folder of its own, which jax reads and writes. A thread uploads new ones until its end. What
XLA:GPU found fastest travels with them (launch/autotuning.py).

Invariant: only this process writes its folder, and a program is uploaded a while after it was written: never half.
A bucket that does not answer, or a disk that is full, costs compilations and ends nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jaxrl_post.config.address import parse
from jaxrl_post.parallel.processes import say
from jaxrl_post.runs.buckets import files
from jaxrl_post.runs.buckets.objects import Objects
from jaxrl_post.runs.buckets.store import Changed, Unreachable

AUTOTUNING = "xla_gpu_per_fusion_autotune_cache_dir"  # where jax has XLA:GPU keep what it found fastest, by fusion
_EVERY_S = 20.0
_WRITTEN_S = 5.0  # after which jax has certainly written a program to its end
_LOCK = ".lock"


@functools.cache
def opened(address: str, name: str) -> ProgramCache:
    """Returns the programs of an address, uploaded until this process ends. See ProgramCache."""
    programs = ProgramCache(address, name, say)
    atexit.register(programs.close)
    return programs


class ProgramCache:
    """The programs of an address, in the local `folder`. New ones are uploaded until `close`.

    Args:
      name: of the variable that holds the address, which begins every error.

    Raises:
      ValueError: the address is malformed, or the bucket refuses.
    """

    def __init__(self, address: str, name: str, say_so: Callable[[str], object]):
        self._objects, self._say = Objects(parse(address, name)), say_so
        own = files.own_folder(self._objects.address)
        files.remove_unused(own, _LOCK)
        self.folder = Path(tempfile.mkdtemp(dir=own, prefix="programs-"))
        self._lock = open(self.folder / _LOCK, "w", encoding="utf-8")  # held as long as the process
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self._there: set[str] = set()
        self._seen: dict[str, tuple[int, float]] = {}  # bytes of a new program, and since when on the monotonic clock
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="programs", daemon=True)
        try:
            self._fetch()
        except (Unreachable, OSError) as error:
            self._say(f"{name}: {error}; programs are compiled here")
        self._thread.start()

    def close(self) -> None:
        """Uploads the last programs, and removes the folder."""
        self._over.set()
        self._thread.join()
        self._lock.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _fetch(self) -> None:
        for name, version in self._objects.listed("").items():
            place, _, own = name.rpartition("/")
            if place in ("", AUTOTUNING) and not own.startswith("."):
                (self.folder / place).mkdir(exist_ok=True)
                part = self.folder / place / f".{own}.part"
                try:
                    self._objects.save(name, version, part)
                    part.rename(self.folder / name)
                finally:
                    part.unlink(missing_ok=True)
                self._there.add(name)

    def _follow(self) -> None:
        """Uploads new programs every now and then, and once more after the end."""
        ended = False
        while not ended:
            ended = self._over.wait(_EVERY_S)
            try:
                self._upload(0.0 if ended else _WRITTEN_S)
            except (Unreachable, ValueError, OSError) as error:
                if ended:
                    self._say(f"compiled programs were not kept: {error}")

    def _upload(self, age_s: float) -> None:
        """Uploads the programs that have not changed for so long."""
        for path in (*self.folder.iterdir(), *(self.folder / AUTOTUNING).glob("*")):
            name = path.relative_to(self.folder).as_posix()
            if name in {*self._there, _LOCK} or not path.is_file():
                continue
            now, size = time.monotonic(), path.stat().st_size
            if self._seen.get(name, (-1, now))[0] != size:
                self._seen[name] = size, now
            if now - self._seen[name][1] >= age_s:
                with contextlib.suppress(Changed):  # another process compiled it too
                    self._objects.create(name, path.read_bytes())
                self._there.add(name)
