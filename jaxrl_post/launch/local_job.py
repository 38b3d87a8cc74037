"""Runs a job of several processes on this machine, and starts it again where it ends with exit code 42."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

RESTART = 42


def run_job(command: Sequence[str], environments: Sequence[Mapping[str, str]], most_restarts: int) -> int:
    """Runs a command once for each environment, until all have ended, and returns the last exit code.

    Args:
      environments: variables that are added to this process's own, for each process.
      most_restarts: how often the job may begin again.
    """
    for restart in range(most_restarts + 1):
        running = [subprocess.Popen(command, env={**os.environ, **one}) for one in environments]
        codes = [process.wait() for process in running]
        code = next((code for code in codes if code not in (0, RESTART)), max(codes))
        if code != RESTART or restart == most_restarts:
            break
    return code
