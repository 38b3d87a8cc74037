"""Inputs of strangers by kind: each file has a table `KINDS` of the faults that outsiders met, with generated members of each.

`KINDS` maps the number of a fault, such as "F02", to a function without arguments that returns `Members`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Members:
    """How many members of one kind were tried, and one sentence for each that got another value than the right one."""

    tried: int
    wrong: tuple[str, ...]
