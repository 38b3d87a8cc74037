"""What a kind of malformed inputs is, and what counts as a refusal."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

LONGEST = 1200  # characters of a sentence
Action = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How inputs of one kind are made and read.

    Attributes:
      valid: reads valid inputs.
      case: index, random -> what the malformed input is, and an action that reads it. Equal arguments give the same case.
      names: one of them must stand in a refusal: that of the file or of the option.
      own: whether an error is a refusal, where `names` do not say it.
      seconds: that a case may take. bounded: whether its memory is.
    """

    valid: Action
    case: Callable[[int, random.Random], tuple[str, Action]]
    names: tuple[str, ...] = ()
    own: Callable[[BaseException], bool] | None = None
    seconds: float = 10.0
    bounded: bool = True

    def refuses(self, error: BaseException) -> bool:
        """Whether an error is one sentence of this project that says where."""
        if self.own is not None:
            return self.own(error)
        text = str(error)
        short = 0 < len(text) < LONGEST and "\n" not in text.strip()
        return type(error) is ValueError and short and any(name in text for name in self.names)


class Outcome:
    """How an action ended: a context that keeps any error, because any error is what is looked for."""

    error: BaseException | None = None

    def __enter__(self) -> Outcome:
        return self

    def __exit__(self, kind, error, trace) -> bool:
        self.error = error
        return error is not None and not isinstance(error, KeyboardInterrupt)
