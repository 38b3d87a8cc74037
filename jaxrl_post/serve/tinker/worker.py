"""The thread that owns the devices. It takes one piece of work after another, in the order of their arrival.

Invariant: pieces of one client run in the order in which they came, except that a request to sample may pass others to
sample. Requests to sample the same weights run together on the engine; nothing else runs together.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_post.json_text import said
from jaxrl_post.serve.refusal import Refusal
from jaxrl_post.serve.tinker.promises import refused
from jaxrl_post.serve.tinker.sampler import Sampler, Sampling
from jaxrl_post.serve.tinker.snapshots import Saved

Result = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """A piece of work. `run`: gives its result, or None for a request to sample, which `sampling` holds.

    `tell`: takes the result, in any thread. `owner`: the session that asked.
    """

    owner: str
    tell: Callable[[Result], object]
    run: Callable[[], Result] | None = None
    sampling: Sampling | None = None


class Worker:
    """Carries out pieces until it is stopped.

    Args:
      ended: called when the thread ends, also by an error.

    Attributes:
      sound: whether the devices could begin; if not, they cannot begin anew either.
      running: the session whose piece runs, or ran last. What it changes may be half done where the thread failed.
    """

    def __init__(self, sampler: Sampler, ended: Callable[[], object]):
        self._sampler, self._ended = sampler, ended
        self._pieces: collections.deque[Piece] = collections.deque()
        self._changed, self._stopping = threading.Condition(), False
        self.sound, self.running = False, ""
        self._thread = threading.Thread(target=self._work, name="devices", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def restart(self) -> None:
        """Begins anew after the thread has ended by an error. Pieces that wait are dropped, but for ends of sessions."""
        self._thread.join()
        with self._changed:
            self._pieces = collections.deque(one for one in self._pieces if not one.owner)
        self.sound = False
        self._thread = threading.Thread(target=self._work, name="devices", args=(True,), daemon=True)
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """Ends the thread behind its present piece or dispatch. Returns whether it ended within the seconds."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Returns whether the thread runs."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Returns the number of pieces that wait."""
        return len(self._pieces)

    def submit(self, piece: Piece) -> None:
        """Queues a piece."""
        with self._changed:
            self._pieces.append(piece)
            self._changed.notify()

    def drop(self, owner: str) -> None:
        """Takes the waiting pieces of a session out of the queue. Nothing is told of them."""
        with self._changed:
            self._pieces = collections.deque(one for one in self._pieces if one.owner != owner)

    # ---- in the thread

    def _work(self, anew: bool = False) -> None:
        try:
            if anew:
                self._sampler.restart()
            self.sound = True
            while (piece := self._next()) is not None:
                self.running = piece.owner if piece.sampling is None else ""
                if piece.sampling is None:
                    _answered(piece)
                else:
                    self._sample(piece)
        finally:
            self._ended()

    def _next(self) -> Piece | None:
        """Returns the piece that came first, or None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._pieces)
            return None if self._stopping else self._pieces.popleft()

    def _sample(self, first: Piece) -> None:
        """Samples until no request of these weights is left, or until what runs has ended where other pieces wait."""
        live = self._begun([first, *self._alike(first)])
        while live and not self._stopping:
            for sampling, result in self._sampler.step():
                live.pop(sampling).tell(result)
            if not self._others(first):
                live |= self._begun(self._alike(first))
        self._sampler.clear()

    def _begun(self, pieces: list[Piece]) -> dict[Sampling, Piece]:
        """Hands requests to the engine. Those that it refuses are told so."""
        live = {}
        for piece in pieces:
            assert piece.sampling is not None
            try:
                self._sampler.begin(piece.sampling)
                live[piece.sampling] = piece
            except (Refusal, ValueError) as error:
                piece.tell(refused(said(error)))
        return live

    def _alike(self, first: Piece) -> list[Piece]:
        """Takes the waiting requests to sample the same weights out of the queue.

        Those behind other work of their client stay, as it may replace these weights.
        """
        found: list[Piece] = []
        left: collections.deque[Piece] = collections.deque()
        held = set()  # clients whose other work waits
        with self._changed:
            for one in self._pieces:
                taken = _weights(one) == _weights(first) and one.owner not in held
                (found if taken else left).append(one)
                if one.sampling is None:
                    held.add(one.owner)
            self._pieces = left
        return found

    def _others(self, first: Piece) -> bool:
        """Returns whether other work waits."""
        with self._changed:
            return any(_weights(one) != _weights(first) for one in self._pieces)


def _weights(piece: Piece) -> Saved | None:
    return None if piece.sampling is None else piece.sampling.path


def _answered(piece: Piece) -> None:
    """Runs a piece, and tells its result or its refusal."""
    assert piece.run is not None
    try:
        result = piece.run()
    except (Refusal, ValueError) as error:
        result = refused(said(error), ours=isinstance(error, Refusal) and error.status >= 500)
    piece.tell(result)
