"""The thread that owns the devices of a server, and its two kinds of work: requests on the row engine, and calls.

Requests that want the same weights sample together. A call runs alone, while the engine is empty. What comes first begins
first: where work waits that cannot join what runs, nothing more joins it.

Invariant: only this thread touches the devices. What may join is carried out before every dispatch. So a cancelled
rollout is out of its slot when the next dispatch begins, and new weights sample from there on. Work of one owner begins
in the order in which it came, except that a request may pass requests for other weights. When a rollout runs is decided
here; which tokens it has is not.

What a dispatch settled is reported when the next one runs on the device, or at once where none follows. So the event loop
writes its responses while the host has nothing else to do, and does not hold up the dispatch.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.ring.json_text import said
from jaxrl_post.ring.types import Finish, Request, Rollout, RolloutId
from jaxrl_post.serve.schema import Refusal

SERVED = "served"  # the weights of a server that has one policy
_LATE = "the deadline of the request is over; ask for fewer tokens, or raise its field timeout"


class TokenChunk(NamedTuple):
    """New tokens of one rollout of a request. `place`: among its requests. `finish`: None where it goes on."""

    place: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Finish | None


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineRequest:
    """What the engine does for one HTTP request.

    `receive`: takes a TokenChunk, or the Refusal that ends the request, in the thread of the event loop. `streams`: it gets
    chunks after every dispatch, else one for each rollout at its end. `deadline`: time.monotonic(). `prepare`: is called in
    the thread of the devices before the request begins, and may refuse it. `weights`: that it wants. `owner`: who asked.
    """

    requests: Sequence[Request]
    receive: Callable[[TokenChunk | Refusal], object]
    streams: bool = False
    deadline: float = math.inf
    prepare: Callable[[], object] = lambda: None
    weights: Hashable = SERVED
    owner: str = ""


Updates = list[tuple[EngineRequest, TokenChunk | Refusal]]
# A rollout of a request: its place among the request's rollouts, and its tokens that were reported before.
_Settled = tuple[EngineRequest, int, Rollout, int]


class _Order(NamedTuple):
    """What waits for the thread. `weights`: None for what runs alone. `kept`: also where the thread begins anew."""

    run: Callable[[], object]
    weights: Hashable
    owner: str = ""
    kept: bool = False


class DeviceThread:
    """Carries out orders and steps an engine until it is stopped.

    Args:
      post: hands updates to the event loop. It is called once for a dispatch.
      counted: gets the counters of each dispatch (RowHost.metrics).
      say: gets one line where new weights are refused.
      ended: called when the thread ends, also by an error.

    Attributes:
      sound: whether the engine could begin; if not, it cannot begin anew either.
      running: the owner of the call that runs, or ran last. What it changes may be half done where the thread failed.
    """

    def __init__(
        self,
        engine: RowEngine,
        *,
        post: Callable[[Updates], object],
        counted: Callable[[Mapping[str, float]], object],
        say: Callable[[str], object],
        ended: Callable[[], object],
    ):
        self._engine, self._post, self._counted, self._say, self._ended = engine, post, counted, say, ended
        self._changed, self._stopping = threading.Condition(), False
        self._waiting: deque[_Order] = deque()
        self._taken: deque[_Order] = deque()
        self._joined: Hashable = None  # the weights of what runs on the engine
        engine.meanwhile = self._report
        self.running = ""
        self._begin()

    def _begin(self, anew: bool = False) -> None:
        """Makes the thread."""
        self._live: dict[RolloutId, tuple[EngineRequest, int]] = {}
        self._sent: dict[RolloutId, int] = {}
        self._finished: list[_Settled] = []
        self._updates: Updates = []
        self.sound = False
        self._thread = threading.Thread(target=self._run, name="devices", args=(anew,), daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def restart(self) -> None:
        """Begins anew after the thread has ended by an error. Of what waits, only new weights and `kept` calls are kept."""
        self._thread.join()
        with self._changed:
            self._waiting = deque(one for one in (*self._taken, *self._waiting) if one.kept)
            self._taken.clear()
        self._begin(anew=True)
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """Ends the thread behind its present call or dispatch. Returns whether it ended within the seconds."""
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
    def version(self) -> int:
        """Returns the version of the weights."""
        return self._engine.version

    @property
    def pending(self) -> int:
        """Returns the number of rollouts in the engine."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Returns the number of orders that wait."""
        return len(self._waiting)

    def submit(self, request: EngineRequest) -> None:
        """Queues a request."""
        self._queue(_Order(partial(self._submit, request), request.weights, request.owner))

    def cancel(self, request: EngineRequest) -> None:
        """Takes the rollouts of a request out of the engine. Nothing more is reported of it."""
        self._queue(_Order(partial(self._remove, request), request.weights))

    def swap(self, params: Any, version: int) -> None:
        """Samples from new weights from the next dispatch on. Running rollouts keep their tokens."""
        self._queue(_Order(partial(self._swap, params, version), SERVED, kept=True))

    def call(self, run: Callable[[], object], *, owner: str = "", kept: bool = False) -> None:
        """Queues a call that runs alone. `kept`: also where the thread begins anew."""
        self._queue(_Order(run, None, owner, kept))

    def drop(self, owner: str) -> None:
        """Takes what an owner has waiting out of the queue. Nothing is reported of it."""
        with self._changed:
            self._waiting = deque(one for one in self._waiting if one.owner != owner)

    def _queue(self, order: _Order) -> None:
        with self._changed:
            self._waiting.append(order)
            self._changed.notify()

    # ---- in the thread

    def _run(self, anew: bool) -> None:
        with contextlib.ExitStack() as end:
            end.callback(self._ended)
            if anew:
                self._engine.restart()
            self.sound = True
            end.callback(self._report)
            while self._obey():
                self._step()
            self._engine.park(list(self._live))  # a policy may give its engine to another server
            self._live.clear()

    def _obey(self) -> bool:
        """Carries out orders until there is a dispatch to run. Returns False where the thread is to end."""
        while True:
            if not self._engine.pending:
                self._report()
            self._taken.extend(self._next())
            if not self._taken:
                return not self._stopping
            while self._taken:
                order = self._taken.popleft()
                self.running = order.owner if order.weights is None else ""
                order.run()

    def _next(self) -> list[_Order]:
        """Takes what may run now out of the queue. It waits for orders where the engine is empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._waiting or self._engine.pending)
            if self._stopping:
                return []
            if not self._engine.pending:
                first = self._waiting.popleft()
                self._joined = first.weights
                return [first] if first.weights is None else [first, *self._alike()]
            return self._alike() if all(one.weights == self._joined for one in self._waiting) else []

    def _alike(self) -> list[_Order]:
        """Takes orders for the same weights. Those behind a call of their owner stay, as it may replace these weights."""
        found: list[_Order] = []
        left: deque[_Order] = deque()
        held = set()  # owners whose calls wait
        for one in self._waiting:
            (found if one.weights == self._joined and one.owner not in held else left).append(one)
            if one.weights is None:
                held.add(one.owner)
        self._waiting = left
        return found

    def _submit(self, request: EngineRequest) -> None:
        try:
            request.prepare()
            self._engine.submit(request.requests)
        except (Refusal, ValueError) as error:
            self._post([(request, Refusal(said(error)))])
            return
        for place, one in enumerate(request.requests):
            self._live[one.rollout_id] = request, place
            self._sent[one.rollout_id] = 0

    def _remove(self, request: EngineRequest) -> None:
        ids = [one.rollout_id for one in request.requests if one.rollout_id in self._live]
        self._engine.park(ids)
        for name in ids:
            del self._live[name], self._sent[name]

    def _swap(self, params: Any, version: int) -> None:
        self._report()
        try:
            self._engine.swap(params, version)
        except ValueError as error:
            self._say(f"weights of version {version} are not taken: {error}")

    def _step(self) -> None:
        """Runs a dispatch, and takes over what it settled."""
        finished = self._engine.step()
        if self._finished or self._updates:  # no dispatch ran
            self._report()
        for rollout in finished:
            request, place = self._live.pop(rollout.id)
            self._finished.append((request, place, rollout, self._sent.pop(rollout.id)))
        self._updates = self._progress() + self._late()

    def _report(self) -> None:
        """Reports what the last dispatch settled, once."""
        ended = [(request, _last(place, rollout, sent)) for request, place, rollout, sent in self._finished]
        updates = ended + self._updates
        self._finished, self._updates = [], []
        self._counted(self._engine.metrics())
        if updates:
            self._post(updates)

    def _progress(self) -> Updates:
        """Returns new tokens of running rollouts that are streamed."""
        updates: Updates = []
        for name, (request, place) in self._live.items():
            if not request.streams:
                continue
            one, sent = self._engine.sequences[name], self._sent[name]
            if one.num_answered > sent:
                columns = (one.column(what)[sent:] for what in ("tokens", "logprobs", "versions"))
                updates.append((request, TokenChunk(place, *_lists(columns), None)))
                self._sent[name] = one.num_answered
        return updates

    def _late(self) -> Updates:
        """Removes requests whose deadline is over, and returns their ends."""
        now = time.monotonic()
        late = {id(request): request for request, _ in self._live.values() if now > request.deadline}
        for request in late.values():
            self._remove(request)
        return [(request, Refusal(_LATE, status=408)) for request in late.values()]


def _last(place: int, rollout: Rollout, sent: int) -> TokenChunk:
    """Returns the last chunk of a rollout, of which `sent` tokens were reported before."""
    columns = (column[sent:] for column in (rollout.tokens, rollout.logprobs, rollout.versions))
    return TokenChunk(place, *_lists(columns), rollout.finish)


def _lists(columns: Any) -> list[list]:
    return [np.asarray(column).tolist() for column in columns]
