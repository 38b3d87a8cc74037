"""The objects of a data file, one after another, each with its place: a line of JSONL, an item of a JSON array, a row of Parquet.

JSON needs nothing. A file that begins with `[` is one array, and a byte order mark is passed over. Parquet needs pyarrow, an
optional part of this project; its dates and decimals become text, and bytes (images) are refused. Refused too: no such file,
another kind of file, a text that is no UTF-8, a line that is no JSON, and a damaged Parquet file. A line is read only when its
turn comes.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_post.ring import json_text


def objects(path: str | Path) -> Iterator[tuple[str, Any]]:
    """(place, object): "FILE, line 3" of a JSONL file (*.jsonl, *.json), empty lines left out. Of an array "FILE, item 3", and of
    a Parquet file "FILE, row 3".
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"data: there is no file {path}")
    if path.suffix not in _READERS:
        raise ValueError(f"data: {path} has the ending {path.suffix!r}; known are {', '.join(_READERS)}")
    return _READERS[path.suffix](path)


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    number, first = 0, True
    try:
        with open(path, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if first and line.lstrip().startswith("["):
                    items = _items(path, "\n" * (number - 1) + line + lines.read())
                    yield from ((f"{path}, item {place}", item) for place, item in enumerate(items, start=1))
                    return
                if line.strip():
                    first = False
                    yield f"{path}, line {number}", json_text.parsed(line.rstrip("\n"), f"data: {path}, line {number}")
    except UnicodeDecodeError as error:
        raise ValueError(f"data: {path}, line {_broken(path)}: is no UTF-8 text: {error.reason}") from error
    except OSError as error:
        raise ValueError(f"data: {path}, after line {number}: cannot be read: {error.strerror}") from error


def _items(path: Path, text: str) -> list:
    try:
        return json_text.parsed(text, f"data: {path}")
    except ValueError as error:
        raise ValueError(
            f"{error}; a file that begins with '[' is one array of objects, else write one object a line"
        ) from error


def _broken(path: Path) -> int:
    """Returns the number of the first line that is no UTF-8. The reader of text sees blocks, not lines."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return 0


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow.parquet  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise ValueError(
            f"data: {path} is a Parquet file, which needs pyarrow: pip install 'jaxrl_post[parquet]', or "
            "write the rows as JSONL"
        ) from error
    for number, row in enumerate(_batched_rows(path), start=1):
        yield f"{path}, row {number}", plain(f"{path}, row {number}", row)


def _batched_rows(path: Path) -> Iterator[dict]:
    """Yields the rows of a Parquet file. Text that is no UTF-8 would raise only where it is used, so it is asked for."""
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches():
                batch.validate(full=True)
                for row in _told(batch).to_pylist():
                    number += 1
                    yield row
    # Damaged pages raise OSError and bare errors of Python beside the library's own.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, TypeError, KeyError) as error:
        words = json_text.said(error)
        raise ValueError(f"data: {path}, after row {number}: no whole Parquet file: {words}") from error


def _told(batch: Any) -> Any:
    """Returns a batch whose nanoseconds Python can hold: as microseconds, else as text of nine digits."""
    import pyarrow

    for place, field in enumerate(batch.schema):
        micros, text = _without_nanoseconds(field.type, "us"), _without_nanoseconds(field.type, "")
        if micros != field.type:
            try:
                column = batch.column(place).cast(micros)
            except pyarrow.ArrowInvalid:  # it would lose digits
                column = batch.column(place).cast(text)
            batch = batch.set_column(place, field.name, column)
    return batch


def _without_nanoseconds(kind: Any, unit: str) -> Any:
    """Returns a type of Arrow with nanoseconds replaced at any depth: by a unit, or by text (durations: by their number)."""
    import pyarrow

    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([one.with_type(_without_nanoseconds(one.type, unit)) for one in kind])
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        made = pyarrow.list_ if pyarrow.types.is_list(kind) else pyarrow.large_list
        return made(kind.value_field.with_type(_without_nanoseconds(kind.value_type, unit)))
    if getattr(kind, "unit", "") != "ns":
        return kind
    if pyarrow.types.is_timestamp(kind):
        return pyarrow.timestamp(unit, kind.tz) if unit else pyarrow.string()
    if pyarrow.types.is_time64(kind):
        return pyarrow.time64(unit) if unit else pyarrow.string()
    return pyarrow.duration(unit) if unit else pyarrow.int64()


def plain(where: str, value: Any) -> Any:
    """Returns a value of a row as JSON could have said it: arrays become lists, and dates and decimals become text."""
    if isinstance(value, Mapping):
        return {name: plain(f"{where}, column {name!r}", member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(where, member) for member in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(where, value.tolist())
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)):
        return str(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    what = "bytes" if isinstance(value, bytes) else f"a {type(value).__name__}"
    raise ValueError(
        f"data: {where}: holds {what}, which no text prompt or reward function can use; leave it out, or give it as text, "
        "a number, a list or an object"
    )


_READERS = {".jsonl": _lines, ".json": _lines, ".parquet": _parquet}
