"""What a Python program hands to a run beside its config: rows, reward functions, callbacks and an endpoint.

The config names them by OWN and a name, as "python:train" or "python:score". A run folder so tells what it was given,
and a command that finds such a name without the program says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_post.config import Config

OWN = "python:"


def listed_rows(what: str, given: Any) -> tuple[Mapping, ...]:
    """Returns the rows that a program gave.

    Raises:
      ValueError: they are no dicts in an order. A table of pandas yields the names of its columns: give its records.
    """
    if not isinstance(given, Iterable) or isinstance(given, (Mapping, bytes)):
        raise ValueError(f"{what} must be rows, a path or task:NAME, got a {type(given).__name__}")
    rows = tuple(given)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            table = '; give table.to_dict("records")' if hasattr(given, "to_dict") else ""
            kinds = f"row {number} of the {type(given).__name__} is a {type(row).__name__}"
            raise ValueError(f"{what}: each row must be a dict, and {kinds}{table}")
    return rows


@dataclass(frozen=True, kw_only=True)
class PythonInputs:
    """Rows by name of a data source; reward functions as text (rewards/carried.py), and the hash of each, by name.

    `callbacks`: called with each row of metrics, as a dict, by process 0. `endpoint`: opens the endpoint through which a
    harness plays conversations, from the config and the tokenizer (serve/agents/endpoint.py).
    """

    sources: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    callbacks: tuple[Callable[[dict], object], ...] = ()
    endpoint: Callable[[Config, Any], contextlib.AbstractContextManager[Any]] | None = None

    def check(self, config: Config) -> None:
        """Refuses a config that names what is not here.

        Raises:
          ValueError: one sentence with the option and the name.
        """
        named = [("data.train", config.data.train, self.sources), ("eval.data", config.eval.data, self.sources)]
        named += [("reward.functions", function, self.code) for function in config.graders]
        for option, name, here in named:
            if name.startswith(OWN) and name not in here:
                what = "a function" if option == "reward.functions" else "the rows"
                raise ValueError(
                    f"{option}: {name!r} is {what} of a Python program; only jaxrl_post.train, called with them, can "
                    "begin or resume such a run"
                )


NOTHING = PythonInputs()
