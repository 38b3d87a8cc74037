"""Bad command lines as the shell runs them: a process of its own for each, its exit code and its last words."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

from fuzz import command_line
from fuzz.child import Outcome

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120


class Cases(command_line.Cases):
    """A command line is drawn until one is refused in this process: an accepted one would begin to train."""

    seconds = 150.0  # a process loads all libraries first
    bounded = False  # its own memory is not measured here

    def case(self, index, random):
        while True:
            arguments = [one.replace("\x00", "") for one in self.arguments(random)]
            with Outcome() as outcome:
                self._run(arguments)
            if type(outcome.error) is command_line.Refused:
                return repr(arguments)[:300], functools.partial(self._spawn, arguments)

    def _spawn(self, arguments: list[str]) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "jaxrl_post", *(one.encode("utf-8", errors="surrogatepass") for one in arguments)],
            cwd=ROOT,
            capture_output=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode != 1:
            raise RuntimeError(f"exit code {done.returncode}")
        raise command_line.Refused(done.stderr.decode("utf-8", errors="replace"))
