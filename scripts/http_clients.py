"""Clients of a server on this machine: many at a time, each with a connection of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 120.0  # of a response


class Caller:
    def __init__(self, port: int, token: str):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Returns status and body. `body`: bytes, or what becomes JSON; None: none."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        self._connection.request(method, path, data, self._headers)
        response = self._connection.getresponse()
        return response.status, response.read()

    def metrics(self) -> dict[str, float]:
        """Returns the figures of /metrics by name, those with labels summed."""
        out: dict[str, float] = {}
        for line in self.ask("GET", "/metrics")[1].decode().splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                out[name] = out.get(name, 0.0) + float(value)
        return out

    def close(self) -> None:
        self._connection.close()


class Served:
    """A server of this project, by `python *command`, until the block ends. The block gets its port.

    Its line that names the port begins with "serving".
    """

    def __init__(self, root: Path, *command: str):
        env = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, *command], cwd=root, env=env, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> int:
        for line in self._process.stdout:
            if line.startswith("serving"):
                return int(line.strip().removesuffix("/v1").rpartition(":")[2])
        raise RuntimeError(f"the server ended with exit code {self._process.wait()} before it served")

    def __exit__(self, *_: Any) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.stdout.close()


def free_port() -> int:
    """Returns a port of this machine that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def together(clients: int, work: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns what each piece of work returns, done by so many threads.

    Raises:
      RuntimeError: a piece failed; the first failure is its cause.
    """
    turns: Iterator[int] = iter(range(len(work)))
    out: list[Any] = [None] * len(work)
    lock, failures = threading.Lock(), []

    def turn() -> None:
        while not failures:
            with lock:
                place = next(turns, None)
            if place is None:
                return
            try:
                out[place] = work[place]()
            except (OSError, ValueError, AssertionError, RuntimeError, http.client.HTTPException) as error:
                failures.append(error)

    threads = [threading.Thread(target=turn) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise RuntimeError(f"{len(failures)} of {clients} clients failed: {failures[0]}") from failures[0]
    return out


def posted(port: int, token: str, clients: int, path: str, bodies: Iterable[Any]) -> list[bytes]:
    """Returns the response of each body, each client going on over its own connection."""
    local, callers = threading.local(), []

    def post(body: Any) -> bytes:
        if not hasattr(local, "caller"):
            local.caller = Caller(port, token)
            callers.append(local.caller)
        status, data = local.caller.ask("POST", path, body)
        if status != 200:
            raise ValueError(f"status {status}: {data[:300]!r}")
        return data

    with contextlib.ExitStack() as stack:
        out = together(clients, [lambda body=body: post(body) for body in bodies])
        for caller in callers:
            stack.callback(caller.close)
    return out
