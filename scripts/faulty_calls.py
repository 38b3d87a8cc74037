"""A library in front of libc for one process and its children: a clock that jumps, renames and writes that fail.

It stands between a program and the system, so Python, Orbax, tensorstore and safetensors all meet the fault. Only files below
one folder are touched. The monotonic clock is left alone, as a jump of a real clock leaves it.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

from record import Missing

SOURCE = Path(__file__).with_suffix(".c")


class Faults:
    """The library, built in `folder`.

    Raises:
      Missing: there is no C compiler.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._library = folder, folder / "faulty_calls.so"
        if (compiler := shutil.which("cc")) is None:
            raise Missing("faults: there is no C compiler cc, which builds the library that fails calls on purpose")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", self._library, SOURCE, "-ldl"], check=True)

    def _environment(self, **values: object) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library)} | {f"FAULTS_{name}": str(value) for name, value in values.items()}

    def watched(self, under: Path, seen: Path) -> dict[str, str]:
        """Returns the variables of a process whose renames and writes below a folder are noted in the file `seen`."""
        return self._environment(UNDER=under, SEEN=seen)

    def rename(self, under: Path, seen: Path, target: str, at: int, reason: int) -> dict[str, str]:
        """Returns the variables of a process whose `at`-th rename to a name that matches `target` fails, by errno `reason`."""
        return self._environment(UNDER=under, SEEN=seen, RENAMES=target, RENAME_AT=at, ERRNO=reason)

    def full(self, under: Path, seen: Path, name: str, at: int) -> dict[str, str]:
        """Returns the variables of a process that has no room in files that match `name` from the `at`-th write on."""
        return self._environment(UNDER=under, SEEN=seen, WRITES=name, WRITE_AT=at, ERRNO=errno.ENOSPC)

    def clock(self, file: Path) -> dict[str, str]:
        """Returns the variables of a process whose clock is the seconds of `set_clock` ahead."""
        return self._environment(CLOCK=file)


def set_clock(file: Path, ahead: int) -> None:
    """Sets how many seconds the clock of running processes is ahead. Negative: behind."""
    if not file.exists():
        file.write_bytes(bytes(mmap.PAGESIZE))
    with open(file, "r+b") as out:
        os.pwrite(out.fileno(), struct.pack("=q", ahead), 0)
