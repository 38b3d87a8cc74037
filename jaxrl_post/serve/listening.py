"""The socket and the token of a server. Nothing here loads a package of the extra `serve`."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket

TOKEN = "JAXRL_POST_TOKEN"
PORTS = 65535


def token(given: str = "") -> str:
    """Returns what clients send as their API key: the given text, the variable's, or a new one."""
    return given or os.environ.get(TOKEN) or secrets.token_urlsafe(24)


def need(who: str, *packages: str) -> None:
    """Raises a ValueError where a package of the extra is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{who}: {missing[0]} is not installed; write pip install 'jaxrl_post[serve]'")


def check_port(command: str, port: int) -> None:
    """Raises a ValueError with the nearest port where there is no such one."""
    if port > PORTS:
        raise ValueError(f"{command}: --port={port} is above {PORTS}; the nearest valid value is {PORTS}")


def bound(who: str, host: str, port: int) -> socket.socket:
    """Returns a socket that listens. A ValueError says that the address or the port is not to be had."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ValueError(f"{who}: {host}:{port} cannot be listened at: {error.strerror or error}") from error


def address(listening: socket.socket) -> str:
    """Returns the URL of a socket that listens."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
