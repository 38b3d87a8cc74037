"""Confines the process that calls it, before a judged program runs there: limits, namespaces and Landlock.

Runs in the judged program's process. The package is not imported there: `sandbox` sends this module as compiled code.
Each function is one layer and raises OSError where the host does not give it. Linux on x86_64 and aarch64.

A confined program is one process with one thread. It cannot start a program, open a socket, signal another process or
write outside its own folder. So a fork bomb ends at its first fork, and no descendant can outlive the verdict.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Callable

MEMORY, FILE, OPEN_FILES, STACK = 1 << 30, 1 << 20, 64, 64 << 20  # bytes, but for OPEN_FILES
SCRATCH = "size=16m,nr_inodes=1024,mode=1777"
_UID = 1_000_000_000  # of judged programs where the caller is root; the process number is added
_USER = 0x10000000
_NAMESPACES = {"mount": 0x20000, "pid": 0x20000000, "net": 0x40000000, "ipc": 0x08000000, "uts": 0x04000000}
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
_MOUNT_ATTR_RDONLY, _AT_RECURSIVE = 1, 0x8000
_NO_NEW_PRIVS, _PDEATHSIG, _SUBREAPER = 38, 1, 36

# Landlock's rights of ABI 1 to 5, as bits: see landlock(7).
_READ = 1 << 2 | 1 << 3  # read a file, list a folder
_WRITE_ABI = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
_ON_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15

_c = ctypes.CDLL(None, use_errno=True)


def _call(*arguments) -> int:
    """Makes a system call. Raises OSError."""
    returned = _c.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return returned


def _prctl(option: int, *values) -> None:
    if _c.prctl(option, *(ctypes.c_ulong(v) if isinstance(v, int) else v for v in values)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(lives: Callable[[], bool], by: int = signal.SIGKILL) -> None:
    """Makes the kernel send `by` to this process when its parent dies. A change of account undoes it.

    `lives`: returns whether the parent still lives. If it has died before, this process ends now.
    """
    _prctl(_PDEATHSIG, int(by), 0, 0, 0)
    if not lives():
        os._exit(0)


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose parents end."""
    _prctl(_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """Kills the children of a process that adopts orphans until there are none."""
    while True:
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
                if parent == os.getpid():
                    os.kill(int(name), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def limits(cpu_s: int) -> None:
    """Sets the process's limits. `cpu_s` is a last resort above the limit that the judging side measures."""
    for name, most in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_STACK, STACK),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu_s),
    ):
        hard = resource.getrlimit(name)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(name, (most, most))


def own_account() -> None:
    """Leaves root's account for one that nothing else has."""
    own = _UID + os.getpid() % 1_000_000
    os.setgroups([])
    os.setresgid(own, own, own)
    os.setresuid(own, own, own)


def readable_by_all(paths: list[str]) -> bool:
    """Returns whether any account can reach the files and folders of `paths`."""
    reached = {parent for path in paths for parent in (path, *_parents(os.path.realpath(path)))}
    return all(os.stat(path).st_mode & (0o1 if os.path.isdir(path) else 0o4) for path in reached)


def _parents(path: str) -> list[str]:
    out = []
    while path != "/":
        path = os.path.dirname(path)
        out.append(path)
    return out


def namespaces(*names: str) -> None:
    """Enters new namespaces, all or those of `names`, and a user namespace unless root can do without."""
    flags = 0
    for name in names or _NAMESPACES:
        flags |= _NAMESPACES[name]
    flags |= 0 if os.getuid() == 0 else _USER
    uid, gid = os.getuid(), os.getgid()
    _check(_c.unshare(flags))
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def own_user_namespace() -> None:
    """Enters a user namespace without any mapping, after root's account was left."""
    _check(_c.unshare(_USER))


def private_root(paths: list[str]) -> None:
    """Makes a root of the folders and files of `paths` alone, read-only, with a bounded writable /tmp of its own."""
    opened = {path: os.open(path, os.O_PATH) for path in paths}  # some may lie below the /tmp that is hidden now
    _mount(b"none", b"/", None, _REC | _PRIVATE)
    _mount(b"tmpfs", b"/tmp", b"tmpfs", _NOSUID | _NODEV, b"size=1m,mode=755")
    os.makedirs("/tmp/tmp")  # before the paths, as some may lie there
    _mount(b"tmpfs", b"/tmp/tmp", b"tmpfs", _NOSUID | _NODEV | _NOEXEC, SCRATCH.encode())
    for path, source in opened.items():
        target = f"/tmp{path}"
        folder = os.path.isdir(f"/proc/self/fd/{source}")
        os.makedirs(target if folder else os.path.dirname(target), exist_ok=True)
        if not folder:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        _mount(f"/proc/self/fd/{source}".encode(), target.encode(), None, _BIND | _REC)
        os.close(source)
        device = path.startswith("/dev/")
        _read_only(target.encode(), _MOUNT_ATTR_RDONLY | _NOSUID | (0 if device else _NODEV))
    os.chdir("/tmp")
    _call({"x86_64": 155, "aarch64": 41}[platform.machine()], ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    _check(_c.umount2(b".", 2))
    os.chdir("/")
    _mount(b"none", b"/", None, _BIND | 32 | _RDONLY | _NOSUID | _NODEV)
    os.chdir("/tmp")


def no_capabilities() -> None:
    """Gives up all capabilities, also those in a user namespace."""
    header = struct.pack("II", 0x20080522, 0)
    _check(_c.capset(header, bytes(24)))


def no_new_privileges() -> None:
    _prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)


def landlock(paths: list[str], scratch: str | None) -> None:
    """Allows reading below `paths` and everything but links and devices below `scratch`, and nothing else.

    From ABI 4 no TCP port can be bound or connected. From ABI 6 no signal and no abstract socket reaches outside.
    """
    abi = _call(444, ctypes.c_void_p(), 0, 1)
    handled = _WRITE_ABI[min(abi, 5)]
    attributes = struct.pack("QQQ", handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    rules = _call(444, ctypes.c_char_p(attributes), size, 0)
    wanted = [(path, _READ) for path in paths]
    if scratch:
        wanted.append((scratch, handled & (_READ | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 14)))
    for path, rights in wanted:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights &= handled if os.path.isdir(path) else handled & _ON_FILES
        _call(445, rules, 1, ctypes.c_char_p(struct.pack("=Qi", rights, opened)), 0)
        os.close(opened)
    _call(446, rules, 0)
    os.close(rules)


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, data: bytes | None = None) -> None:
    _check(_c.mount(source, target, kind, ctypes.c_ulong(flags), data))


def _read_only(target: bytes, attributes: int) -> None:
    given = struct.pack("QQQQ", attributes, 0, 0, 0)
    _call(442, -100, ctypes.c_char_p(target), _AT_RECURSIVE, ctypes.c_char_p(given), len(given))


def _check(returned: int) -> None:
    if returned:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
