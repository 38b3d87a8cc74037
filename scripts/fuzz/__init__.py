"""Malformed inputs for every reader of the project, by kind.

A function of KINDS gets a folder and returns a `Kind`, whose cases write a malformed input there and read it. The same kind, seed
and index give the same case.
"""

from __future__ import annotations

from fuzz import commands, data, models

KINDS = {**commands.KINDS, **data.KINDS, **models.KINDS}
