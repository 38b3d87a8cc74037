"""python -m jaxrl_post watch RUN [--once] [--every=SECONDS]

Shows a run in the terminal while it goes on: last step, reward, lengths, where the time went, staleness and alarms. Only
files are read. It ends when the run has ended, or with Ctrl-C. --once prints one picture.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import rich.console
import rich.live

from jaxrl_post.commands.arguments import Arguments, answered, number
from jaxrl_post.config import refuse_url
from jaxrl_post.telemetry import screen
from jaxrl_post.telemetry.page.run_files import RunFiles, opened

_LEAST = 0.1  # seconds between two looks


def main(arguments: Sequence[str]) -> int:
    """Shows the run. Exit code 1, with one sentence, where it cannot be read."""
    try:
        return answered(lambda: _shown(_read(arguments)))
    except KeyboardInterrupt:
        return 0


def _read(arguments: Sequence[str]) -> argparse.Namespace:
    words = Arguments("watch", str(__doc__))
    words.add_argument("run", metavar="RUN", help=argparse.SUPPRESS)
    words.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    words.add_argument("--every", type=number, default=2.0, help=argparse.SUPPRESS)
    flags = words.read(arguments)
    refuse_url(flags.run, "watch")
    if flags.every < _LEAST:
        raise ValueError(f"watch: --every={flags.every:g} must be at least {_LEAST:g} seconds")
    return flags


def _shown(flags: argparse.Namespace) -> int:
    console, files = rich.console.Console(), opened(flags.run)
    if flags.once:
        console.print(screen.picture(files, console.width, time.time()))
    else:
        follow(files, console, lambda: time.sleep(flags.every))
    return 0


def follow(files: RunFiles, console: rich.console.Console, wait: Callable[[], object]) -> None:
    """Draws the run again and again, until it has ended. `wait` is called between two looks."""
    with rich.live.Live(console=console, auto_refresh=False) as live:
        while True:
            files = RunFiles(files.folder)  # reads the files again
            live.update(screen.picture(files, console.width, time.time()), refresh=True)
            if files.summary:
                return
            wait()
