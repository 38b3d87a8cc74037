"""The files of a step, and the signed list that vouches for them: MANIFEST.json.

It lists the size and BLAKE2b of every file. It is signed with the key of the run, checkpoints/.key, over its files and
the number of the step. So files that were exchanged are found, even if the list was computed anew.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import jax

MANIFEST, ABOUT, KEY = "MANIFEST.json", "about.json", ".key"
HASHES = "hashes.process_"  # what other processes than 0 hashed, until the manifest is written
UNSIGNED = f"{MANIFEST} is not signed with this run's key: it was changed"


def read_key(folder: Path) -> bytes:
    """Returns the key that signs the steps below `folder`.

    Raises:
      OSError: there is none.
      ValueError: it is malformed.
    """
    key = bytes.fromhex((folder / KEY).read_text(encoding="ascii").strip())
    if len(key) != 32:
        raise ValueError(f"a key of {len(key)} bytes, not 32")
    return key


def manifest(folder: Path, step: int, key: bytes, own: Mapping | None = None) -> dict:
    """Returns the size and BLAKE2b of every file below `folder`, the step, and their signature with `key`.

    Every file is on disk when this returns. What other processes hashed is taken from them, and their notes go.

    Args:
      own: what `hashed` returned for process 0; None: it is called here.
    """
    files = dict(own) if own is not None else hashed(folder, 0)
    for note in sorted(folder.glob(f"{HASHES}*")):
        files |= json.loads(note.read_text(encoding="utf-8"))
        note.unlink()
    files = dict(sorted(files.items()))
    return {"files": files, "step": step, "signature": _signature(files, step, key)}


def hashed(folder: Path, process: int) -> dict[str, dict]:
    """Returns the size and BLAKE2b of every file below `folder` that `process` wrote. They are on disk then."""
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "blake2b": _digest(path, settle=True)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST and _writer(path.relative_to(folder)) == process
    }


def _writer(name: Path) -> int:
    """Returns the process that wrote a file of a step. In a job of one process it wrote all."""
    if jax.process_count() == 1:
        return 0  # in a job of several, each hashes its own
    if name.name.startswith(HASHES):
        return -1
    own = [int(found[1]) for part in name.parts if (found := re.fullmatch(r"(?:ocdbt\.)?process_([0-9]+)", part))]
    return own[0] if own and own[0] < jax.process_count() else 0


def damage(folder: Path, key: bytes, *, contents: bool = True, share: tuple[int, int] = (0, 1)) -> str:
    """Returns why a step is not valid, or an empty text.

    Args:
      contents: False: only sizes are compared.
      share: (number, count): of all files by size, only every `count`-th is read, beginning with this number. So
        several processes together read all.
    """
    files, reason = listed(folder, key)
    if reason:
        return reason
    number, count = share
    read = set(sorted(files, key=lambda name: (-files[name]["bytes"], name))[number::count]) if contents else set()
    for name, about in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != about["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {about['bytes']}"
        try:
            digest = _digest(path) if name in read else about["blake2b"]
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if digest != about["blake2b"]:
            return f"the bytes of {name} are not those that were written"
    there = {path.relative_to(folder).as_posix() for part in ("arrays", "host") for path in (folder / part).rglob("*")}
    unlisted = sorted(name for name in there if name not in files and (folder / name).is_file())
    return f"{unlisted[0]} is not listed in {MANIFEST}" if unlisted else ""


def listed(folder: Path, key: bytes) -> tuple[dict, str]:
    """Returns the files that a step's manifest lists, and why the manifest is not valid, or an empty text."""
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{MANIFEST} is missing or unreadable ({type(error).__name__})"
    if not isinstance(listed, dict) or not isinstance(files := listed.get("files"), dict) or ABOUT not in files:
        return {}, f"{MANIFEST} does not list {ABOUT}"
    step = int(folder.name.removeprefix("step_"))
    if (named := listed.get("step")) != step:
        return {}, f"{MANIFEST} is of step {named if isinstance(named, int) else None}"
    signature = listed.get("signature")
    given = signature.encode() if isinstance(signature, str) and signature.isascii() else b""
    if not hmac.compare_digest(given, _signature(files, step, key).encode()):
        return {}, UNSIGNED
    return files, ""


def _digest(path: Path, settle: bool = False) -> str:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "blake2b").hexdigest()
        if settle:
            os.fsync(file.fileno())
    return digest


def _signature(files: Mapping, step: int, key: bytes) -> str:
    text = json.dumps({"files": files, "step": step}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=32, key=key).hexdigest()
