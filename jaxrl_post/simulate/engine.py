"""A simulated engine: rollouts of known length advance in slots, and the clock jumps to the next event.

Invariant: the tokens of a rollout depend only on (seed, versions) (see `simulate/texts.py`). Slots, replicas and KV
memory affect only when a rollout finishes.

- An event is a finished rollout, or a replica whose KV cache is full.
- Events at the same clock form one step. A step returns its rollouts ordered by id.
- Evaluation requests are refused, because a simulation evaluates nothing.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxrl_post.engine.host.turns import AroundEngine
from jaxrl_post.ring.types import Capacity, Finish, Layout, Request, Rollout, RolloutId, frozen
from jaxrl_post.simulate.pace import Pace
from jaxrl_post.simulate.texts import SimText, SimTexts, Spans, agreement, pieces, spans_of

_NEAR = 1e-6  # tokens; tolerance for progress, which is a sum of floats
_ENDLESS = 1 << 53


class _Live:
    """A request in the engine.

    A replica's progress counts the tokens that each of its running rollouts has gained since the start. When the
    request took its slot, it had `done` tokens and the progress was `origin`.
    """

    __slots__ = ("request", "order", "here", "running", "spans", "text", "done", "origin", "start_clock", "entry")

    def __init__(self, request: Request, order: int):
        self.request, self.order = request, order
        self.here, self.running = True, False
        self.spans: Spans = ()
        self.text: SimText | None = None
        self.done, self.origin, self.start_clock = 0, 0.0, -1
        self.entry = 0  # number of its valid entry in the replica's heap; 0: no entry


class _Replica:
    """The queue and the running rollouts of one replica.

    `finishes` is a heap of (progress at which the rollout finishes, order, entry, live). An entry is outdated if its
    number differs from `live.entry`. Outdated entries are removed when they reach the top.
    """

    def __init__(self):
        self.finishes: list[tuple[float, int, int, _Live]] = []
        self.waiting: deque[_Live] = deque()
        self._entries = 0

    def expect(self, live: _Live) -> None:
        """Enters the progress at which the rollout finishes. The rollout's earlier entry becomes outdated."""
        self._entries += 1
        live.entry = self._entries
        heapq.heappush(self.finishes, (live.origin + live.text.length - live.done, live.order, live.entry, live))

    def first(self) -> float:
        """Returns the progress at which the next rollout finishes, or infinity if none runs."""
        while self.finishes and self.finishes[0][3].entry != self.finishes[0][2]:
            heapq.heappop(self.finishes)
        return self.finishes[0][0] if self.finishes else math.inf

    def running(self) -> list[_Live]:
        return [live for _, _, entry, live in self.finishes if live.entry == entry]


