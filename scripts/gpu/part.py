"""The figures of one section of scripts/gpu_check.py, in a file that is whole after each of them.

Invariant: a section that is killed leaves every figure that it had found. The next call goes on behind them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from record import Record, write_json


class Part(Record):
    """Collects the figures of one section.

    Args:
      file: what is written after each figure, and what an earlier call left. None: nothing is written.
      told: figures of other sections.
      seconds: within which work may begin.
    """

    def __init__(self, file: Path | None = None, told: Mapping[str, Any] | None = None, seconds: float = math.inf):
        super().__init__("gpu-check", [])
        self._file, self.told, self._end = file, told or {}, time.monotonic() + seconds
        self.not_reached: list[str] = []
        self._earlier: set[str] = set()
        if file and file.is_file():
            earlier = json.loads(file.read_text())
            self.figures, self.bounds = earlier["figures"], earlier["bounds"]
            self._earlier = {*self.figures}
        self.write()

    def figure(self, key: str, value: Any, **bounds: Any) -> Any:
        """As Record.figure. What an earlier call left of a group is replaced where the group is measured again."""
        if key in self._earlier:
            self._earlier.remove(key)
            del self.figures[key]
            self.bounds.pop(key, None)
        value = super().figure(key, value, **bounds)
        self.write()
        return value

    def wants(self, key: str, needs_s: float) -> bool:
        """Returns whether to measure `key`: no earlier call has, and its `needs_s` seconds are there.

        A key for which they are not is remembered.
        """
        if key in self.figures:
            return False
        if time.monotonic() + needs_s > self._end:
            self.not_reached.append(key)
            self.write()
            return False
        return True

    @property
    def bandwidth(self) -> float:
        """Returns bytes a second of a plain copy, as the section `device` measured them."""
        return 1e9 * self.told["device.copy_gb_per_s"]

    def write(self) -> None:
        if self._file:
            write_json(self._file, {"figures": self.figures, "bounds": self.bounds, "not_reached": self.not_reached})
