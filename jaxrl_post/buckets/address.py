"""Addresses in a bucket: gs://BUCKET/NAME. Other kinds of URL are refused where a path is needed (config/local_path.py)."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ADDRESS = re.compile(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/([^\s#?*\[\]]+)")


@dataclass(frozen=True, kw_only=True)
class Address:
    """A place in a bucket. `name`: what all of its objects' names begin with, without a slash at its end; empty for
    the whole bucket."""

    bucket: str
    name: str

    def __str__(self) -> str:
        return f"gs://{self.bucket}/{self.name}"


def is_bucket(text: str) -> bool:
    """Returns whether a text names a place in a bucket, well or badly."""
    return text.startswith("gs://")


def parse(text: str, flag: str) -> Address:
    """Reads gs://BUCKET/NAME.

    Args:
      flag: what holds the text, which begins the error.

    Raises:
      ValueError: the bucket or the name is missing or malformed.
    """
    found = _ADDRESS.fullmatch(text.rstrip("/"))
    if found is None or any(part in ("", ".", "..") for part in found[2].split("/")):
        raise ValueError(
            f"{flag}={text[:200]!r} is no place in a bucket: write gs://BUCKET/NAME, for example gs://my-bucket/runs/demo"
        )
    return Address(bucket=found[1], name=found[2])


def refuse_several(address: Address, processes: int, flag: str) -> None:
    """Refuses the run of a bucket for a job of several processes.

    Raises:
      ValueError: with the path of a mounted bucket.
    """
    if processes > 1:
        raise ValueError(
            f"{flag}={address}: a job of {processes} processes cannot write a run to a bucket yet: mount it on every host "
            f"and name the local path, for example /mnt/{address.bucket}/{address.name}"
        )
