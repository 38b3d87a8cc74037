"""JSON of files that others wrote: every fault of the text is one ValueError with its place.

Refused beside what is no JSON:
- text that is no UTF-8
- more than DEEPEST levels
- numbers of thousands of digits
- strings with half of a surrogate pair, which no tokenizer and no UTF-8 file can take
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = (".json", ".jsonl", ".parquet", ".bin", ".safetensors", ".py")
DEEPEST = 64  # levels of lists and objects
LARGEST = 16 << 20  # bytes of a file of settings
_SHOWN, _SAID = 80, 300  # characters of a value in an error, and of another library's words
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # may begin or end a pair; only a check of the value tells


def parsed(text: str, where: str, digits: int = 0) -> Any:
    """Returns the value of a JSON text.

    Args:
      where: the text's place, which begins every error.
      digits: that a whole number may have at most; reading one takes the square of its digits. 0: Python's own bound.

    Raises:
      ValueError: one sentence.
    """

    def whole(number: str) -> int:
        if len(number) > digits:
            raise ValueError
        return int(number)

    try:
        value = json.loads(text, parse_int=whole if digits else None)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise ValueError(f"{where}: no JSON: {error.msg} at {line}character {error.colno}") from error
    except RecursionError:
        raise ValueError(f"{where}: no JSON that is read here: it has more than {DEEPEST} levels") from None
    except ValueError:  # the only other one: the bound on the digits of a whole number
        most = f"more than {digits}" if digits else "thousands of"
        raise ValueError(f"{where}: no JSON that is read here: a number has {most} digits") from None
    if text.count("[") + text.count("{") > DEEPEST and _depth(value) > DEEPEST:
        raise ValueError(f"{where}: no JSON that is read here: it has more than {DEEPEST} levels")
    if _HALF.search(text):
        refuse_halves(json.dumps(value, ensure_ascii=False), where)
    return value


def refuse_halves(text: str, where: str) -> None:
    """Refuses a text that holds half of a surrogate pair.

    Raises:
      ValueError: one sentence with the character and its surroundings.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = text[max(error.start - 10, 0) : error.start]
        raise ValueError(
            f"{where}: holds half of a surrogate pair, U+{ord(text[error.start]):04X} behind {near!r}, which is no "
            "character; remove it"
        ) from error


def _depth(value: Any) -> int:
    """Counts levels without recursion; stops counting above DEEPEST."""
    level, depth = [value], 0
    while depth <= DEEPEST and (level := [one for one in level if isinstance(one, (dict, list))]):
        inside = (one.values() if isinstance(one, dict) else one for one in level)
        level, depth = [member for members in inside for member in members], depth + 1
    return depth


def read(file: Path, where: str, most: int = LARGEST) -> Any:
    """Returns the value in a JSON file.

    Raises:
      ValueError: the file cannot be read, has more than `most` bytes, or is no JSON. One sentence.
    """
    return parsed(text_of(file, where, most), where)


def text_of(file: Path, where: str, most: int = LARGEST) -> str:
    """Returns the text of a UTF-8 file.

    Raises:
      ValueError: the file cannot be read, has more than `most` bytes, or is no UTF-8. One sentence.
    """
    try:
        about = file.stat()
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{where}: cannot be read: it is a folder, a pipe or a device, and no regular file")
        if about.st_size > most:
            raise ValueError(f"{where}: has {about.st_size} bytes, more than the {most} that such a file may have")
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ValueError(f"{where}: no such file") from None
    except OSError as error:
        raise ValueError(f"{where}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: is no UTF-8 text: {error.reason} at byte {error.start}") from error


def read_object(file: Path, where: str, most: int = LARGEST) -> dict:
    """Returns the object in a JSON file. Raises ValueError as `read` does, and for another kind of value."""
    value = read(file, where, most)
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must hold a JSON object, got a {type(value).__name__}")
    return value


def shown(value: Any, most: int = _SHOWN) -> str:
    """Returns a value as an error shows it, cropped."""
    try:
        value = dict(value) if isinstance(value, Mapping) else value
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except (RecursionError, ValueError):  # too deep, or a number of too many digits
        return f"a {type(value).__name__}"
    return cut(text, most)


def cut(text: str, most: int) -> str:
    """Returns a text of at most `most` characters, with three points where some are left out."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def of_hub(path: str | Path) -> str:
    """Returns a part of a sentence on a path that is not there, where it looks like a hub's name, such as Qwen/Qwen3-8B."""
    text = str(path)
    if not _HUB.fullmatch(text) or Path(text).parent.is_dir() or text.endswith(_FILES):
        return ""
    return f"; nothing of a hub is downloaded here: save {shown(text)} in a folder first, and name that folder or its files"


def said(error: BaseException | str) -> str:
    """Returns the words of another library's error on one line, cropped."""
    text = " ".join(str(error).split())
    return cut(text, _SAID)
