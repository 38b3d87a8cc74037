"""Starts judged programs at a level of confinement, and measures and ends them.

A `Sandbox` has one launcher, a clean process that forks a confined process for each program. CPU seconds are read from
the kernel's clock of the program's process. They do not depend on the machine's load or on other programs.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jaxrl_post.rewards.sandbox import AUTO, LEVELS, Unavailable, counts, wire

START_LIMIT_S = 60.0
_SENT = ("wire", "confinement", "system_calls", "program", "launcher")
_BOOT = """
import marshal, os, socket, sys, types
control = socket.socket(fileno={fd})
def read(count):
    data = b""
    while len(data) < count:
        data += control.recv(count - len(data)) or sys.exit()
    return data
parts = marshal.loads(read(int.from_bytes(read(8), "big")))
modules = {{}}
for name, code in parts:
    modules[name] = types.ModuleType("sandbox_" + name)
    exec(code, modules[name].__dict__)
sys.path += {paths!r}
lives = lambda: os.getppid() == {parent}
if sys.platform == "linux":
    modules["confinement"].die_with_parent(lives)
if lives():
    modules["launcher"].main(control, *(modules[name] for name in ("wire", "program", "confinement", "system_calls")))
"""
# Read at run time by programs, beside the interpreter's own folders.
_SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/dev/null",
    "/dev/zero",
    "/dev/random",
    "/dev/urandom",
)
_SETTLED_S = 0.2  # after a channel's end, until it is known whether its launcher has died
_SCHEDULED = 2  # the kernel's clock of scheduled time of a process, see clock_getcpuclockid(3)
# What a process of each level stands apart in, the best first: its descendants end with it, whatever they do.
_APART = {"none": ("pid namespace", "reaper", ""), "basic": ("",), "strict": ("namespaces",)}
_RUNNABLE = "RD"  # states of a process that waits for a processor or a disk


class Gone(Exception):
    """The launcher has died."""


class Launcher:
    """The clean process that forks a confined one for each program. It ends with this process, and all programs with it."""

    def __init__(self):
        self._control, theirs = socket.socketpair()
        paths = [path for path in {sysconfig.get_path(name): 0 for name in ("purelib", "platlib")} if path]
        code = _BOOT.format(fd=theirs.fileno(), paths=paths, parent=os.getpid())
        env = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-S", "-B", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=env,
                cwd="/",
                start_new_session=True,
            )
        self.close = weakref.finalize(self, _end, self._control, self.process)
        self._control.settimeout(START_LIMIT_S)
        body = marshal.dumps(_codes())
        with contextlib.suppress(OSError):  # one that dies here is gone at the first start
            self._control.sendall(len(body).to_bytes(8, "big") + body)

    def start(self, cpu_s: float, level: str, apart: str, streams: Sequence[int] = ()) -> Program:
        """Starts a confined process.

        Raises:
          Gone: the launcher has died.
          Unavailable: a layer could not be applied.
        """
        ours, theirs = socket.socketpair()
        request = {
            "level": level,
            "apart": apart,
            "paths": _paths(),
            "cpu_s": int(2 * cpu_s) + 2,
            "linux": sys.platform == "linux",
        }
        ours.settimeout(START_LIMIT_S)
        try:
            with theirs:
                socket.send_fds(self._control, [json.dumps(request).encode() + b"\n"], [theirs.fileno(), *streams])
            buffer = bytearray()
            reply = wire.receive(ours, buffer)
            pid = reply.get("pid", 0)
            reply = wire.receive(ours, buffer) if pid else reply
        except (EOFError, OSError) as error:
            if self.gone(_SETTLED_S):
                ours.close()
                raise Gone("the launcher has died") from None
            reply = {"missing": "process", "why": f"it ended while it started ({type(error).__name__})"}
        if "missing" in reply:
            ours.close()
            raise Unavailable(f"layer {reply['missing']!r}: {reply['why']}")
        ours.settimeout(None)
        return Program(ours, pid, reply["layers"], self)

    def gone(self, wait_s: float = 0.0) -> bool:
        """Returns whether the launcher has died, or dies within some seconds. It never writes to its socket."""
        return not self.close.alive or bool(select.select([self._control], [], [], wait_s)[0])


class Program:
    """A confined process and the channel to it. `layers`: the names of what confines it."""

    def __init__(self, channel: socket.socket, pid: int, layers: list[str], launcher: Launcher):
        self.channel, self.pid, self.layers, self._launcher = channel, pid, layers, launcher
        self._clock = (~pid << 3) | _SCHEDULED
        self._begun, self._born = time.monotonic(), self._read()

    def _read(self) -> float | None:
        """Returns the CPU seconds of the process, or None where the system has no such clock or the process ended."""
        if sys.platform != "linux":
            return None
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            return None

    def cpu_s(self) -> float | None:
        """Returns the CPU seconds since the process was ready, or None if it has ended.

        Where the system has no clock of another process, these are seconds of wall-clock.
        """
        if sys.platform != "linux":
            return time.monotonic() - self._begun
        now = self._read()
        return None if now is None or self._born is None else now - self._born

    def lost(self) -> bool:
        """Returns whether the program ended because its launcher did, which is no verdict on it."""
        return self._launcher.gone()

    def end(self) -> None:
        """Kills the process and closes the channel."""
        self.channel.close()
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)


def runs(pid: int) -> bool:
    """Returns whether a process runs, waits for a processor or waits for a disk, and does not sleep."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in _RUNNABLE
    except (OSError, IndexError):
        return False


