"""python -m jaxrl_post watch RUN [--once] [--every=SECONDS]

Shows a run in the terminal while it goes on: last step, reward, lengths, where the time went, staleness and alarms. Only
files are read. It ends when the run has ended, or with Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable

import rich.console
import rich.live

from jaxrl_post.commands.arguments import Command
from jaxrl_post.config.command_line import Flag, number
from jaxrl_post.runs.run_logs import RunLogs, opened
from jaxrl_post.telemetry import screen

_LEAST = 0.1  # seconds between two looks

_FLAGS = (
    Flag("RUN", "a run's folder"),
    Flag("--once", "prints one picture"),
    Flag("--every=SECONDS", "between two looks; 2", number, 2.0),
)


def _shown(flags: argparse.Namespace) -> int:
    if flags.every < _LEAST:
        raise ValueError(f"watch: --every={flags.every:g} must be at least {_LEAST:g} seconds")
    console, files = rich.console.Console(), opened(flags.run)
    if flags.once:
        console.print(screen.picture(files, console.width, time.time()))
    else:
        with contextlib.suppress(KeyboardInterrupt):
            follow(files, console, lambda: time.sleep(flags.every))
    return 0


main = Command("watch", __doc__, _FLAGS, _shown)


def follow(files: RunLogs, console: rich.console.Console, wait: Callable[[], object]) -> None:
    """Draws the run again and again, until it has ended. `wait` is called between two looks."""
    with rich.live.Live(console=console, auto_refresh=False) as live:
        while True:
            files = RunLogs(files.folder)  # reads the files again
            live.update(screen.picture(files, console.width, time.time()), refresh=True)
            if files.summary:
                return
            wait()
