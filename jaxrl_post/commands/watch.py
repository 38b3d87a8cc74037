"""python -m jaxrl_post watch RUN [--once] [--every=SECONDS]

Shows a run in the terminal while it goes on: last step, reward, lengths, where the time went, staleness and alarms. Only
files are read. It ends when the run has ended, or with Ctrl-C. --once prints one picture.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import rich.console
import rich.live

from jaxrl_post.config import refuse_url
from jaxrl_post.telemetry import screen
from jaxrl_post.telemetry.page.run_files import RunFiles, opened

_LEAST = 0.1  # seconds between two looks


class _Words(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f"watch: {message}; write python -m jaxrl_post watch RUN [--once] [--every=SECONDS]")


def main(arguments: Sequence[str]) -> int:
    """Shows the run. Exit code 1, with one sentence, where it cannot be read."""
    parser = _Words(prog="python -m jaxrl_post watch", description=__doc__)
    parser.add_argument("run", help="the folder of a run")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two looks")
    try:
        flags = parser.parse_args(arguments)
        refuse_url(flags.run, "watch")
        if not flags.every >= _LEAST:
            raise ValueError(f"watch: --every={flags.every:g} must be at least {_LEAST:g} seconds")
        console, files = rich.console.Console(), opened(flags.run)
        if flags.once:
            console.print(screen.picture(files, console.width, time.time()))
        else:
            follow(files, console, lambda: time.sleep(flags.every))
    except KeyboardInterrupt:
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
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
