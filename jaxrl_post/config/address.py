"""Addresses in a bucket: SCHEME://BUCKET/NAME, for example gs://my-bucket/runs/demo or s3://my-bucket/runs/demo.

Other kinds of URL are refused where a path is needed (config/local_path.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# What brings the client of a scheme: an extra of this project. Other schemes are those of fsspec.
EXTRAS = {"gs": "gcs", "s3": "s3", "s3a": "s3", "az": "azure", "abfs": "azure", "abfss": "azure"}
_ELSEWHERE = ("file", "local", "memory", "http", "https", "ftp")  # no buckets: a disk, this process, a page
_URL = re.compile(r"([a-z][a-z0-9+.-]+)://")
# An Azure container may name its account: CONTAINER@ACCOUNT.dfs.core.windows.net
_PLACE = re.compile(r"([a-z0-9][a-z0-9._-]{1,220}[a-z0-9](?:@[a-z0-9][a-z0-9.-]{1,220})?)/([^\s#?*\[\]]+)")


@dataclass(frozen=True, kw_only=True)
class Address:
    """A place in a bucket. `name`: what all of its objects' names begin with, without a slash at its end; empty for
    the whole bucket."""

    bucket: str
    name: str
    scheme: str = "gs"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.name}"


def is_bucket(text: str) -> bool:
    """Returns whether a text names a place in a bucket, well or badly."""
    found = _URL.match(text)
    return found is not None and found[1] not in _ELSEWHERE


def parse(text: str, flag: str) -> Address:
    """Reads SCHEME://BUCKET/NAME.

    Args:
      flag: what holds the text, which begins the error.

    Raises:
      ValueError: nothing reads the scheme, or the bucket or the name is missing or malformed.
    """
    url = _URL.match(text)
    scheme = url[1] if url else "gs"
    _check_scheme(scheme, text, flag)
    found = _PLACE.fullmatch(text.rstrip("/")[url.end() :]) if url else None
    if found is None or any(part in ("", ".", "..") for part in found[2].split("/")):
        raise ValueError(
            f"{flag}={text[:200]!r} is no place in a bucket: write {scheme}://BUCKET/NAME, for example "
            f"{scheme}://my-bucket/runs/demo"
        )
    return Address(bucket=found[1], name=found[2], scheme=scheme)


def _check_scheme(scheme: str, text: str, flag: str) -> None:
    """Refuses a scheme that neither this project nor fsspec knows."""
    if scheme in EXTRAS:
        return
    try:
        from fsspec import available_protocols
    except ImportError:
        known = []
    else:
        known = available_protocols()
    if scheme not in known:
        raise ValueError(
            f"{flag}={text[:200]!r}: nothing here reads {scheme}://; write gs:// (pip install 'jaxrl_post[gcs]'), s3:// "
            "('jaxrl_post[s3]'), az:// ('jaxrl_post[azure]') or a scheme of fsspec"
        )
