"""The beginning and the end of a program: how its warnings read, and that no thread of others keeps its process alive.

It imports the standard library alone, because every command ends with it.
"""

from __future__ import annotations

import concurrent.futures.thread
import logging
import os
import sys
import threading
import time

LINGER_S = 10.0  # that such threads may still take once the program has ended


def begun() -> None:
    """Lets warnings of this package be sentences, whatever format other libraries give to all loggers."""
    own, screen = logging.getLogger("jaxrl_post"), logging.StreamHandler()
    screen.setFormatter(logging.Formatter("warning: %(message)s"))
    screen.setLevel(logging.WARNING)
    own.addHandler(screen)
    own.propagate = False


def ended(code: int) -> int:
    """Returns the exit code of a program that has done its work, and lets no thread of others keep its process alive.

    After LINGER_S it names such threads and ends the process. Workers of executors are waited for: they finish what was begun.
    """

    def end() -> None:
        time.sleep(LINGER_S)
        workers = set(concurrent.futures.thread._threads_queues)
        rest = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
        if rest and not workers & set(rest):
            names = ", ".join(repr(one.name) for one in rest)
            print(
                f"the program has ended; its process ends too, though these threads still run: {names}", file=sys.stderr
            )
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)

    threading.Thread(target=end, name="end of the program", daemon=True).start()
    return code
