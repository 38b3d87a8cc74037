"""The command line of a command: flags after a space or "=", --help, and every mistake as one ValueError."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Sequence

from jaxrl_post.buckets.store import Unreachable
from jaxrl_post.json_text import shown
from jaxrl_post.launch.command_line import OVERRIDE, split

_STORE = type(argparse.ArgumentParser().add_argument("--one"))  # the action of a flag with one value


class Arguments(argparse.ArgumentParser):
    """Reads the words behind `python -m jaxrl_post NAME`. No flag may be abbreviated.

    Args:
      name: of the command.
      text: its help, which begins with its usage.
      overrides: whether `--config.a.b=VALUE` is taken. They become `flags.overrides`, a tuple of `a.b=VALUE`.
    """

    def __init__(self, name: str, text: str, *, overrides: bool = False):
        super().__init__(
            prog=f"python -m jaxrl_post {name}",
            description=text.strip(),
            usage=argparse.SUPPRESS,
            allow_abbrev=False,
            add_help=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
        self._name, self._overrides = name, overrides
        self._form = " ".join(text.strip().partition("\n\n")[0].replace("\npython", " or python").split())

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Returns the flags by name. Prints the help and exits with 0 where it is asked for.

        Raises:
          ValueError: an unknown or missing argument, or a value of another kind. One sentence.
        """
        own, overrides = split(arguments) if self._overrides else (arguments, ())
        self._refuse_unknown([word for word in own if word.startswith("--")])
        self._refuse_twice(own)
        flags, others = self.parse_known_args(own)
        flags.overrides = overrides
        self._refuse(others[:1])
        return flags

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        self._refuse([word for word in words if word.partition("=")[0] not in self._option_string_actions][:1])

    def _refuse(self, unknown: Sequence[str]) -> None:
        """Raises a ValueError about the first word, with the nearest flag. Without a word it does nothing."""
        if unknown:
            known = sorted(name for name in self._option_string_actions if name.startswith("--"))
            known += [OVERRIDE] * self._overrides
            near = difflib.get_close_matches(unknown[0].partition("=")[0][:100], known, n=1, cutoff=0.0)
            nearest = f"nearest is {near[0]}, " if near and unknown[0].startswith("-") else ""
            raise ValueError(
                f"{self._name}: unknown argument {shown(unknown[0])}; {nearest}all flags are {', '.join(known)}"
            )

    def _refuse_twice(self, words: Sequence[str]) -> None:
        once = [name for name, flag in self._option_string_actions.items() if type(flag) is _STORE]
        named = [word.partition("=")[0] for word in words]
        for name in once:
            if named.count(name) > 1:
                raise ValueError(f"{self._name}: {name} is given {named.count(name)} times: leave all but one out")

    def error(self, message: str):
        """Raises a ValueError instead of ending the process."""
        raise ValueError(f"{self._name}: {' '.join(message.split())}; write {self._form}")


def sampled(words: Arguments) -> Arguments:
    """Adds the flags of a command that samples a policy, and returns it. `law` reads three of them."""
    words.add_argument("--policy", required=True, help=argparse.SUPPRESS)
    words.add_argument("--temperature", type=number, help=argparse.SUPPRESS)
    words.add_argument("--top-p", type=number, help=argparse.SUPPRESS)
    words.add_argument("--top-k", type=whole(0), help=argparse.SUPPRESS)
    words.add_argument("--max-tokens", type=whole(1), default=0, help=argparse.SUPPRESS)
    words.add_argument("--seed", type=whole(0), default=0, help=argparse.SUPPRESS)
    words.add_argument("--prompts", type=whole(1), default=0, help=argparse.SUPPRESS)
    words.add_argument("--json", default="", help=argparse.SUPPRESS)
    return words


def law(flags: argparse.Namespace) -> dict[str, float]:
    """Returns the changes that `sampled` flags make to a policy's sampling law."""
    given = {name: getattr(flags, name) for name in ("temperature", "top_p", "top_k")}
    return {name: value for name, value in given.items() if value is not None}


def answered(work: Callable[[], int], *errors: type[Exception]) -> int:
    """Returns the exit code of a command's work: 1 after one sentence where it raises ValueError, OSError or `errors`,
    or a bucket does not answer.

    A reader that closes its pipe has seen enough: that is no error.
    """
    try:
        return work()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left for the flush at the exit
    except (ValueError, OSError, Unreachable, *errors) as error:
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
