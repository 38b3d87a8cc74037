"""Forks one confined process for each judged program, from a clean process that knows nothing of any test.

Runs as `python -c` without the package. It reads requests from a socket, each with one end of a program's channel. On
that channel come the number of the program's process, then the layers that confine it. Then the program is served.
"""

from __future__ import annotations

import json
import os
import signal
import socket

_END = b"\n"


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


def main(control: socket.socket, wire, program, confinement) -> None:
    """Serves requests until the other end closes the socket. Descriptor 3 is the control socket's."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not data:
            return
        while not data.endswith(_END):
            data += control.recv(1 << 16)
        if os.fork() == 0:
            try:
                control.close()
                _start(json.loads(data), descriptors[0], wire, program, confinement)
            finally:
                os._exit(0)
        os.close(descriptors[0])


def _start(request: dict, fd: int, wire, program, confinement) -> None:
    os.setsid()
    channel = Channel(fd if fd == 3 else os.dup2(fd, 3, inheritable=False))
    os.closerange(4, 1 << 20)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    layer = "process"
    try:
        if request["level"] == "strict":
            layer = "namespaces"
            confinement.die_with_parent()
            confinement.namespaces()
            _in_new_pid_namespace(channel, wire)
        else:
            channel.sendall(wire.pack({"pid": os.getpid()}))
        done = []
        for layer, apply in _layers(request, confinement):
            apply()
            done.append(layer)
    except OSError as error:
        channel.sendall(wire.pack({"missing": layer, "why": f"{type(error).__name__}: {error}"}))
        return
    channel.sendall(wire.pack({"layers": done}))
    program.Server(channel, bytearray(), wire).serve()


def _in_new_pid_namespace(channel: Channel, wire) -> None:
    """Goes on in a child, the first process of its namespace. This process waits for its end."""
    reads, writes = os.pipe()
    child = os.fork()
    if child:
        channel.sendall(wire.pack({"pid": child}))
        os.close(3)
        os.write(writes, b"g")
        os.waitpid(child, 0)
        os._exit(0)
    os.read(reads, 1)
    os.close(reads)
    os.close(writes)


def _layers(request: dict, confinement) -> list:
    """Returns the layers of a level in the order in which they must be applied."""
    paths, root = request["paths"], os.getuid() == 0
    strict, linux = request["level"] == "strict", request["linux"]
    limits = ("limits", lambda: confinement.limits(request["cpu_s"]))
    if request["level"] == "none":
        return [*([("parent", confinement.die_with_parent)] if linux else []), limits]
    layers = [("namespaces", lambda: None), ("root", lambda: confinement.private_root(paths))] if strict else []
    layers += [("privileges", confinement.no_new_privileges)]
    if root and (strict or confinement.readable_by_all(paths)):
        layers += [("account", confinement.own_account)]
    if root and strict:
        layers += [("user namespace", confinement.own_user_namespace)]
    layers += [("capabilities", confinement.no_capabilities)]
    return [
        *layers,
        ("parent", confinement.die_with_parent),
        limits,
        ("landlock", lambda: confinement.landlock(paths, "/tmp" if strict else None)),
        ("seccomp", confinement.seccomp),
    ]
