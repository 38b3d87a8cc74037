"""The socket of a command that serves. It is bound before anything is compiled, so that a taken port costs no minute."""

from __future__ import annotations

import socket

PORTS = 65535


def check_port(command: str, port: int) -> None:
    """Refuses a port that does not exist.

    Raises:
      ValueError: with the nearest one.
    """
    if port > PORTS:
        raise ValueError(f"{command}: --port={port} is above {PORTS}; the nearest valid value is {PORTS}")


def bound(command: str, host: str, port: int) -> socket.socket:
    """Returns a socket that listens.

    Raises:
      ValueError: the address or the port is not to be had.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ValueError(f"{command}: {host}:{port} cannot be listened at: {error.strerror or error}") from error
