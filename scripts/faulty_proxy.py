"""A proxy before a server of HTTP that fails, delays and truncates a share of all calls, in a process of its own.

    python scripts/faulty_proxy.py PORT SERVER_PORT [SHARE] [SEED]

It listens on 127.0.0.1:PORT and hands calls on to 127.0.0.1:SERVER_PORT. A fault is drawn for each call from the seed:

- refused: the server is not asked, and the answer is 503
- reset: the server is not asked, and the connection ends
- lost: the server does the call, and the connection ends without an answer
- delayed: the call waits before it is handed on
- cut_answer: half of the answer comes, then the connection ends
- cut_call: half of the call is handed on, then both connections end

GET /faults returns how often each was done, as JSON, beside the number of all calls.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import random
import socket
import sys
import threading
import time
from collections import Counter

KINDS = ("refused", "reset", "lost", "delayed", "cut_answer", "cut_call")
DELAY_S = 0.5
_OF_ONE_HOP = ("connection", "keep-alive", "transfer-encoding", "host")


class Proxy(http.server.ThreadingHTTPServer):
    """Listens on `port` for `server_port`, and does a fault in this share of all calls."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, server_port: int, share: float, seed: int):
        super().__init__(("127.0.0.1", port), Call)
        self.server_port_behind, self._share, self._noise = server_port, share, random.Random(seed)
        self._lock, self.done = threading.Lock(), Counter()

    def draw(self) -> str:
        """Returns the fault of the next call, or an empty text."""
        with self._lock:
            kind = self._noise.choice(KINDS) if self._noise.random() < self._share else ""
            self.done.update(["calls", *([kind] if kind else [])])
            return kind

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing of connections that ended, which is what this is for."""


class Call(http.server.BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_GET(self) -> None:
        """Hands a call on, or does its fault."""
        if self.path == "/faults":
            self._answer(200, [], json.dumps(self.server.done).encode())
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.draw()
        if fault == "refused":
            self._answer(503, [], b"planted")
        elif fault == "reset":
            self._end()
        elif fault == "cut_call":
            self._cut_call(body)
            self._end()
        else:
            if fault == "delayed":
                time.sleep(DELAY_S)
            status, headers, data = self._asked(body)
            if fault == "lost":
                self._end()
            else:
                self._answer(status, headers, data, half=fault == "cut_answer")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_GET

    def log_message(self, *words: object) -> None:
        """Writes no log."""

    def _asked(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """Returns the server's answer."""
        behind = http.client.HTTPConnection("127.0.0.1", self.server.server_port_behind, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_ONE_HOP}
        behind.request(self.command, self.path, body or None, headers)
        answer = behind.getresponse()
        data = answer.read()
        behind.close()
        return answer.status, answer.getheaders(), data

    def _cut_call(self, body: bytes) -> None:
        """Hands on a call with half of its body, and ends the connection."""
        with socket.create_connection(("127.0.0.1", self.server.server_port_behind)) as behind:
            words = [f"{self.command} {self.path} HTTP/1.1", "Host: 127.0.0.1"]
            words += [f"{name}: {value}" for name, value in self.headers.items() if name.lower() not in _OF_ONE_HOP]
            behind.sendall(("\r\n".join(words) + "\r\n" + ("\r\n" if body else "")).encode() + body[: len(body) // 2])

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, half: bool = False) -> None:
        self.send_response_only(status)
        length = str(len(data))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in (*_OF_ONE_HOP, "content-length"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if half else data)
        if half:
            self._end()

    def _end(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    port, behind, share, seed = (*sys.argv[1:], *("0.05", "0")[len(sys.argv) - 3 :])
    Proxy(int(port), int(behind), float(share), int(seed)).serve_forever()
