"""A job of several processes on this machine, joined by jax.distributed, which begins again where it asks for that.

Several processes share the machine's CPU: each has its part of the mesh as forced devices. One process has whatever jax
sees. `job.json` holds what `run_job` is called with.

A job asks by exit code 42: it is intact up to its last checkpoint, and --resume continues it. A killed process asks too.
Every process has a group of its own, which ends with it, so nothing that a process began is left behind.

Invariant: nothing here loads jax. This module runs the job, and a process with jax's threads must not fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jaxrl_post.launch.jobs.request import Rendered, Request
from jaxrl_post.ring.json_text import shown

FILE = "job.json"
RESTART = 42  # as parallel/liveness.py, which needs jax
LEAVE_S = 120.0  # for the others to end by themselves, once a process has ended otherwise than with 0
STOP_S = 30.0  # for a process to end after a signal
_POLL_S = 0.1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# prctl(PR_SET_PDEATHSIG): the kernel signals a process when its parent dies
_BECOME = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
if os.getppid() != int(sys.argv[1]):
    sys.exit("the job's own process is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def render(request: Request, devices: int) -> Rendered:
    """Renders the arguments of `run_job`.

    Args:
      devices: of the mesh.

    Raises:
      ValueError: a slice, a secret, or devices that the processes cannot divide.
    """
    if request.where is not None:
        raise ValueError(
            f"--target=local runs on this machine, and --slice={shown(request.where.name, 40)} is elsewhere: leave it out"
        )
    if request.secrets:
        raise ValueError(
            "--secret: a local job has this process's environment: set the variable there and leave it out"
        )
    if devices % request.processes:
        near = max(count for count in range(1, request.processes + 1) if devices % count == 0)
        raise ValueError(
            f"--nodes={request.processes} processes cannot divide the mesh's {devices} devices; the nearest valid value "
            f"is {near}"
        )
    call = [sys.executable, "-m", "jaxrl_post.launch.jobs.local", "{folder}/" + FILE]
    job = {
        "command": [sys.executable, *request.words[1:]],
        "environments": [_environment(request, at, devices) for at in range(request.processes)],
        "most_restarts": request.restarts,
    }
    return Rendered(files={FILE: json.dumps(job, indent=2) + "\n"}, calls=(tuple(call),))


def _environment(request: Request, index: int, devices: int) -> Mapping[str, str]:
    """Returns the variables of a process beside those of this one."""
    if request.processes == 1:
        return dict(request.variables) | {"JAX_NUM_PROCESSES": "1"}
    own = devices // request.processes
    return dict(request.variables) | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={own}",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{request.port}",
        "JAX_NUM_PROCESSES": str(request.processes),
        "JAX_PROCESS_ID": str(index),
    }


def main(arguments: Sequence[str]) -> int:
    """Runs the job of a file, and returns its last exit code. It is 1 where another job has the job's port."""
    job = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    if address := job["environments"][0].get("JAX_COORDINATOR_ADDRESS", ""):
        with socket.socket() as one:
            taken = one.connect_ex(("localhost", int(address.rpartition(":")[2]))) == 0
        if taken:  # the processes would join what listens there
            print(
                f"error: {address} is taken, perhaps by another local job: end it, or write --port=N", file=sys.stderr
            )
            return 1
    return run_job(job["command"], job["environments"], job["most_restarts"])


def run_job(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    most_restarts: int,
    say: Callable[[str], object] = lambda text: print(text, file=sys.stderr, flush=True),
) -> int:
    """Runs a command once for each environment, until all have ended, and returns the exit code of the job.

    A job that ends with 42, or by a signal, begins again. SIGTERM and SIGINT are passed on, and end the last attempt.
    Call it in the main thread, which alone gets signals.

    Args:
      command: of a process. A run needs `--run-dir=FOLDER --resume` to go on where it was.
      environments: variables that are added to this process's own, for each process.
      most_restarts: how often the job may begin again, 0 for never.
      say: called with a sentence at each restart.

    Raises:
      ValueError: there is no process, or `most_restarts` is below 0.
      OSError: the command cannot be started. No process is left.
    """
    if not environments:
        raise ValueError("run_job: environments is empty: give one for each process, {} for a process by itself")
    if most_restarts < 0:
        raise ValueError(f"run_job: most_restarts={most_restarts} must be at least 0")
    with _passed_on() as attempt:
        for restart in range(most_restarts + 1):
            codes = attempt.turn(command, environments)
            code = job_code(codes)
            if attempt.signal or not may_restart(codes) or restart == most_restarts:
                break
            say(f"the job ended with {_told(codes)}; restart {restart + 1} of at most {most_restarts}")
    return code


