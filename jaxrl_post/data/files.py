"""The objects of a data file, one after another, each with its place: a line of JSONL, a row of Parquet.

JSONL needs nothing. Parquet needs pyarrow, an optional part of this project; its dates and decimals become text, and
bytes (images) are refused. Refused too: no such file, another kind of file, a text that is no UTF-8, a line that is no
JSON.
"""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def objects(path: str | Path) -> Iterator[tuple[str, Any]]:
    """(place, object): "FILE, line 3" of a JSONL file (*.jsonl, *.json), empty lines left out, or "FILE, row 3" of a
    Parquet file.

    Raises:
      ValueError: one sentence, with file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"data: there is no file {path}")
    if path.suffix not in _READERS:
        raise ValueError(f"data: {path} has the ending {path.suffix!r}; known are {', '.join(_READERS)}")
    return _READERS[path.suffix](path)


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"data: {path} is no UTF-8 text: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}, line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"data: {path}, line {number}: no JSON: {error.msg} at character {error.colno}") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise ValueError(
            f"data: {path} is a Parquet file, which needs pyarrow: pip install 'jaxrl_post[parquet]', or "
            "write the rows as JSONL"
        ) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", _plain(f"{path}, row {number}", row)
    except pyarrow.ArrowException as error:
        raise ValueError(f"data: {path}, after row {number}: no whole Parquet file: {error}") from error


def _plain(where: str, value: Any) -> Any:
    """What JSON could have said."""
    if isinstance(value, dict):
        return {name: _plain(f"{where}, column {name!r}", member) for name, member in value.items()}
    if isinstance(value, list):
        return [_plain(where, member) for member in value]
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)):
        return str(value)
    if isinstance(value, bytes):
        raise ValueError(
            f"data: {where}: holds bytes, which no text prompt or reward function can use; write the file "
            "without that column"
        )
    return value


_READERS = {".jsonl": _lines, ".json": _lines, ".parquet": _parquet}
