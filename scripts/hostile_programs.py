"""Hostile programs of scripts/attacks/, as a policy could write them, each with a test that passes only if it succeeds.

- earn.txt: wrong programs that try to pass the tests of `add`; earn_behind_a_head.txt: of `twice`, whose head is given.
- reach.txt: `attack()` returns True once it has touched something outside. Most entries are the body of it alone.
- calls.txt: one system call each, by its numbers on x86_64 and aarch64, which must fail. They are of the kind "reach".
- exhaust.txt: `attack()` tries to use up the machine. Whoever runs them looks at the machine afterwards.
- outlive.txt: `attack()` tries to leave processes behind. Whoever runs them counts these.

Sources name things of the host:

- {secret}, a file, {file} and {link}, a file of the account and a link to it, and {outside}, a folder that anyone may write;
- {own}, a file of the interpreter's packages that the account owns where it can;
- {port}, a listening TCP port, {socket}, a listening Unix socket, {datagrams} and {abstract}, Unix sockets for datagrams;
- {shm} and {queue}, memory and a queue of System V;
- {victim}, a process, {judge}, the caller, and {token}, a value of the caller's environment.

`python scripts/hostile_programs.py LEVEL [KIND ...]` judges each at a level of the sandbox, as the present user, and
prints JSON. The kind "control" is "reach" without what contacts another machine. "killed" kills the judge of each program of
the kind "outlive" while it runs, and counts what is left. What succeeds does no lasting harm
outside of these things: a signal to others is 0, a clock is set to its own time.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("attacks")
_HEAD = {
    "prompt": 'def scale(n):\n    return 3 * n\n\n\ndef twice(n):\n    """Doubles n."""\n',
    "test": "def check(candidate):\n    assert scale(candidate(2)) == 12\n    assert candidate(5) == 10\n",
    "entry_point": "twice",
}
_ROWS = {
    "earn": {"test_list": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]},
    "earn_behind_a_head": _HEAD,
    "reach": {"test_list": ["assert attack() is True"]},
    "exhaust": {"test_list": ["assert attack() is True"]},
    "outlive": {"test_list": ["assert attack() is True"]},
    "calls": {"test_list": ["assert attack() is True"]},
}
_KINDS = {"earn_behind_a_head": "earn", "calls": "reach"}
PATIENCE_S = 5.0  # a process that holds memory takes a while to end on a busy machine
CALLS = """
import ctypes, os, platform, struct
libc = ctypes.CDLL(None, use_errno=True)
column = ["x86_64", "aarch64"].index(platform.machine())
CWD = -100

def call(numbers, *values):
    sent = [ctypes.c_char_p(v) if isinstance(v, bytes) else ctypes.c_long(v) for v in values]
    return libc.syscall(ctypes.c_long(numbers[column]), *sent) >= 0

def attack():
    try:
        return {call}
    except OSError:
        return False
"""
REACHES = """import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def attack():
    {body}
    return True
"""
_ELSEWHERE = ("cloud metadata",)
_ROWS_BY_NAME = {"endless generator": {"test_list": ["assert sum(attack()) == 3"]}}


@dataclass(frozen=True)
class Attack:
    """A hostile program. `row`: the columns of its prompt, which hold the tests."""

    name: str
    kind: str
    source: str
    row: Mapping

    def filled(self, things: Mapping) -> str:
        """Returns the source with the names of the host's things in it."""
        out = self.source
        for name, value in things.items():
            out = out.replace(f"{{{name}!r}}", repr(value)).replace(f"{{{name}}}", str(value))
        return out


