"""The question that a judge is asked about a rollout, and the verdict in its reply.

Invariant: a reply has a verdict or none. The verdict is the last line, "VERDICT: number" and nothing else, within the
range. Inserted text is not searched for places, so a rollout cannot ask for the ground truth.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_VERDICT = re.compile(r"VERDICT: (-?\d{1,300}(?:\.\d{1,300})?)", re.ASCII)
_PLACES = re.compile(r"\{(?:task|answer|truth)\}")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A text with places, and the range of its verdicts.

    `text` contains {answer}, which stands for the rollout. It contains {truth} and {task} if the judge shall see the
    ground truth and the task.

    Raises:
      ValueError: the text has no {answer}, or the range is empty.
    """

    text: str
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self):
        if not self.low < self.high:
            raise ValueError(f"judge: the range of verdicts must have low={self.low} below high={self.high}")
        if "{answer}" not in self.text:
            raise ValueError("judge: the question does not say where {answer} goes")

    @property
    def needs_task(self) -> bool:
        """Returns whether the judge sees the task."""
        return "{task}" in self.text

    @property
    def needs_truth(self) -> bool:
        """Returns whether the judge sees the ground truth."""
        return "{truth}" in self.text

    def asked(self, *, task: str, answer: str, truth: str) -> str:
        """Returns the text with its places filled."""
        told = {"{task}": task, "{answer}": answer, "{truth}": truth}
        return _PLACES.sub(lambda place: told[place[0]], self.text)  # one pass: inserted text is not searched

    def verdict(self, reply: str) -> float | None:
        """Returns the number in the reply's last line if that line is a verdict within the range and nothing else."""
        lines = reply.strip().splitlines()
        match = _VERDICT.fullmatch(lines[-1].strip()) if lines else None
        return float(match[1]) if match and self.low <= float(match[1]) <= self.high else None
