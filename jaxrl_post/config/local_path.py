"""Paths of this machine: what a user may name where the project reads or writes files.

A URL is refused. As a path, gs://bucket/runs would be a new local folder of the name gs:, and the run would be lost with
its machine.
"""

from __future__ import annotations

import re

_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]+:/?/")  # also gs:/bucket, which a path makes of gs://bucket


def refuse_url(text: str, name: str) -> None:
    """Refuses a URL where a path is needed. `name`: the option, flag or variable that holds it.

    Raises:
      ValueError: one sentence with the nearest valid choice.
    """
    found = _URL.match(text)
    if found is None:
        return
    rest = text[found.end() :].strip().lstrip("/")
    near = f"/{rest}" if found[0].strip().lower().startswith("file:") else f"/mnt/{rest}"
    raise ValueError(
        f"{name}={text[:200]!r} is a URL, and buckets are not supported yet: mount it on every host and name the local "
        f"path, for example {near[:200]}"
    )
