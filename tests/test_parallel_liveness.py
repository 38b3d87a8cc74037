"""Losses among several watchers over real sockets, in one process: who is told what, and when nobody is."""

from __future__ import annotations

import queue
import socket
from types import SimpleNamespace

import pytest

from jaxrl_post.parallel import liveness
from jaxrl_post.parallel.liveness import Liveness, Peer

TOKEN = "t0ken"


@pytest.fixture
def job():
    """Returns three watchers, the port of process 0, and a queue of (process, sentence) of losses."""
    listener, told = socket.create_server(("127.0.0.1", 0)), queue.Queue()
    port = listener.getsockname()[1]

    def watcher(index: int) -> Liveness:
        def lost(sentence: str) -> None:
            told.put((index, sentence))

        if index == 0:
            return Liveness(0, 3, listener, [], TOKEN, lost, silence_s=1.0)
        return Liveness(index, 3, None, [Peer(greeting(port, index), index=0)], TOKEN, lost, silence_s=1.0)

    watchers = [watcher(index) for index in range(3)]
    yield watchers, port, told
    for one in watchers:
        one.leave(0)


def greeting(port: int, index: int, token: str = TOKEN) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", port))
    line.sendall(f"hello {token} {index}\n".encode())
    return line


def cut(watcher: Liveness) -> None:
    """Ends the connections of a watcher as the end of its process does."""
    watcher._over.set()
    watcher._thread.join()
    for peer in watcher._peers:
        peer.line.close()


def quiet(told: queue.Queue, seconds: float = 2.5) -> bool:
    """Returns whether no loss is told for longer than the limit of silence."""
    try:
        told.get(timeout=seconds)
    except queue.Empty:
        return True
    return False


def test_processes_that_live_or_end_well_are_not_lost(job):
    watchers, _, told = job
    assert quiet(told)
    watchers[2].leave(0)
    watchers[0].leave(0)
    assert quiet(told)


@pytest.mark.parametrize("lost, others", [(2, {0, 1}), (0, {1, 2})])
def test_an_end_without_a_word_is_told_to_all_others(job, lost, others):
    watchers, _, told = job
    assert quiet(told, 0.5)
    cut(watchers[lost])
    found = [told.get(timeout=5) for _ in others]
    assert {who for who, _ in found} == others
    assert {sentence for _, sentence in found} == {f"process {lost} of 3 is lost: its connection ended"}


def test_a_process_that_is_silent_is_lost(job):
    _, port, told = job
    line = greeting(port, 7)
    found = [told.get(timeout=5) for _ in range(3)]
    assert {who for who, _ in found} == {0, 1, 2}
    assert all(sentence == "process 7 of 3 is lost: it said nothing for 1 s" for _, sentence in found)
    line.close()


def test_a_process_that_never_comes_is_lost():
    """It was killed after all had joined, and before it said a word here."""
    listener, told = socket.create_server(("127.0.0.1", 0)), queue.Queue()
    port, first = listener.getsockname()[1], Liveness(0, 3, listener, [], TOKEN, told.put, silence_s=0.5)
    second = Liveness(1, 3, None, [Peer(greeting(port, 1), index=0)], TOKEN, told.put, silence_s=0.5)
    sentence = "process 2 of 3 is lost: it did not come within 0.5 s"
    assert [told.get(timeout=5) for _ in range(2)] == [sentence, sentence]
    assert quiet(told, 1.0)  # said once
    for one in (first, second):
        one.leave(0)


def test_an_error_of_one_ends_the_others_after_a_while(job, monkeypatch):
    monkeypatch.setattr(liveness, "GRACE_S", 0.5)
    watchers, _, told = job
    assert quiet(told, 0.5)
    watchers[1].leave(1)
    found = [told.get(timeout=5) for _ in range(2)]
    assert {who for who, _ in found} == {0, 2}
    assert {sentence for _, sentence in found} == {"process 1 of 3 ended with exit code 1"}


def test_a_stranger_is_no_process_of_the_job(job):
    watchers, port, told = job
    greeting(port, 9, token="guess").close()
    for words in (b"lost everything\n", b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"x" * 200):
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(words)
            assert line.recv(1) == b""
    assert quiet(told, 1.5)
    cut(watchers[2])  # the others still watch
    assert {told.get(timeout=5)[0] for _ in range(2)} == {0, 1}


def test_the_loss_is_handed_on_before_the_process_ends(monkeypatch, capsys):
    told, codes = [], []
    monkeypatch.setattr(liveness, "_exit", codes.append)
    monkeypatch.setattr(liveness.threading, "Timer", lambda *_: SimpleNamespace(start=lambda: None))
    liveness._end(lambda code, why: told.append((code, why, list(codes))), "process 2 of 3 is lost")
    assert told == [(42, "process 2 of 3 is lost", [])] and codes == [42]
    assert capsys.readouterr().err.startswith("error: process 2 of 3 is lost; this process ends too")


@pytest.mark.parametrize("gone", ["store", "listener"])
def test_a_process_0_that_is_gone_before_it_is_reached_is_lost(monkeypatch, capsys, gone):
    def get(key: str, limit_s: float) -> bytes:
        if gone == "store":
            raise TimeoutError("not there")
        with socket.create_server(("127.0.0.1", 0)) as closed:
            return f"{closed.getsockname()[1]} {TOKEN}".encode()

    codes = []
    for name, value in (("place", lambda: (1, 2)), ("get", get), ("coordinator", lambda: "127.0.0.1")):
        monkeypatch.setattr(liveness.exchange, name, value)
    monkeypatch.setattr(liveness, "_exit", codes.append)
    monkeypatch.setattr(liveness, "_wait_at_abort", lambda: None)
    monkeypatch.setattr(liveness.threading, "Timer", lambda *_: SimpleNamespace(start=lambda: None))
    liveness.join()
    assert codes == [42] and "process 0 of 2 is lost" in capsys.readouterr().err and not liveness._watching


def test_a_process_by_itself_watches_nothing():
    liveness.join()
    liveness.wait_for_loss()
    liveness.leave(1)
    assert not liveness._watching