class SimEngine:
    """A protocols.Engine without a device. It has no state_dict, because simulations are not resumed.

    A page of `capacity` is one token. `seconds` is the duration of all steps so far, by the cost of `pace`.

    Args:
      `texts`: draws the texts of rollouts.
      replicas: number of replicas.
      slots: slots of each replica.
      pace: speed and cost of engine steps.
      kv_tokens: size of a replica's KV cache in tokens, prompts included. When the KV cache is full, the youngest
        rollout is preempted and re-enters with its tokens forced. None: the KV cache is never full.
      version: version of the first weights.
    """

    def __init__(
        self, texts: SimTexts, *, replicas: int, slots: int, pace: Pace, kv_tokens: int | None = None, version: int = 0
    ):
        if replicas < 1 or slots < 1:
            raise ValueError(
                f"simulated engine: {replicas} replicas of {slots} slots; there must be at least 1 of at least 1"
            )
        self.texts, self._slots, self._pace = texts, slots, pace
        self._kv_tokens = math.inf if kv_tokens is None else kv_tokens
        self._replicas = [_Replica() for _ in range(replicas)]
        self._lives: dict[RolloutId, _Live] = {}
        self._running, self._waiting = np.zeros((2, replicas), np.int64)
        self._context, self._progress, self._rate, self._forced = (np.zeros(replicas) for _ in range(4))
        self._free_at = np.zeros(replicas)  # clock until which a replica prefills
        self._due = np.full(replicas, np.inf)  # clock of each replica's next event
        self._clock, self._version, self._order = 0, version, 0
        self._counts: Counter[str] = Counter()
        self.seconds = 0.0
        # Rollouts hold views of these arrays.
        self._zeros = frozen(np.zeros(texts.cap, np.float32))
        self._ones, self._none = frozen(np.ones(texts.cap, bool)), frozen(np.zeros(texts.cap, bool))

    @property
    def capacity(self) -> Capacity:
        free = np.maximum(self._slots - self._running - self._waiting, 0)
        pages = np.clip(self._kv_tokens - self._context, 0, _ENDLESS).astype(np.int64)
        return Capacity(slots=tuple(free.tolist()), pages=tuple(pages.tolist()))

    @property
    def clock(self) -> int:
        return self._clock

    @property
    def version(self) -> int:
        return self._version

    @property
    def pending(self) -> int:
        return len(self._lives)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests. Free slots are filled at once, in order of submission.

        Raises:
          ValueError: an evaluation request, an id that is already in the engine, or an unknown replica. Also
            `max_tokens` below the workload's cap, or a rollout that can outgrow a replica's KV cache.
        """
        for request in requests:
            self._check(request)
        touched = set()
        for request in requests:
            self._lives[request.rollout_id] = live = _Live(request, self._order)
            self._order += 1
            self._replicas[request.replica].waiting.append(live)
            self._waiting[request.replica] += 1
            touched.add(request.replica)
        self._settle(touched)

    def _check(self, request: Request) -> None:
        name, most = request.rollout_id, request.prompt.tokens.size + request.max_tokens
        for wrong, sentence in (
            (request.purpose == "eval", "is of evaluation: the simulator only trains and judges"),
            (name in self._lives, "is already in the engine"),
            (
                not 0 <= request.replica < len(self._replicas),
                f"wants replica {request.replica} of {len(self._replicas)}",
            ),
            (
                request.max_tokens < self.texts.cap,
                f"may have {request.max_tokens} tokens, but rollouts of this workload "
                f"have up to {self.texts.cap}; give at least that many",
            ),
            (most > self._kv_tokens, f"may need {most} tokens of KV, a replica has {self._kv_tokens}"),
        ):
            if wrong:
                raise ValueError(f"request {name} {sentence}")

    def park(self, ids: Iterable[RolloutId]) -> list[Rollout]:
        """Returns the rollouts with their tokens so far. A rollout that never had a slot has its prefix."""
        out, touched = [], set()
        for live in self._here(ids):
            out.append(self._rollout(live, self._written(live), Finish.PARKED))
            touched.add(live.request.replica)
            self._leave(live)
        self._settle(touched)
        self._counts["num_parked"] += len(out)
        return sorted(out, key=lambda rollout: rollout.id)

    def _here(self, ids: Iterable[RolloutId]) -> list[_Live]:
        return [self._lives[name] for name in dict.fromkeys(ids) if name in self._lives]

    def _written(self, live: _Live) -> int:
        """Returns the number of tokens that the rollout has now."""
        if not live.running:
            return live.done
        got = self._progress[live.request.replica] - live.origin
        return min(live.done + int(got + _NEAR), live.text.length)

    def _leave(self, live: _Live) -> None:
        del self._lives[live.request.rollout_id]
        self._unseat(live)
        live.here = False

    def _unseat(self, live: _Live) -> None:
        at = live.request.replica
        if live.running:
            self._running[at] -= 1
            self._context[at] -= live.request.prompt.tokens.size + live.done + self._progress[at] - live.origin
            self._counts["num_tokens_generated"] += self._written(live) - live.done
        else:
            self._waiting[at] -= 1
        live.running, live.entry = False, 0

    def _settle(self, touched: Iterable[int]) -> None:
        """Fills free slots of these replicas and computes the clocks of their next events."""
        replicas = np.array(sorted(touched), np.int64)
        if replicas.size == 0:
            return
        left = np.array([self._next(at) for at in replicas.tolist()])
        running, context = self._running[replicas], self._context[replicas]
        busy = running > 0
        safe = np.where(busy, left, 1.0)
        rate = self._pace.rates(np.maximum(running, 1), context, safe)
        room = np.where(busy, (self._kv_tokens - context) / np.maximum(running, 1), np.inf)
        units = np.ceil(np.minimum(safe, np.maximum(room, 0.0)) / rate - _NEAR)
        start = np.maximum(self._free_at[replicas], self._clock)
        self._rate[replicas] = np.where(busy, rate, 0.0)
        self._due[replicas] = np.where(busy, np.maximum(np.ceil(start + units), self._clock + 1), np.inf)

    def _next(self, at: int) -> float:
        """Fills a replica's free slots. Returns the number of tokens until its next rollout finishes."""
        replica = self._replicas[at]
        while replica.waiting and self._running[at] < self._slots and self._seat(at, replica):
            pass
        return max(replica.first() - self._progress[at], 0.0)

    def _seat(self, at: int, replica: _Replica) -> bool:
        """Gives a slot to the first waiting request if the KV cache has space. Returns whether to try the next."""
        live = replica.waiting[0]
        if not live.here:
            replica.waiting.popleft()
            return True
        prefix = 0 if live.request.prefix is None else len(live.request.prefix)
        forced = live.request.prompt.tokens.size + max(prefix, live.done)
        if self._running[at] and self._context[at] + forced + self._running[at] >= self._kv_tokens:
            return False  # without one more token for each, this rollout would be preempted at once
        replica.waiting.popleft()
        self._waiting[at] -= 1
        self._begin(live)
        self._counts["num_tokens_forced"] += forced
        self._forced[at] += forced
        self._free_at[at] = max(self._free_at[at], self._clock) + self._pace.stall(forced)
        live.running, live.origin = True, float(self._progress[at])
        self._running[at] += 1
        self._context[at] += live.request.prompt.tokens.size + live.done
        replica.expect(live)
        return True

    def _begin(self, live: _Live) -> None:
        """Finds the text of a rollout that takes its slot. The version in use decides how much of a prefix is kept."""
        request, now = live.request, ((0, self._version),)
        if live.start_clock < 0:
            live.start_clock = self._clock
            kept = request.prefix if request.prefix is not None and request.prefix_mode != "restart" else None
            if kept is not None and request.prefix_mode == "recompute":
                live.spans, live.done = spans_of(kept.versions), len(kept)
            elif kept is not None:
                live.done = agreement(kept.tokens, self.texts.path(request.rollout_id, request.prompt, now))
            before = len(kept) if kept is not None else 0
            self._counts["num_tokens_reused"] += live.done
            self._counts["num_tokens_rejected"] += before - live.done
            if request.prefix is not None and kept is None:
                self._counts["num_tokens_restarted"] += len(request.prefix)
        self._carry(live, live.done)

    def _carry(self, live: _Live, written: int) -> None:
        """Makes the current version sample the rollout's tokens from position `written` on."""
        if written == 0 or not live.spans:
            live.spans = ((0, self._version),)
        elif live.spans[-1][1] != self._version:
            live.spans = (*live.spans, (written, self._version))
        if live.text is None or not self.texts.frozen:
            live.text = self.texts.path(live.request.rollout_id, live.request.prompt, live.spans)

    def step(self) -> list[Rollout]:
        """Advances to the next event and returns the finished rollouts. Returns [] if no rollout runs."""
        clock = float(self._due.min())
        if clock == math.inf:
            return []
        self._advance(int(clock))
        touched = np.flatnonzero(self._due <= clock).tolist()
        done = [live for at in touched for live in self._finished(at)]
        out = [
            self._rollout(live, live.text.length, Finish.EOS if live.text.length < self.texts.cap else Finish.LENGTH)
            for live in done
        ]
        for live in done:
            self._leave(live)
        self._settle(touched)
        return sorted(out, key=lambda rollout: rollout.id)

    def _advance(self, clock: int) -> None:
        units = clock - np.maximum(self._free_at, self._clock)
        gained = self._rate * np.maximum(units, 0.0)
        growth = self._running * gained
        self.seconds += self._pace.seconds(self._running, self._context + growth / 2, clock - self._clock, self._forced)
        self._progress += gained
        self._context += growth
        self._forced[:] = 0.0
        self._clock = clock

    def _finished(self, at: int) -> list[_Live]:
        """Returns a replica's finished rollouts. If none finished and the KV cache is full, preempts the youngest."""
        replica, out = self._replicas[at], []
        while replica.first() <= self._progress[at] + _NEAR:
            out.append(heapq.heappop(replica.finishes)[3])
        if not out and self._running[at] > 1 and self._context[at] + self._running[at] > self._kv_tokens:
            self._preempt(at, replica)
        return out

    def _preempt(self, at: int, replica: _Replica) -> None:
        live = max(replica.running(), key=lambda one: one.order)
        written = self._written(live)
        self._unseat(live)
        live.done = written
        replica.waiting.appendleft(live)
        self._waiting[at] += 1
        self._counts["num_preempted"] += 1

    def _rollout(self, live: _Live, count: int, finish: Finish) -> Rollout:
        """Returns the rollout with its first `count` tokens. Log-probs and entropies are not simulated and equal 0."""
        if live.text is None:
            return self._untouched(live, finish)
        starts, versions = zip(*live.spans)
        zeros = self._zeros[:count]
        return Rollout(
            id=live.request.rollout_id,
            prompt=live.request.prompt,
            tokens=frozen(live.text.tokens(count)),
            sampled=self._ones[:count],
            logprobs=zeros,
            entropies=zeros,
            drafted=self._none[:count],
            versions=frozen(pieces(starts, versions, count)),
            finish=finish,
            start_clock=live.start_clock,
            finish_clock=self._clock,
        )

    def _untouched(self, live: _Live, finish: Finish) -> Rollout:
        """Returns a rollout that never had a slot. It has the tokens of its prefix, or none."""
        request, now = live.request, dict(start_clock=self._clock, finish_clock=self._clock, finish=finish)
        had = request.prefix
        if had is None:
            had = Rollout.written(request.rollout_id, request.prompt, np.zeros(0), finish)
        return replace(had, id=request.rollout_id, prompt=request.prompt, argmax_tokens=None, clocks=None, **now)

    def swap(self, params: object, version: int, finite: object = None) -> None:
        """Starts to use `version` and ignores `params` and `finite`.

        Running rollouts keep their tokens and sample further ones from the new version.
        """
        if version <= self._version:
            raise ValueError(f"swap: version {version} must be greater than the current {self._version}")
        self._version = version
        running = [live for live in self._lives.values() if live.running]
        for live in running:
            self._carry_over(live)
        self._settle({live.request.replica for live in running})

    def _carry_over(self, live: _Live) -> None:
        length = live.text.length
        self._carry(live, self._written(live))
        if live.text.length != length:
            self._replicas[live.request.replica].expect(live)

    def relayout(self, layout: Layout) -> None:
        if layout.replicas != len(self._replicas):
            raise ValueError(
                f"simulated engine: {layout} was asked for, it has {len(self._replicas)} replicas (SimElastic "
                "has several layouts)"
            )

    def take_over(self, other: SimEngine, seconds: float) -> None:
        """Continues clock, version and counters of an idle engine with another layout, `seconds` later."""
        assert not self._lives and not other._lives, "rollouts are running or waiting"
        self._clock, self._version, self._order = other._clock, other._version, other._order
        self._counts, self.seconds = other._counts, other.seconds + seconds
        self._free_at[:] = self._clock

    def metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        return {f"sim/{name}": float(counts[name]) for name in _COUNTERS}


