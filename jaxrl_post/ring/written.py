"""Files as they are written: a log that grows, or a file that is whole or not there. Every error names its file.

The system names a file where it is opened or renamed, and not where a write finds the disk full.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Gives an OSError that names no file the name of this one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def whole(path: str | Path, data: bytes | str) -> None:
    """Writes a file under another name and renames it. A failure leaves the file as it was, and nothing beside it.

    Raises:
      OSError: it cannot be written.
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.part")
    try:
        with naming(path):
            part.write_bytes(data.encode("utf-8") if isinstance(data, str) else data)
            os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def put(file: io.RawIOBase, text: str) -> None:
    """Writes all of a text to a file without a buffer: a nearly full disk takes a part of it, and refuses the rest."""
    rest = memoryview(text.encode("utf-8"))
    while rest:
        rest = rest[file.write(rest) or 0 :]


class Log:
    """A file to which text is appended. Nothing waits in memory, so closing it writes nothing and cannot fail late.

    Args:
      mode: "a", or "w" to begin anew.
    """

    def __init__(self, path: str | Path, mode: str = "a"):
        self._path = Path(path)
        self._file = open(self._path, f"{mode}b", buffering=0)  # noqa: SIM115, closed by `close`

    def write(self, text: str) -> None:
        """Appends a text. A crash of the process cannot lose it afterwards, a crash of the machine can.

        Raises:
          OSError: it cannot be written, or only a part of it.
        """
        with naming(self._path):
            put(self._file, text)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
