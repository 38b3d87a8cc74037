"""The objects below an address: each is read and written whole.

Invariant: a call ends with the bucket's answer or with an error, within its patience. A call that was cut, delayed or
lost is tried again with growing pauses. So a write may reach the bucket more than once, and also where it raises.

The client is google-cloud-storage, for its generation preconditions. STORAGE_EMULATOR_HOST names another server.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jaxrl_post.buckets.address import Address

PATIENCE_S = 30.0
_TIMES_S = (5.0, 30.0)  # of one request: to connect, and between two parts of an answer
_T = TypeVar("_T")


class Unreachable(RuntimeError):
    """The bucket gave no answer in time. It may give one later."""


class Changed(RuntimeError):
    """An object has another generation than the write asked for. Nothing was written."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """An object's bytes and its generation, which every write changes."""

    data: bytes
    generation: int


class Objects:
    """The objects whose names begin with that of the address.

    Args:
      patience_s: seconds for which one call is tried.

    Raises:
      ValueError: the client is not installed, or no credentials are found.
    """

    def __init__(self, address: Address, patience_s: float = PATIENCE_S):
        self.address, self._prefix = address, f"{address.name}/" if address.name else ""
        try:
            import google_crc32c
            from google.api_core import exceptions
            from google.auth.exceptions import GoogleAuthError
            from google.cloud import storage
            from google.cloud.storage.exceptions import DataCorruption
            from google.cloud.storage.retry import DEFAULT_RETRY
        except ImportError as error:
            raise ValueError(
                f"{address}: install what reads buckets: pip install 'jaxrl_post[gcs]' ({error})"
            ) from error
        try:
            self._bucket = storage.Client().bucket(address.bucket)
        except (GoogleAuthError, OSError) as error:
            raise ValueError(f"{address}: no credentials of Google Cloud are found here: {_one_line(error)}") from error
        self._errors, self._auth_error, self._cut = exceptions, GoogleAuthError, DataCorruption
        self._crc32c = google_crc32c.Checksum
        self._retry = DEFAULT_RETRY.with_timeout(patience_s).with_delay(initial=0.1, maximum=5.0, multiplier=2.0)

    def read(self, name: str) -> Found | None:
        """Returns an object, or None where there is none.

        Raises:
          Unreachable: no answer came in time.
          ValueError: the bucket refuses.
        """

        def once() -> Found:
            blob = self._blob(name)
            try:
                data = blob.download_as_bytes(timeout=_TIMES_S, retry=None)
            except self._cut as error:
                raise ConnectionError(str(error)) from error  # which is tried again
            return Found(data=data, generation=int(blob.generation))

        try:
            return self._tried(once)
        except self._errors.NotFound:
            return None

    def write(self, name: str, data: bytes, generation: int | None = None) -> int:
        """Writes an object whole and returns its new generation.

        Args:
          generation: that the object must have; 0: it must not be there; None: any.

        Raises:
          Changed: it has another one. Where an answer was lost, that may be this write's own.
          Unreachable: no answer came in time. The object may be written or not.
          ValueError: the bucket refuses.
        """
        digest = base64.b64encode(self._crc32c(data).digest()).decode("ascii")

        def once() -> int:
            blob = self._blob(name)
            blob.upload_from_string(
                data, "application/octet-stream", if_generation_match=generation, timeout=_TIMES_S, retry=None
            )
            if blob.crc32c != digest:
                raise ConnectionError(f"{name} has another checksum there than here")
            return int(blob.generation)

        try:
            return self._tried(once)
        except self._errors.PreconditionFailed as error:
            raise Changed(f"{self.address}/{name} was changed by another") from error
        except self._errors.NotFound as error:
            raise ValueError(f"{self.address}: there is no bucket {self.address.bucket}; make it first") from error

    def save(self, name: str, generation: int, path: Path) -> None:
        """Writes an object of a generation to a file, which may be larger than the memory.

        Raises:
          Changed: it has another generation now, or is there no more.
          Unreachable, ValueError: as `read`.
        """

        def once() -> None:
            try:
                blob = self._bucket.blob(self._prefix + name, generation=generation)
                blob.download_to_filename(path, timeout=_TIMES_S, retry=None)
            except self._cut as error:
                raise ConnectionError(str(error)) from error  # which is tried again

        try:
            self._tried(once)
        except self._errors.NotFound as error:
            raise Changed(f"{self.address}/{name} was changed while it was read") from error

    def names(self, prefix: str) -> list[str]:
        """Returns the names of the objects that begin with `prefix`, in order. Errors are those of `listed`."""
        return list(self.listed(prefix))

    def listed(self, prefix: str) -> dict[str, int]:
        """Returns the generations of the objects whose names begin with `prefix`, by name, in order.

        Raises:
          Unreachable, ValueError: as `read`.
        """
        try:
            return self._tried(
                lambda: dict(
                    sorted(
                        (blob.name.removeprefix(self._prefix), int(blob.generation))
                        for blob in self._bucket.list_blobs(
                            prefix=self._prefix + prefix,
                            fields="items(name,generation),nextPageToken",
                            timeout=_TIMES_S,
                            retry=None,
                        )
                    )
                )
            )
        except self._errors.NotFound as error:
            raise ValueError(f"{self.address}: there is no bucket {self.address.bucket}; make it first") from error

    def delete(self, name: str, generation: int | None = None) -> None:
        """Deletes an object, if it is there and has the generation.

        Raises:
          Unreachable, ValueError: as `read`.
        """
        try:
            self._tried(lambda: self._blob(name).delete(if_generation_match=generation, timeout=_TIMES_S, retry=None))
        except (self._errors.NotFound, self._errors.PreconditionFailed):
            return

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._prefix + name)

    def _tried(self, once: Callable[[], _T]) -> _T:
        """Returns the result of a call that is tried until its patience ends."""
        try:
            return self._retry(once)()
        except self._errors.RetryError as error:
            raise Unreachable(f"{self.address} does not answer: {_one_line(error.cause or error)}") from error
        except (self._errors.NotFound, self._errors.PreconditionFailed):
            raise
        except (self._errors.GoogleAPICallError, self._auth_error) as error:
            raise ValueError(f"{self.address}: the bucket refuses: {_one_line(error)}") from error


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]
