"""The thread that steps the row engine. Work enters and leaves between two dispatches.

Invariant: only this thread touches the engine. Orders of other threads stand in a queue, which is emptied before every
dispatch: so a cancelled rollout is out of its slot when the next dispatch begins, and new weights sample from there on.
When a rollout runs is decided here; which tokens it has is not.

What a dispatch settled is told when the next one runs on the device, or at once where none follows. So the event loop
writes its responses while the host has nothing else to do, and does not hold up the dispatch.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.json_text import said
from jaxrl_post.types import Finish, Request, Rollout, RolloutId


class Piece(NamedTuple):
    """New tokens of one rollout of a request. `place`: among its requests. `finish`: None where it goes on."""

    place: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Finish | None


class Lost(NamedTuple):
    """The end of a request that is not finished. `status`: of HTTP."""

    status: int
    why: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """What the engine does for one HTTP request.

    `streams`: pieces are told after every dispatch, else one for each rollout at its end. `deadline`: time.monotonic().
    `tell`: takes a Piece or a Lost, in the thread of the event loop.
    """

    requests: Sequence[Request]
    streams: bool
    deadline: float
    tell: Callable[[Piece | Lost], object]


Told = list[tuple[Work, Piece | Lost]]
_Settled = tuple[Work, int, Rollout, int]  # the place of a rollout among the requests of its work, and its tokens told


class EngineThread:
    """Steps an engine until it is stopped.

    Args:
      post: hands what is told to the event loop. It is called once for a dispatch.
      counted: gets the counters of each dispatch (RowHost.metrics).
      say: gets one line where new weights are refused.
      ended: called when the thread ends, also by an error.

    Attributes:
      sound: whether the engine could begin; if not, it cannot begin anew either.
    """

    def __init__(
        self,
        engine: RowEngine,
        *,
        post: Callable[[Told], object],
        counted: Callable[[Mapping[str, float]], object],
        say: Callable[[str], object],
        ended: Callable[[], object],
    ):
        self._engine, self._post, self._counted, self._say, self._ended = engine, post, counted, say, ended
        self._orders: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._live: dict[RolloutId, tuple[Work, int]] = {}
        self._sent: dict[RolloutId, int] = {}
        self._finished: list[_Settled] = []
        self._told: Told = []
        engine.meanwhile = self._tell
        self.sound = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def restart(self) -> None:
        """Begins anew after the thread has ended by an error. Of what is queued, only new weights are kept."""
        self._thread.join()
        kept = []
        with contextlib.suppress(queue.Empty):
            while True:
                kept.append(self._orders.get_nowait())
        for order in kept:
            if order is None or getattr(order, "func", None) == self._swap:
                self._orders.put(order)
        self._live, self._sent, self._finished, self._told = {}, {}, [], []
        self.sound = False
        self._thread = threading.Thread(target=self._run, name="engine", args=(True,), daemon=True)
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """Ends the thread behind its present dispatch. Returns whether it ended within the seconds."""
        self._orders.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Returns whether the thread runs."""
        return self._thread.is_alive()

    @property
    def version(self) -> int:
        """Returns the version of the weights."""
        return self._engine.version

    @property
    def pending(self) -> int:
        """Returns the number of rollouts in the engine."""
        return len(self._live)

    def submit(self, work: Work) -> None:
        """Queues work. Its requests fit the engine."""
        self._orders.put(partial(self._submit, work))

    def cancel(self, work: Work) -> None:
        """Takes the rollouts of work out of the engine. Nothing more is told of it."""
        self._orders.put(partial(self._remove, work))

    def swap(self, params: Any, version: int) -> None:
        """Samples from new weights from the next dispatch on. Running rollouts keep their tokens."""
        self._orders.put(partial(self._swap, params, version))

    # ---- in the thread

    def _run(self, anew: bool = False) -> None:
        with contextlib.ExitStack() as end:
            end.callback(self._ended)
            if anew:
                self._engine.restart()
            self.sound = True
            end.callback(self._tell)
            while self._obey():
                self._step()

    def _obey(self) -> bool:
        """Carries out orders until there is a dispatch to run. Returns False where the thread is to end."""
        while True:
            if not self._engine.pending:
                self._tell()
            try:
                order = self._orders.get(block=not self._engine.pending)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()

    def _submit(self, work: Work) -> None:
        try:
            self._engine.submit(work.requests)
        except ValueError as error:
            self._post([(work, Lost(400, said(error)))])
            return
        for place, request in enumerate(work.requests):
            self._live[request.rollout_id] = work, place
            self._sent[request.rollout_id] = 0

    def _remove(self, work: Work) -> None:
        ids = [request.rollout_id for request in work.requests if request.rollout_id in self._live]
        self._engine.park(ids)
        for name in ids:
            del self._live[name], self._sent[name]

    def _swap(self, params: Any, version: int) -> None:
        self._tell()
        try:
            self._engine.swap(params, version)
        except ValueError as error:
            self._say(f"weights of version {version} are not taken: {error}")

    def _step(self) -> None:
        """Runs a dispatch, and takes over what it settled."""
        finished = self._engine.step()
        if self._finished or self._told:  # no dispatch ran
            self._tell()
        for rollout in finished:
            work, place = self._live.pop(rollout.id)
            self._finished.append((work, place, rollout, self._sent.pop(rollout.id)))
        self._told = self._progress() + self._late()

    def _tell(self) -> None:
        """Tells what the last dispatch settled, once."""
        told = [(work, _piece(place, rollout, sent)) for work, place, rollout, sent in self._finished] + self._told
        self._finished, self._told = [], []
        self._counted(self._engine.metrics())
        if told:
            self._post(told)

    def _progress(self) -> Told:
        """Returns new tokens of running rollouts that are streamed."""
        told: Told = []
        for name, (work, place) in self._live.items():
            if not work.streams:
                continue
            one, sent = self._engine.sequences[name], self._sent[name]
            if one.num_answered > sent:
                columns = (one.column(what)[sent:] for what in ("tokens", "logprobs", "versions"))
                told.append((work, Piece(place, *_lists(columns), None)))
                self._sent[name] = one.num_answered
        return told

    def _late(self) -> Told:
        """Removes work whose deadline is over, and returns that."""
        now = time.monotonic()
        late = {id(work): work for work, _ in self._live.values() if now > work.deadline}
        for work in late.values():
            self._remove(work)
        why = "the deadline of the request is over; ask for fewer tokens, or raise its field timeout"
        return [(work, Lost(408, why)) for work in late.values()]


def _piece(place: int, rollout: Rollout, sent: int) -> Piece:
    columns = (column[sent:] for column in (rollout.tokens, rollout.logprobs, rollout.versions))
    return Piece(place, *_lists(columns), rollout.finish)


def _lists(columns: Any) -> list[list]:
    return [np.asarray(column).tolist() for column in columns]
