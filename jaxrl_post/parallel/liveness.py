"""Which processes of a job live: where one is lost, the others end with a sentence and exit code 42.

Process 0 has a connection to each other process. One that ends without a word means that its process is lost, and so
does one that is silent for SILENCE_S, or never comes. Process 0 says so to all others. A process that ends by itself says its
exit code.

Invariant: this only ends processes, so it decides how long a run goes on, never what it computes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxrl_post.parallel import exchange

RESTART = 42  # exit code: the run is intact up to its last checkpoint, and --resume continues it
SILENCE_S = 60.0
GRACE_S = 30.0  # for a process to end by itself, once another one has ended with an error
ABORT_S = 3.0  # for the loss of process 0 to be seen before jax aborts
JOIN_S = 300.0
_GREETING = 100  # bytes of the longest first line
_ROUNDS = itertools.count()  # a key is used once, and all processes count alike


@dataclass
class Peer:
    """A connection to another process, its index, and when it was heard last. `code`: with which it said to end."""

    line: socket.socket
    index: int = -1
    heard: float = field(default_factory=time.monotonic)
    code: int | None = None
    rest: bytes = b""


class Liveness:
    """Watches the processes of the job from a thread of its own.

    Args:
      index, processes: of this process, and how many there are.
      listener: of process 0. The others have `peers` with one connection to process 0.
      token: what a connection must say first.
      lost: called with a sentence when a process is lost. It should not return.
    """

    def __init__(
        self,
        index: int,
        processes: int,
        listener: socket.socket | None,
        peers: list[Peer],
        token: str,
        lost: Callable[[str], object],
        silence_s: float = SILENCE_S,
    ):
        self._index, self._processes, self._token, self._lost = index, processes, token, lost
        self._listener, self._peers, self._silence_s = listener, peers, silence_s
        self._over, self._came = threading.Event(), {index}
        self._selector = selectors.DefaultSelector()
        for one in [listener, *(peer.line for peer in peers)]:
            if one is not None:
                self._selector.register(one, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._watch, name="liveness", daemon=True)
        self._thread.start()

    def leave(self, code: int) -> None:
        """Says that this process ends with an exit code, and stops to watch."""
        self._tell(f"bye {self._index} {code}")
        self._over.set()
        self._thread.join(timeout=2 * self._silence_s)
        for peer in self._peers:
            peer.line.close()
        if self._listener is not None:
            self._listener.close()

    # ---- the thread

    def _watch(self) -> None:
        beat = self._silence_s / 6
        begun = told = time.monotonic()
        while not self._over.is_set():
            for key, _ in self._selector.select(timeout=min(beat, 0.5)):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._hear(next(peer for peer in self._peers if peer.line is key.fileobj))
            if time.monotonic() - told > beat:
                told = time.monotonic()
                self._tell("here")
                self._check_silence(told)
                if self._listener is not None and told - begun > self._silence_s:
                    self._check_absence()

    def _accept(self) -> None:
        try:
            line, _ = self._listener.accept()
        except OSError:  # it was gone before it was answered
            return
        line.settimeout(self._silence_s)
        self._peers.append(Peer(line))
        self._selector.register(line, selectors.EVENT_READ)

    def _hear(self, peer: Peer) -> None:
        try:
            data = peer.line.recv(4096)
        except OSError:
            data = b""
        if not data:
            return self._ended(peer)
        peer.heard = time.monotonic()
        *lines, peer.rest = (peer.rest + data).split(b"\n")
        if peer.index < 0 and not self._greeted(peer, lines):
            return
        for line in lines:
            self._obey(peer, line.decode(errors="replace").split(" "))

    def _greeted(self, peer: Peer, lines: list[bytes]) -> bool:
        """Takes the first line of a connection. What says anything else is no process of this job, and is dropped."""
        if not lines and len(peer.rest) < _GREETING:
            return False  # the rest of the line is still to come
        words = lines.pop(0).split(b" ") if lines else []
        if len(words) == 3 and words[:2] == [b"hello", self._token.encode()]:
            peer.index = int(words[2])
            self._came.add(peer.index)
        else:
            self._drop(peer)
        return peer.index >= 0

    def _obey(self, peer: Peer, words: list[str]) -> None:
        if words[0] == "bye":
            index, code = int(words[1]), int(words[2])
            if index == peer.index:
                peer.code = code
            if code:
                self._tell(f"bye {index} {code}", but=peer)
                self._leave_after(index, code)
        elif words[0] == "lost":
            self._lost(" ".join(words[1:]))

    def _ended(self, peer: Peer) -> None:
        self._drop(peer)
        if peer.index >= 0 and peer.code is None and not self._over.is_set():
            self._mourn(peer.index, "its connection ended")

    def _check_silence(self, now: float) -> None:
        for peer in list(self._peers):
            if now - peer.heard > self._silence_s and peer.code is None and peer.index >= 0:
                self._drop(peer)
                self._mourn(peer.index, f"it said nothing for {self._silence_s:g} s")

    def _check_absence(self) -> None:
        absent = {*range(self._processes)} - self._came
        self._came |= absent
        for index in sorted(absent):
            self._mourn(index, f"it did not come within {self._silence_s:g} s")

    def _mourn(self, index: int, why: str) -> None:
        sentence = f"process {index} of {self._processes} is lost: {why}"
        self._tell(f"lost {sentence}")
        self._lost(sentence)

    def _leave_after(self, index: int, code: int) -> None:
        """Ends this process too, unless it ends by itself soon: the same error may come to all."""
        sentence = f"process {index} of {self._processes} ended with exit code {code}"
        timer = threading.Timer(GRACE_S, lambda: self._over.is_set() or self._lost(sentence))
        timer.daemon = True
        timer.start()

    def _drop(self, peer: Peer) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(peer.line)
        self._peers.remove(peer)
        peer.line.close()

    def _tell(self, words: str, but: Peer | None = None) -> None:
        for peer in list(self._peers):
            if peer is not but:
                with contextlib.suppress(OSError):  # its end is heard by the thread
                    peer.line.sendall(words.encode() + b"\n")


# ---- of this process

_watching: list[Liveness] = []  # one for a process, as jax.distributed has


def join(ending: Callable[[int, str], object] = lambda code, why: None) -> None:
    """Begins to watch the processes of this job. A process by itself watches nothing.

    No device is asked for: the first use of one waits for all processes, and one of them may be lost by then.

    Args:
      ending: called with the exit code and a sentence, before the loss of another process ends this one.

    Raises:
      ValueError: process 0 cannot be reached.
    """
    me, count = exchange.place()
    if count == 1 or _watching:
        return
    _wait_at_abort()
    end = functools.partial(_end, ending)
    key = f"liveness/{next(_ROUNDS)}"
    if me == 0:
        both = socket.has_dualstack_ipv6()
        listener = socket.create_server(
            ("", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=count
        )
        token = secrets.token_hex(16)
        exchange.put(key, f"{listener.getsockname()[1]} {token}".encode())
        _watching.append(Liveness(me, count, listener, [], token, end))
    else:
        gone = f"process 0 of {count} is lost: it had joined, and does not say where it is reached"
        try:
            port, token = exchange.get(key, JOIN_S).decode().split(" ")
        except TimeoutError:  # at once where process 0 has ended, and the store with it
            return end(gone)
        try:
            line = socket.create_connection((exchange.coordinator(), int(port)), timeout=SILENCE_S)
        except ConnectionError:
            return end(gone)
        except OSError as error:
            raise ValueError(f"environment: process {me} cannot reach process 0: {error}") from error
        line.sendall(f"hello {token} {me}\n".encode())
        _watching.append(Liveness(me, count, None, [Peer(line, index=0)], token, end))


def leave(code: int) -> None:
    """Says to the others that this process ends with `code`. Without other processes it does nothing.

    After an error the process then exits at once: jax would wait for the others first, and abort where they do not come.
    """
    while _watching:
        _watching.pop().leave(code)
        if code:
            atexit.register(_exit, code)


def wait_for_loss() -> None:
    """Waits as long as the loss of a process may take to be seen, because that is what made a device fail."""
    if _watching:
        time.sleep(ABORT_S)


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _end(ending: Callable[[int, str], object], sentence: str) -> None:
    limit = threading.Timer(ABORT_S, os._exit, (RESTART,))  # what is noted may lie on a lost disk
    limit.daemon = True
    limit.start()
    print(
        f"error: {sentence}; this process ends too, and --resume continues from the newest checkpoint", file=sys.stderr
    )
    ending(RESTART, sentence)
    _exit(RESTART)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _aborting(number: int) -> None:
    """jax aborts as soon as process 0 is gone. Its loss is seen at the same time, and ends this process with its code."""
    time.sleep(ABORT_S)


def _wait_at_abort() -> None:
    ctypes.CDLL(None).signal(signal.SIGABRT, _aborting)