_COUNTERS = (
    "num_tokens_generated",
    "num_tokens_forced",
    "num_tokens_reused",
    "num_tokens_rejected",
    "num_tokens_restarted",
    "num_parked",
    "num_preempted",
)


class SimElastic(AroundEngine):
    """A protocols.Engine over one engine per layout. It starts with the first.

    Clock, version, seconds and counters continue over a relayout, which is refused while rollouts are running or waiting.

    `move_s`: seconds of a relayout.
    """

    def __init__(self, engines: Mapping[Layout, SimEngine], *, move_s: float = 0.0):
        self._engines, self._move_s = dict(engines), move_s
        self.layout = next(iter(engines))
        self._relayouts = 0

    @property
    def _engine(self) -> SimEngine:
        return self._engines[self.layout]

    @property
    def seconds(self) -> float:
        """Returns the simulated seconds since the start."""
        return self._engine.seconds

    @property
    def texts(self) -> SimTexts:
        """Returns the source of lengths and tokens."""
        return self._engine.texts

    def relayout(self, layout: Layout) -> None:
        if layout == self.layout:
            return
        if layout not in self._engines:
            raise ValueError(
                f"simulated engine: {layout} was asked for, there are {', '.join(map(str, self._engines))}"
            )
        if self.pending:
            raise ValueError(
                f"simulated engine: {self.pending} rollouts are running; it changes between two rounds only"
            )
        self._engines[layout].take_over(self._engines[self.layout], self._move_s)
        self.layout, self._relayouts = layout, self._relayouts + 1

    def metrics(self) -> dict[str, float]:
        relayouts, self._relayouts = self._relayouts, 0
        return self._engine.metrics() | {"sim/num_relayouts": float(relayouts), "sim/tensor": float(self.layout.tensor)}
