"""Google Cloud Storage as a store. The client is google-cloud-storage, for its generation preconditions.

STORAGE_EMULATOR_HOST names another server.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl_post.config.address import Address
from jaxrl_post.runs.buckets.store import LATER, Changed, Lost, Missing, ObjectBytes, one_line

_TIMES_S = (5.0, 30.0)  # of one request: to connect, and between two parts of an answer
_ONCE: dict[str, Any] = {"timeout": _TIMES_S, "retry": None}


class GoogleStore:
    """The objects below an address, for store.Store.

    Raises:
      ValueError: the client is not installed, or no credentials are found.
    """

    def __init__(self, address: Address):
        self._address, self._prefix = address, f"{address.name}/" if address.name else ""
        try:
            import google_crc32c
            import requests
            import urllib3
            from google.api_core import exceptions
            from google.auth.exceptions import GoogleAuthError, TransportError
            from google.cloud import storage
            from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
        except ImportError as error:
            raise ValueError(
                f"{address}: install what reads it: pip install 'jaxrl_post[gcs]' ({one_line(error)})"
            ) from error
        try:
            self._bucket = storage.Client().bucket(address.bucket)
        except (GoogleAuthError, OSError) as error:
            raise ValueError(f"{address}: no credentials of Google Cloud are found here: {one_line(error)}") from error
        self._errors, self._crc32c = exceptions, google_crc32c.Checksum
        self._refusals = (exceptions.GoogleAPICallError, InvalidResponse, GoogleAuthError)
        self._cuts = (
            ConnectionError,
            TransportError,
            DataCorruption,
            requests.RequestException,
            urllib3.exceptions.HTTPError,
            http.client.HTTPException,
        )

    def read(self, name: str) -> bytes:
        with self._asked(name):
            return self._blob(name).download_as_bytes(**_ONCE)

    def write(self, name: str, data: bytes) -> None:
        self._written(name, data, None)

    def create(self, name: str, data: bytes) -> None:
        self._written(name, data, 0)

    def save(self, name: str, version: str, path: Path) -> None:
        with self._asked(name):
            blob = self._bucket.blob(self._prefix + name, generation=int(version))
            blob.download_to_filename(path, **_ONCE)

    def listed(self, place: str) -> dict[str, str]:
        fields = "items(name,generation),nextPageToken"
        with self._asked(place):
            blobs = self._bucket.list_blobs(prefix=self._prefix + place.rstrip("/"), fields=fields, **_ONCE)
            found = {blob.name.removeprefix(self._prefix): str(blob.generation) for blob in blobs}
        below = f"{place.rstrip('/')}/" if place else ""
        return {name: version for name, version in found.items() if name.startswith(below) or name == place}

    def delete(self, name: str) -> None:
        with self._asked(name):
            self._blob(name).delete(**_ONCE)

    def current(self, name: str) -> ObjectBytes:
        blob = self._blob(name)
        try:
            with self._asked(name):
                data = blob.download_as_bytes(**_ONCE)
        except Missing:
            return ObjectBytes(data=b"", generation=0)
        return ObjectBytes(data=data, generation=int(blob.generation))

    def replace(self, name: str, data: bytes, generation: int) -> int:
        return self._written(name, data, generation)

    def drop(self, name: str, generation: int) -> None:
        with self._asked(name):
            self._blob(name).delete(if_generation_match=generation, **_ONCE)

    def _written(self, name: str, data: bytes, generation: int | None) -> int:
        """Writes an object over that of a generation; 0: it must not be there; None: any. Returns the new one."""
        digest = base64.b64encode(self._crc32c(data).digest()).decode("ascii")
        blob = self._blob(name)
        with self._asked(name):
            blob.upload_from_string(data, "application/octet-stream", if_generation_match=generation, **_ONCE)
        if blob.crc32c != digest:
            raise Lost(f"{name} has another checksum there than here")
        return int(blob.generation)

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._prefix + name)

    @contextlib.contextmanager
    def _asked(self, name: str) -> Iterator[None]:
        """Says in the words of store.py how an attempt failed."""
        try:
            yield
        except self._errors.NotFound as error:
            raise Missing(one_line(error)) from error
        except self._errors.PreconditionFailed as error:
            raise Changed(f"{self._address}/{name} was changed by another") from error
        except self._cuts as error:
            raise Lost(one_line(error)) from error
        except self._refusals as error:
            status = getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)
            if status in LATER:
                raise Lost(one_line(error)) from error
            raise ValueError(f"{self._address}: the bucket refuses: {one_line(error)}") from error
