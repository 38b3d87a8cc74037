"""Paths of this machine: what a user may name where the project reads or writes files.

A URL is refused, except for SCHEME://BUCKET/NAME where a bucket is read or written (config/address.py). As a path,
gs://bucket/runs would otherwise be a new local folder of the name gs:, and the run would be lost with its machine.

A relative path in a config file is looked for beside that file first, then in the working directory. One on the command
line is looked for in the working directory alone. What is found there becomes absolute, so a run can be resumed from anywhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from jaxrl_post.config import address

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
        f"{name}={text[:200]!r} is a URL, and here a local path is needed: mount the bucket on every host and name the path, "
        f"for example {near[:200]}"
    )


def check_place(text: str, name: str, bucket: bool) -> None:
    """Refuses a URL, or where `bucket` allows SCHEME://BUCKET/NAME, every other one and a malformed one.

    Raises:
      ValueError: one sentence with the nearest valid choice.
    """
    if bucket and address.is_bucket(text):
        address.parse(text, name)
    else:
        refuse_url(text, name)


def placed(text: str, folder: str | Path) -> str:
    """Returns the absolute form of a relative path at which something lies in `folder`; else the text itself.

    `text`: a path, or `file.py:function`. A name such as `task:sums` or `package.module:function` is no path.
    """
    file, colon, function = text.rpartition(":")
    if not file.endswith(".py"):
        file, colon, function = text, "", ""
    try:
        there = file and not os.path.isabs(file) and not text.startswith("task:") and (Path(folder) / file).exists()
    except (OSError, ValueError):  # a name that is too long, or that no file can have
        return text
    return os.path.abspath(Path(folder) / file) + colon + function if there else text