class Sandbox:
    """Confined programs at one level, or at the highest that the host gives.

    Args:
      level: "none", "basic", "strict" or "auto", which is never "none".

    Raises:
      Unavailable: the host does not give a layer of the level. The message names the layer.
    """

    def __init__(self, level: str):
        self._launcher = Launcher()
        self.level, self.layers = self._probed(level)

    def start(self, cpu_s: float, streams: Sequence[int] = ()) -> Program:
        """Starts a confined process that waits for a program.

        Args:
          cpu_s: the limit that the caller will hold it to.
          streams: descriptors of the files that are its stdin and its stdout; without them both are empty.

        A launcher that has died is started again, which `sandbox.counts` counts.

        Raises:
          Unavailable: a layer could not be applied.
        """
        try:
            return self._launcher.start(cpu_s, self.level, self._apart, streams)
        except Gone:
            self._launcher.close()
            self._launcher = Launcher()
            counts["restarts"] += 1
        try:
            return self._launcher.start(cpu_s, self.level, self._apart, streams)
        except Gone as error:
            raise Unavailable(f"layer 'process': {error}, and so did the one after it") from None

    def close(self) -> None:
        """Ends the launcher."""
        self._launcher.close()

    def _probed(self, level: str) -> tuple[str, list[str]]:
        """Returns the level and its layers, after a trial that imports a module behind them."""
        refused = []
        for one in ("strict", "basic") if level == AUTO else (level,):
            for self._apart in _APART.get(one, ("",)):
                try:
                    return one, self._tried(one)
                except (Unavailable, Gone) as error:
                    refused.append(f"{one} lacks {error}")
        self.close()
        raise Unavailable(f"reward.sandbox={level!r}: this host does not give it: {'; '.join(refused)}")

    def _tried(self, level: str) -> list[str]:
        if level not in LEVELS:
            raise Unavailable(f"there is no such level; levels are {', '.join(LEVELS)}")
        if sys.platform != "linux" and (level != "none" or self._apart):
            raise Unavailable(f"Linux, which {sys.platform} is not")
        trial = self._launcher.start(1.0, level, self._apart)
        trial.channel.settimeout(START_LIMIT_S)
        source = "import decimal, json, random\nx = random.random()"
        try:
            trial.channel.sendall(wire.pack({"do": "load", "source": source, "before": [], "wanted": []}))
            reply = wire.receive(trial.channel, bytearray())
        except (EOFError, OSError) as error:
            reply = {"raised": type(error).__name__, "text": "the process ended"}
        finally:
            trial.end()
        if "raised" in reply:
            raise Unavailable(f"readable files of {sys.executable}: {reply['raised']}: {reply.get('text')}")
        return trial.layers


@cache
def _codes() -> list:
    """Returns the modules of the program's side, compiled."""
    out = []
    for name in _SENT:
        file = Path(__file__).with_name(f"{name}.py")
        out.append((name, compile(file.read_text(encoding="utf-8"), f"<{name}>", "exec")))
    return out


@cache
def _paths() -> list[str]:
    """Returns the files and folders that programs may read, none of them below another."""
    named = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    named += [os.path.join(sys.base_prefix, "lib"), os.path.join(sys.base_exec_prefix, "lib"), *_SYSTEM]
    found = sorted({os.path.abspath(path) for path in named if path and os.path.exists(path)})
    return [path for path in found if not any(path.startswith(other + "/") for other in found)]


def _end(control: socket.socket, process: subprocess.Popen) -> None:
    control.close()
    process.kill()
    process.wait()
