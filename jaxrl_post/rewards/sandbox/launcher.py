"""Forks one confined process for each judged program, from a clean process that knows nothing of any test.

Runs as `python -c` without the package. It reads requests from a socket, each with one end of a program's channel, and
with the files of its stdin and stdout where it has them. On that channel come the number of the program's process, then
the layers that confine it. Then the program is served.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Callable

_END = b"\n"
_exit = os._exit  # a program of this process may replace the module's own


class Channel:
    """A socket's descriptor with the two methods that `wire` and `program` use."""

    def __init__(self, fd: int):
        self._fd = fd

    def recv(self, most: int) -> bytes:
        return os.read(self._fd, most)

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]


def main(control: socket.socket, wire, program, confinement, system_calls) -> None:
    """Serves requests until the other end closes the socket. Descriptor 3 is the control socket's."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children
    launcher = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 3)
        if not data:
            return
        while not data.endswith(_END):
            data += control.recv(1 << 16)
        if os.fork() == 0:
            try:
                control.close()
                lives = lambda: os.getppid() == launcher  # noqa: E731
                _start(json.loads(data), descriptors, lives, wire, program, confinement, system_calls)
            finally:
                _exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _start(request: dict, descriptors: list[int], lives, wire, program, confinement, system_calls) -> None:
    os.setsid()
    fd, *streams = descriptors
    for stream, descriptor in enumerate(streams):
        os.dup2(descriptor, stream)
    channel = Channel(fd if fd == 3 else os.dup2(fd, 3, inheritable=False))
    os.closerange(4, 1 << 20)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    layer, done = request["apart"] or "process", []
    try:
        if layer == "reaper":
            lives = _in_child(channel, wire, lambda child: _reaped(child, lives, confinement))
        elif request["apart"]:
            confinement.die_with_parent(lives)
            confinement.namespaces(*(["pid"] if layer == "pid namespace" else []))
            lives = _in_child(channel, wire, lambda child: lambda: os.waitpid(child, 0))
        else:
            channel.sendall(wire.pack({"pid": os.getpid()}))
        done += [layer] if request["apart"] else []
        for layer, apply in _layers(request, lives, confinement, system_calls):
            apply()
            done.append(layer)
    except OSError as error:
        channel.sendall(wire.pack({"missing": layer, "why": f"{type(error).__name__}: {error}"}))
        return
    channel.sendall(wire.pack({"layers": done}))
    program.Server(channel, bytearray(), wire).serve()


def _in_child(channel: Channel, wire, begun: Callable) -> Callable[[], bool]:
    """Goes on in a child. Returns there whether this process lives, which waits for the child's end.

    `begun`: maps the child's number to a function that returns at its end.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child:
        ended = begun(child)
        channel.sendall(wire.pack({"pid": child}))
        os.close(3)
        os.write(writes, b"g")
        ended()
        os._exit(0)
    os.setsid()
    os.close(writes)
    os.read(reads, 1)

    def lives() -> bool:
        alive = not select.select([reads], [], [], 0)[0]  # the end of this process closes the pipe
        os.close(reads)
        return alive

    return lives


def _reaped(child: int, lives: Callable[[], bool], confinement) -> Callable[[], None]:
    """Makes this process one that takes every descendant of a child with it, also when the launcher ends."""

    def end(*_) -> None:
        confinement.end_descendants()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    confinement.adopt_orphans()
    confinement.die_with_parent(lives, signal.SIGTERM)

    def ended() -> None:
        while os.wait()[0] != child:
            pass
        end()

    return ended


def _layers(request: dict, lives: Callable[[], bool], confinement, system_calls) -> list:
    """Returns the layers of a level in the order in which they must be applied."""
    paths, root = request["paths"], os.getuid() == 0
    strict, linux = request["level"] == "strict", request["linux"]
    privileges = ("privileges", confinement.no_new_privileges)
    parent = ("parent", lambda: confinement.die_with_parent(lives))
    limits = ("limits", lambda: confinement.limits(request["cpu_s"]))
    if request["level"] == "none":
        stays = [privileges, ("lifetime", system_calls.seccomp_of_launcher_alone)] if request["apart"] else []
        return [*([parent] if linux else []), limits, *stays]
    layers = [("root", lambda: confinement.private_root(paths))] if strict else []
    layers += [privileges]
    if root and (strict or confinement.readable_by_all(paths)):
        layers += [("account", confinement.own_account)]
    if root and strict:
        layers += [("user namespace", confinement.own_user_namespace)]
    layers += [("capabilities", confinement.no_capabilities)]
    return [
        *layers,
        parent,
        limits,
        ("landlock", lambda: confinement.landlock(paths, "/tmp" if strict else None)),
        ("seccomp", lambda: system_calls.seccomp(strict)),
    ]
