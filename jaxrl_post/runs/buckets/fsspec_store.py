"""Every other store of objects, by its file system of fsspec: s3:// by s3fs, az:// by adlfs.

Nothing is asked of the store but to create an object only where there is none, and to list what was written at once.
The object that changes is a sequence of objects that do not: NAME/000000000007 replaces NAME/000000000006. Who creates a number
has replaced the one before it.

Invariant: a number counts while it is the newest one and the one before it is there, or it is the first. Old ones are
deleted, so a writer that was late may create one of them again. It then finds newer ones, or not the one that it replaces,
and has changed nothing.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import sys
from pathlib import Path
from typing import Any

from jaxrl_post.config.address import EXTRAS, Address
from jaxrl_post.runs.buckets.store import LATER, Changed, Lost, Missing, ObjectBytes, one_line

_TIMES_S = (5.0, 30.0)  # of one request: to connect, and between two parts of an answer
_CALL_S, _SLOWEST = 20.0, 100_000  # of one attempt: seconds, and bytes a second of what it moves beside them
_LISTING = 10_000_000  # bytes that a listing may move
_FINAL = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.ENAMETOOLONG, errno.EMSGSIZE, errno.EISDIR} | {
    getattr(errno, "EREMCHG", errno.EINVAL),  # another region or endpoint
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
}
_CUTS = (  # errors of the clients that are no OSError, after which a call is tried again
    ("botocore.exceptions", "HTTPClientError"),
    ("botocore.exceptions", "ConnectionError"),
    ("botocore.parsers", "ResponseParserError"),
    ("azure.core.exceptions", "ServiceRequestError"),
    ("azure.core.exceptions", "ServiceResponseError"),
    ("azure.core.exceptions", "IncompleteReadError"),
    ("aiohttp", "ClientError"),
)
_REFUSALS = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("azure.core.exceptions", "AzureError"),
)
_VERSIONS = ("generation", "md5Hash", "last_modified", "LastModified", "mtime", "created", "size")


class FsspecStore:
    """The objects below an address, for store.Store.

    Raises:
      ValueError: the client is not installed, or does not take the address.
    """

    def __init__(self, address: Address):
        self._address, self._checked = address, False
        try:
            from fsspec.asyn import sync
            from fsspec.core import url_to_fs
            from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

            files, root = url_to_fs(str(address).rstrip("/"), **_options(address.scheme))
        except ImportError as error:
            extra = EXTRAS.get(address.scheme)
            how = f"pip install 'jaxrl_post[{extra}]'" if extra else "see the documentation of fsspec"
            raise ValueError(f"{address}: install what reads it: {how} ({one_line(error)})") from error
        except (ValueError, TypeError, OSError) as error:
            raise ValueError(f"{address}: its client does not start: {one_line(error)}") from error
        if EXTRAS.get(address.scheme) == "s3":
            files.retries = 1  # attempts are counted in objects.py
        self._creates = _creates_itself(files)
        self._files = files if files.async_impl else AsyncFileSystemWrapper(files)
        self._root, self._sync = root.rstrip("/"), sync
        self._cuts, self._refusals = _loaded(_CUTS), _loaded(_REFUSALS)

    def read(self, name: str) -> bytes:
        return self._asked("_cat_file", self._at(name))

    def write(self, name: str, data: bytes) -> None:
        self._asked("_pipe_file", self._at(name), data, size=len(data))

    def create(self, name: str, data: bytes) -> None:
        try:
            self._asked("_pipe_file", self._at(name), data, size=len(data), mode="create")
        except ValueError:
            if self._entry(name) is None:
                raise
            raise Changed(f"{self._address}/{name} is there") from None  # some stores say so in words of their own

    def save(self, name: str, version: str, path: Path) -> None:
        size = self._size_of(name, version)
        self._asked("_get_file", self._at(name), str(path), size=size)
        if path.stat().st_size != size:
            raise Lost(f"{name} has {size} bytes there, and {path.stat().st_size} came")
        self._size_of(name, version)

    def listed(self, place: str) -> dict[str, str]:
        entry = self._entry(place.rstrip("/"))
        waiting, found = [entry] if entry else [], {}
        while waiting:
            one = waiting.pop()
            if one["type"] == "directory":
                waiting += self._below(one["name"])
            else:
                found[one["name"].removeprefix(f"{self._root}/")] = _version(one)
        return found

    def delete(self, name: str) -> None:
        self._asked("_rm_file", self._at(name))

    # ---- the object that changes

    def current(self, name: str) -> ObjectBytes:
        newest = max(self._numbers(name), default=0)
        if not newest:
            return ObjectBytes(data=b"", generation=0)
        try:
            return ObjectBytes(data=self.read(_numbered(name, newest)), generation=newest)
        except Missing as error:
            raise Lost(f"{name} was replaced while it was read") from error

    def replace(self, name: str, data: bytes, generation: int) -> int:
        self._check_creates()
        new = generation + 1
        self.create(_numbered(name, new), data)
        numbers = self._numbers(name)
        if max(numbers, default=0) != new or (generation and generation not in numbers):
            self._forget(_numbered(name, new))
            raise Changed(f"{self._address}/{name} was changed by another")
        for number in numbers - {new, generation}:
            self._forget(_numbered(name, number))
        return new

    def drop(self, name: str, generation: int) -> None:
        self.replace(name, b"", generation)  # no number may ever be given again

    def _numbers(self, name: str) -> set[int]:
        """Returns the numbers of the sequence of a name."""
        found = (re.fullmatch(r".*/([0-9]{12})", one["name"]) for one in self._below(self._at(name)))
        return {int(one[1]) for one in found if one}

    def _forget(self, name: str) -> None:
        """Deletes an object, or leaves it to the next one that replaces it."""
        with contextlib.suppress(Missing, Lost):
            self.delete(name)

    def _check_creates(self) -> None:
        """Refuses a store that writes over what is there. The first change asks it, by an object of its own."""
        if self._checked:
            return
        probe, refused = f"PROBE-{secrets.token_hex(8)}", False
        if self._creates:
            with contextlib.suppress(Changed):  # by an attempt of the client's own
                self.create(probe, b"")
            try:
                self.create(probe, b"")
            except Changed:
                refused = True
            self._forget(probe)
        if not refused:
            raise ValueError(
                f"{self._address}: this store does not create an object only where there is none, which a run needs; it "
                "can be read: write the run to gs://, s3:// or az://, or to a local path"
            )
        self._checked = True

    # ---- calls

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _entry(self, name: str) -> dict[str, Any] | None:
        """Returns what the store says of an object or a folder, or None where there is none."""
        with contextlib.suppress(Missing):
            return self._asked("_info", self._at(name))
        return None

    def _below(self, folder: str) -> list[dict[str, Any]]:
        """Returns what the store says of the objects and folders directly below a folder."""
        with contextlib.suppress(Missing):
            found = self._asked("_ls", folder, size=_LISTING, detail=True)
            return [one for one in found if one["name"].rstrip("/") != folder.rstrip("/")]
        return []

    def _size_of(self, name: str, version: str) -> int:
        """Returns the bytes of an object of a version."""
        entry = self._asked("_info", self._at(name))
        if _version(entry) != version:
            raise Changed(f"{self._address}/{name} was changed while it was read")
        return int(entry["size"])

    def _asked(self, method: str, *given: Any, size: int = 0, **options: Any) -> Any:
        """Returns the answer of the file system, or says in the words of store.py how the attempt failed."""
        seconds = _CALL_S + size / _SLOWEST
        try:
            return self._sync(self._files.loop, getattr(self._files, method), *given, timeout=seconds, **options)
        except FileNotFoundError as error:
            raise Missing(one_line(error)) from error
        except FileExistsError as error:
            raise Changed(f"{self._address}: {given[0]} is there") from error
        except (NotImplementedError, TypeError) as error:
            raise ValueError(f"{self._address}: this store has no such call: {one_line(error)}") from error
        except OSError as error:
            raise self._failure(error, isinstance(error, PermissionError) or error.errno in _FINAL) from error
        except self._cuts as error:
            raise self._failure(error, False) from error
        except self._refusals as error:
            status = getattr(error, "status_code", None)
            raise Missing(one_line(error)) if status == 404 else self._failure(error, status not in LATER) from error

    def _failure(self, error: BaseException, final: bool) -> Exception:
        if final:
            return ValueError(f"{self._address}: the bucket refuses: {one_line(error)}")
        return Lost(one_line(error) or type(error).__name__)


def _options(scheme: str) -> dict[str, Any]:
    """Returns what a client is made with: no cache of listings, deadlines, and no attempts of its own.

    The user's own options are those of fsspec's configuration files and of FSSPEC_ variables.
    """
    from fsspec.config import conf

    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    connect_s, read_s = _TIMES_S
    if EXTRAS.get(scheme) == "s3":
        own = {"connect_timeout": connect_s, "read_timeout": read_s, "retries": {"total_max_attempts": 1}}
        options["config_kwargs"] = own | conf.get(scheme, {}).get("config_kwargs", {})
    if EXTRAS.get(scheme) == "azure":
        options |= {"connection_timeout": connect_s, "read_timeout": read_s}
    return options


def _creates_itself(files: Any) -> bool:
    """Returns whether a file system has a way of its own to write an object only where there is none.

    That of fsspec's base class looks first and writes then, between which another one may write.
    """
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    if files.async_impl:
        return type(files)._pipe_file is not AsyncFileSystem._pipe_file
    return type(files).pipe_file is not AbstractFileSystem.pipe_file


def _loaded(names: tuple[tuple[str, str], ...]) -> tuple[type[BaseException], ...]:
    """Returns the classes of modules that are imported: those of the clients that are in use."""
    return tuple(getattr(sys.modules[module], name) for module, name in names if module in sys.modules)


def _numbered(name: str, number: int) -> str:
    return f"{name}/{number:012d}"


def _version(entry: dict[str, Any]) -> str:
    """Returns a text that changes with an object: its tag, or else when it was written and its size."""
    tag = entry.get("ETag") or entry.get("etag")
    if tag:
        return str(tag).strip('"')
    told = [entry.get(name) for name in _VERSIONS]
    return repr([one.timestamp() if hasattr(one, "timestamp") else one for one in told])
