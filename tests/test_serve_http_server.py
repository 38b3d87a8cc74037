"""Connections of clients that are slow, silent, greedy or too many, and the end of the server: over a toy application."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time

import pytest
from served import ROOT

from jaxrl_post.serve import http_server
from jaxrl_post.serve.http_server import HttpServer

sys.path.insert(0, str(ROOT / "scripts"))

from hostile_clients import closed_within, opened, request, waited

ENDLESS = b"x" * (64 << 20)


class Toy:
    """An application that tells the names of headers, sends much, or waits for its last word. `aborted`: streams that ended."""

    def __init__(self):
        self.heads, self.last, self.aborted = [], threading.Event(), 0

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            return await send({"type": "lifespan.shutdown.complete"})
        self.heads.append(scope["headers"])
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            pass
        if message["type"] == "http.disconnect":
            self.aborted += 1
            return
        if scope["path"] == "/parts":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(64):
                await send({"type": "http.response.body", "body": ENDLESS[: 1 << 20], "more_body": True})
            return await send({"type": "http.response.body", "body": b""})
        body = ENDLESS if scope["path"] == "/much" else b"good"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})
        self.heads.append(scope["headers"])


@contextlib.contextmanager
def serving(toy, **how):
    server, heard = HttpServer(toy, **how), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=(heard,))
    port = heard.getsockname()[1]
    thread.start()
    try:
        yield port, server
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def quick(monkeypatch):
    for name, value in (("HEAD_S", 0.4), ("BODY_S", 0.8), ("UNREAD_S", 0.4), ("_IDLE_S", 0.6)):
        monkeypatch.setattr(http_server, name, value)


def test_slow_and_silent_clients_are_cut_and_others_are_served(quick):
    toy = Toy()
    begun = request("/", b"12345678", "t")
    with serving(toy) as (port, _):
        for sent in (b"", b"POST / HT", b"\r\n\r\n", begun[:-4]):
            with opened(port, sent) as one:
                assert closed_within(one, 10.0), sent
        for path in ("/much", "/parts"):
            with opened(port, request(path, b"", "t"), receive=4096) as one:
                time.sleep(1.0)
                one.settimeout(10)
                size = 0
                with contextlib.suppress(ConnectionError):
                    while part := one.recv(1 << 20):
                        size += len(part)
                assert size < len(ENDLESS), path
        with opened(port, b"POST / HTTP/1.1\r\n") as one:  # a byte now and then is no request
            end = time.monotonic() + 10.0
            with contextlib.suppress(OSError):
                while time.monotonic() < end:
                    one.sendall(b"a")
                    time.sleep(0.05)
            assert time.monotonic() < end
        with opened(port, request("/", b"1", "t")) as one:
            assert b"good" in one.recv(1 << 16) + one.recv(1 << 16)
            for _ in range(20):  # nor are empty lines
                with contextlib.suppress(OSError):
                    one.sendall(b"\r\n")
                time.sleep(0.05)
            assert closed_within(one, 10.0)


@pytest.mark.parametrize("head", ["X: " + "a" * 70_000, "\r\n".join(f"X{i}: b" for i in range(9000))], ids=len)
def test_a_long_head_is_refused(head):
    with serving(Toy()) as (port, _), opened(port) as one:
        with contextlib.suppress(OSError):
            one.sendall(f"GET / HTTP/1.1\r\n{head}\r\n".encode())
            for _ in range(100):
                one.sendall(b"Y: " + b"b" * 60_000 + b"\r\n")
        assert one.recv(1 << 16).startswith(b"HTTP/1.1 431 ") and closed_within(one, 10.0)


def test_too_many_connections_cut_the_oldest_that_asks_nothing(monkeypatch):
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 8)
    with serving(Toy()) as (port, _), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(opened(port)) for _ in range(8)]
        for _ in range(3):
            with opened(port, request("/", b"1", "t")) as one:
                assert one.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert all(closed_within(one, 5.0) for one in silent[:1])


def test_a_trailer_is_no_header():
    toy = Toy()
    head = b"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: own\r\nTransfer-Encoding: chunked\r\nTrailer: authorization\r\n\r\n"
    with serving(toy) as (port, _), opened(port, head + b"1\r\na\r\n0\r\nAuthorization: other\r\n\r\n") as one:
        assert one.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert waited(lambda: len(toy.heads) == 2, 10.0)
    assert [dict(head)[b"authorization"] for head in toy.heads] == [b"own", b"own"]


def test_open_responses_hear_the_last_word(monkeypatch):
    monkeypatch.setattr(http_server, "LAST_WORD_S", 0.2)
    toy = Toy()
    with serving(toy, ending=toy.last.set) as (port, server), opened(port, request("/", b"12345678", "t")[:-4]) as one:
        assert waited(lambda: toy.heads, 10.0)
        server.stop()
        assert toy.last.wait(4.0)
        one.sendall(b"5678")
        assert b"200" in one.recv(1 << 16)