def attacks() -> Iterator[Attack]:
    """Yields every attack, in the order of the files."""
    for kind, row in _ROWS.items():
        parts = re.split(r"^=== (.*)\n", (FOLDER / f"{kind}.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
        for name, source in zip(parts[1::2], parts[2::2], strict=True):
            if kind == "calls":
                source = CALLS.replace("{call}", source.strip())
            elif kind == "reach" and "def attack" not in source:
                source = REACHES.replace("{body}", source.strip().replace("\n", "\n    "))
            yield Attack(name, _KINDS.get(kind, kind), source, _ROWS_BY_NAME.get(name, row))


def judged(attack: Attack, things: Mapping, level: str, limit_s: float = 0.5) -> tuple[float, float]:
    """Returns the score of an attack and the seconds that its verdict took."""
    from jaxrl_post.rewards import Overrun, code

    row = {**attack.row, "rollout": {"limit_s": limit_s, "sandbox": level}}
    begun = time.monotonic()
    try:
        score = code.tests(attack.name, attack.filled(things), "", row)["score"]
    except Overrun as error:
        score = error.args[0]["score"]
    return score, time.monotonic() - begun


def _judged_by_another(attack: Attack, things: Mapping, level: str) -> tuple[float, float]:
    """Returns what `judged` does. Without confinement a program may have broken the launcher: then another one starts it."""
    from jaxrl_post.rewards import code
    from jaxrl_post.rewards.sandbox import Unavailable

    try:
        return judged(attack, things, level)
    except Unavailable:
        os.kill(code.sandbox_at(level)._launcher.process.pid, signal.SIGKILL)
        return judged(attack, things, level)


@contextlib.contextmanager
def host_things() -> Iterator[dict]:
    """Yields things of the host by the names that sources use, and "reached", which lists what was touched."""
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(["sleep", "600"]) as victim, _queues() as queues:
        outside, secret, path = Path(folder, "outside"), Path(folder, "secret"), str(Path(folder, "socket"))
        file, link, datagrams = Path(folder, "file"), Path(folder, "link"), str(Path(folder, "datagrams"))
        outside.mkdir()
        os.chmod(folder, 0o755)
        outside.chmod(0o777)
        for one, text, mode in ((secret, "key", 0o600), (file, "kept", 0o644)):
            one.write_text(text)
            one.chmod(mode)
        link.symlink_to(file)
        with contextlib.suppress(OSError):
            os.setxattr(file, "user.kept", b"1")
        os.environ["JAXRL_TOKEN"] = token = secrets.token_hex(8)
        named = {"secret": str(secret), "outside": str(outside), "file": str(file), "link": str(link)}
        named |= {"victim": victim.pid, "judge": os.getpid(), "token": token, "own": str(_own_file()), **queues}
        try:
            with _listening(path, datagrams) as sockets:
                named |= {"port": sockets["TCP"].getsockname()[1], "socket": path, "datagrams": datagrams}
                named["abstract"] = sockets["abstract"].getsockname()[1:].decode()
                before = _state(named)

                def reached() -> list[str]:
                    out = [f"file {name}" for name in os.listdir(outside)]
                    out += ["the victim"] if victim.poll() is not None else []
                    now = _state(named) if victim.poll() is None else before
                    out += [f"{name}: {before[name]} is {now[name]}" for name in now if now[name] != before[name]]
                    return out + [name for name, server in sockets.items() if _heard(server)]

                yield named | {"reached": reached}
        finally:
            victim.kill()


def _state(things: Mapping) -> dict[str, str]:
    """Returns what attacks could change of files, processes and queues of the host."""
    out = {}
    for name in ("file", "own"):
        if not os.path.exists(things[name]):
            out[name] = "gone"
            continue
        about = os.stat(things[name])
        out[name] = f"mode {about.st_mode:o}, {about.st_size} bytes, changed {about.st_ctime_ns}"
    for name in ("victim", "judge"):
        pid, own = things[name], f"/proc/{things[name]}"
        limits, status = (Path(own, kind).read_text() for kind in ("limits", "status"))
        cpus = re.findall(r"Cpus_allowed:.*", status)
        out[name] = f"{os.getpriority(os.PRIO_PROCESS, pid)}, {os.sched_getscheduler(pid)}, {cpus}, {hash(limits)}"
    for name, file in (("shm", "shm"), ("queue", "msg")):
        lines = [line.split() for line in Path("/proc/sysvipc", file).read_text().splitlines()[1:]]
        out[name] = str([line[:6] for line in lines if int(line[1]) == things[name]])
    return out


def _own_file() -> Path:
    """Returns a file that programs may read: of the packages if the account owns one there, else of the interpreter."""
    folders = [Path(path) for path in sys.path if path.endswith("packages") and os.path.isdir(path)]
    owned = (file for folder in folders for file in folder.glob("*/*.py") if file.stat().st_uid == os.getuid())
    return next(owned, Path(os.__file__))


@contextlib.contextmanager
def _queues() -> Iterator[dict[str, int]]:
    """Yields memory and a queue of System V that anyone may write."""
    libc = ctypes.CDLL(None, use_errno=True)
    shm, queue = libc.shmget(0, 4096, 0o1666), libc.msgget(0, 0o1666)
    if shm < 0 or queue < 0:
        raise OSError(ctypes.get_errno(), "no System V memory or queue")
    try:
        yield {"shm": shm, "queue": queue}
    finally:
        libc.shmctl(shm, 0, None)
        libc.msgctl(queue, 0, None)


@contextlib.contextmanager
def _listening(path: str, datagrams: str) -> Iterator[dict[str, socket.socket]]:
    """Yields sockets that wait for connections and datagrams."""
    kinds = {"Unix": (path, socket.SOCK_STREAM), "datagrams": (datagrams, socket.SOCK_DGRAM)}
    kinds["abstract"] = (f"\0jaxrl_{secrets.token_hex(4)}", socket.SOCK_DGRAM)
    with contextlib.ExitStack() as stack:
        found = {"TCP": stack.enter_context(socket.create_server(("127.0.0.1", 0)))}
        for name, (address, kind) in kinds.items():
            found[name] = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            found[name].bind(address)
        found["Unix"].listen()
        for name in (path, datagrams):
            os.chmod(name, 0o777)
        for one in found.values():
            one.setblocking(False)
        yield found


def _heard(server: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        if server.type == socket.SOCK_DGRAM:
            server.recv(16)
        else:
            server.accept()[0].close()
        return True
    return False


def left_behind(parent: int) -> list[int]:
    """Returns the processes that live and that a sandbox of the process `parent` started."""
    mark, out = f"os.getppid() == {parent}\n".encode(), []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            out += [int(file.parent.name)] if mark in file.read_bytes() else []
    return out


def killed(level: str) -> dict[str, int]:
    """Returns, for each program that tries to outlive, how many processes are left PATIENCE_S after its judge was killed."""
    from jaxrl_post.rewards.sandbox import host
    from jaxrl_post.rewards.sandbox.examiner import Link
    from jaxrl_post.rewards.sandbox.program import Outcome

    out = {}
    for attack in attacks():
        if attack.kind != "outlive":
            continue
        reads, writes = os.pipe()
        judge = os.fork()
        if judge == 0:
            sandbox = host.Sandbox(level)
            program = sandbox.start(60.0)
            link = Link(program.channel)
            os.write(writes, b"r")
            with Outcome():  # whatever the program does, its judge stays until it is killed
                names = link.ask(do="load", source=attack.source, before=[], wanted=["attack"])["names"]
                link.decode(names["attack"][1])()
            time.sleep(600)
        os.read(reads, 1)
        time.sleep(0.5)
        os.kill(judge, signal.SIGKILL)
        os.waitpid(judge, 0)
        until = time.monotonic() + PATIENCE_S
        while (left := left_behind(judge)) and time.monotonic() < until:
            time.sleep(0.1)
        out[attack.name] = len(left)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        os.close(reads)
        os.close(writes)
    return out


def main(level: str, kinds: list[str]) -> int:
    """Prints, as JSON: scores and seconds by attack, what was reached, and the processes that are left."""
    from jaxrl_post.rewards import code
    from jaxrl_post.rewards.sandbox import host

    controls = "control" in kinds
    if controls:
        host._APART["none"] = ("",)  # a namespace would hide the other processes
    found, judge = {}, _judged_by_another if controls else judged
    with host_things() as things:
        reached = things.pop("reached")
        for attack in attacks():
            control = attack.kind == "reach" and attack.name not in _ELSEWHERE and controls
            if not kinds or attack.kind in kinds or control:
                score, seconds = judge(attack, things, level)
                found[f"{attack.kind}: {attack.name}"] = {"score": score, "seconds": round(seconds, 3)}
        touched = reached()
    outlived = killed(level) if "killed" in kinds else {}
    sandbox = code.sandbox_at(level)
    sandbox.close()
    time.sleep(0.2)
    out = {"level": sandbox.level, "layers": sandbox.layers, "uid": os.getuid(), "attacks": found}
    out["outlived"] = outlived
    print(json.dumps(out | {"reached": touched, "left_behind": len(left_behind(os.getpid()))}))
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main(sys.argv[1], sys.argv[2:]))
