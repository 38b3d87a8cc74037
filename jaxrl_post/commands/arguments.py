"""The command line of a command: flags after a space or "=", --help, and every mistake as one ValueError."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Sequence

from jaxrl_post.json_text import shown


class Arguments(argparse.ArgumentParser):
    """Reads the words behind `python -m jaxrl_post NAME`. No flag may be abbreviated.

    Args:
      name: of the command.
      text: its help, which begins with its usage.
    """

    def __init__(self, name: str, text: str):
        super().__init__(
            prog=f"python -m jaxrl_post {name}",
            description=text.strip(),
            usage=argparse.SUPPRESS,
            allow_abbrev=False,
            add_help=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
        self._name = name
        self._form = " ".join(text.strip().partition("\n\n")[0].replace("\npython", " or python").split())

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Returns the flags by name. Prints the help and exits with 0 where it is asked for.

        Raises:
          ValueError: an unknown or missing argument, or a value of another kind. One sentence.
        """
        flags, unknown = self.parse_known_args(arguments)
        if unknown:
            known = sorted(name for name in self._option_string_actions if name.startswith("--"))
            near = difflib.get_close_matches(unknown[0].partition("=")[0][:100], known, n=1, cutoff=0.0)
            nearest = f"nearest is {near[0]}, " if near and unknown[0].startswith("-") else ""
            raise ValueError(
                f"{self._name}: unknown argument {shown(unknown[0])}; {nearest}all flags are {', '.join(known)}"
            )
        return flags

    def error(self, message: str):
        """Raises a ValueError instead of ending the process."""
        raise ValueError(f"{self._name}: {' '.join(message.split())}; write {self._form}")


def answered(work: Callable[[], int]) -> int:
    """Returns the exit code of a command's work: 1 after one sentence where it raises ValueError or OSError.

    A reader that closes its pipe has seen enough: that is no error.
    """
    try:
        return work()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left for the flush at the exit
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def whole(least: int):
    """Returns a reader of whole numbers from `least` on, for a flag's `type`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{shown(text)} must be a whole number of at least {least}")
        return int(text)

    return read


def number(text: str) -> float:
    """Reads a finite number, for a flag's `type`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{shown(text)} must be a finite number")
    return value


def span(text: str) -> tuple[int, int]:
    """Reads A or A:B, a span of steps with both ends, for a flag's `type`."""
    found = re.fullmatch(r"(\d{1,18})(?::(\d{1,18}))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{shown(text)} must be a step A or steps A:B, such as 10:20")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} ends before it begins; the nearest valid value is {last}:{first}"
        )
    return first, last
