"""Faults planted in a reader, which shows that the harness notices each kind of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fuzz.child import sentence

WANTED = ("accepted", "refused", "TRACEBACK", "TRACEBACK", "HANG", "MEMORY", "CRASH", "accepted")


def _refuse(text: str) -> None:
    raise ValueError(text)


class Cases:
    """Case n has the outcome WANTED[n]."""

    def __init__(self, folder: Path):
        self._actions = (
            lambda: None,
            lambda: _refuse("planted: one sentence"),
            lambda: _refuse("planted: two\nlines"),
            lambda: {}["planted"],
            lambda: time.sleep(60),
            lambda: bytearray(2 << 30),
            os.abort,
            lambda: None,
        )

    def valid(self) -> None:
        pass

    def own(self, error: BaseException) -> bool:
        return sentence(error, "planted")

    def case(self, index, random):
        return WANTED[index], self._actions[index]