def job_code(codes: Sequence[int]) -> int:
    """Returns the exit code of a job, given those of its processes, where -N says that signal N killed one.

    An error comes first, then 42, then 128 + N as a shell says it."""
    errors = [code for code in codes if code > 0 and code != RESTART]
    killed = [128 - code for code in codes if code < 0]
    return next(iter([*errors, *(code for code in codes if code == RESTART), *killed]), 0)


def may_restart(codes: Sequence[int]) -> bool:
    """Returns whether a job that ended so may go on from its last checkpoint: something stopped it, and nothing failed."""
    return any(codes) and all(code <= 0 or code == RESTART for code in codes)


class Attempt:
    """One start of all processes. `signal`: the number of the last signal that was passed on, 0 for none."""

    def __init__(self) -> None:
        self.signal = 0
        self._running: list[subprocess.Popen] = []

    def turn(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> list[int]:
        """Starts the processes, waits for all, and returns their exit codes. It leaves none of them, whatever is raised."""
        self._running = []
        try:
            for one in environments:
                self._running.append(_started(command, one))
                if self.signal:  # it came before this process
                    self._running[-1].send_signal(self.signal)
            self._wait()
        finally:
            for process in self._running:
                _end_group(process)
        return [process.returncode for process in self._running]

    def pass_on(self, number: int, frame) -> None:
        """Handles a signal of this process."""
        self.signal = number
        for process in self._running:
            if process.poll() is None:
                process.send_signal(number)

    def _wait(self) -> None:
        """Waits until all have ended. Ends those that do not go, LEAVE_S after the first that failed or after a signal."""
        since = None
        while None in (codes := [process.poll() for process in self._running]):
            if since is None and (self.signal or any(codes)):
                since = time.monotonic()
            if since is not None and time.monotonic() - since > LEAVE_S:
                self._stop()
            time.sleep(_POLL_S)

    def _stop(self) -> None:
        """Ends the processes that do not end by themselves: by SIGTERM, and by SIGKILL after STOP_S."""
        late = [process for process in self._running if process.poll() is None]
        for process in late:
            process.terminate()
        until = time.monotonic() + STOP_S
        for process in late:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0.0))
            _end_group(process)


def _started(command: Sequence[str], more: Mapping[str, str]) -> subprocess.Popen:
    """Starts a process in a group of its own. It ends with this one, even where this one is killed (Linux only).

    Python may not fork here and go on: threads of jax may hold locks. So a small program becomes the command."""
    environment = {**os.environ, **more}
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        raise FileNotFoundError(f"run_job: there is no command {command[0]!r}")
    first = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid())]
    return subprocess.Popen([*first, *command], env=environment, start_new_session=True)


def _end_group(process: subprocess.Popen) -> None:
    """Kills a process, if it lives, and all that it began and that stayed in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty, or another's by now
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def _passed_on() -> Iterator[Attempt]:
    """Yields an attempt that gets the signals of this process. Other threads than the main one pass none on."""
    attempt = Attempt()
    if threading.current_thread() is not threading.main_thread():
        yield attempt
        return
    before = {number: signal.signal(number, attempt.pass_on) for number in _SIGNALS}
    try:
        yield attempt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _told(codes: Sequence[int]) -> str:
    """Says how each process ended, once for each way."""
    ways: dict[str, list[int]] = {}
    for index, code in enumerate(codes):
        way = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        ways.setdefault(way, []).append(index)
    return ", ".join(
        f"{way} of process{'es' if len(those) > 1 else ''} {' '.join(map(str, those))}" for way, those in ways.items()
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
