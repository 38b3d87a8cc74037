"""Names of a run's rollouts as text: train:PROMPT:EPOCH:SAMPLE[:ATTEMPT] and eval@STEP:PROMPT:EPOCH:SAMPLE[:ATTEMPT].

A name is a rollout's id without the run's seed. Every evaluation samples with the same ids, so the name of such a
rollout has the step of its evaluation. Without a purpose in front a name is one of training.

Invariant: `parsed(str(name)) == name`. The attempt is left out where it is 0 and the prompt's id has no colon.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxrl_post.json_text import shown
from jaxrl_post.types import RolloutId

_PURPOSE = re.compile(r"(train|eval@(\d{1,18})):")
_FORM = "train:PROMPT:EPOCH:SAMPLE or eval@STEP:PROMPT:EPOCH:SAMPLE, with :ATTEMPT behind it where that is not 0"


class Name(NamedTuple):
    """A rollout of a run. `step`: of its evaluation; None: it is one of training."""

    step: int | None
    prompt_id: str
    epoch: int
    sample: int
    attempt: int = 0

    @property
    def purpose(self) -> str:
        return "train" if self.step is None else "eval"

    def __str__(self) -> str:
        purpose = "train" if self.step is None else f"eval@{self.step}"
        attempt = [self.attempt] if self.attempt or ":" in self.prompt_id else []
        return ":".join(map(str, (purpose, self.prompt_id, self.epoch, self.sample, *attempt)))

    def is_of(self, id: RolloutId) -> bool:
        """Returns whether it names this rollout, apart from the step of an evaluation."""
        return (self.purpose, *self[1:]) == (id.purpose, id.prompt_id, id.epoch, id.sample, id.attempt)


def of(id: RolloutId, step: int) -> Name:
    """Returns the name of a rollout from the log of this step."""
    return Name(None if id.purpose == "train" else step, id.prompt_id, id.epoch, id.sample, id.attempt)


def parsed(text: str) -> Name:
    """Returns the name that a text says.

    Raises:
      ValueError: it is none. One sentence with the form.
    """
    purpose = _PURPOSE.match(text)
    step = int(purpose[2]) if purpose and purpose[2] else None
    fields = text[purpose.end() if purpose else 0 :].split(":")
    count = 3 if len(fields) > 3 and all(map(_is_number, fields[-3:])) else 2
    numbers = fields[-count:]
    if len(fields) <= count or not all(map(_is_number, numbers)):
        raise ValueError(f"{shown(text)} names no rollout: write {_FORM}; `rollouts RUN` prints the names")
    return Name(step, ":".join(fields[:-count]), *map(int, numbers))


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,18}", text) is not None
