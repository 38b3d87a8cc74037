"""Draws a timeline of the ring for ui.perfetto.dev: slots, replicas, learner, reward, swap.

The file is an array of events in the Trace Event Format, which Perfetto documents as "Chrome JSON". Events are spans
("X"), counters ("C") and names ("M"), with times in microseconds. Process "ring" has a thread for each part and one
for rounds. Process "replica N" has a thread for each slot and a counter of running rollouts.

Invariant: spans of one thread never overlap.

- Within a dispatch only engine steps are known, so their times are spread evenly.
- A rollout is drawn in the lowest free slot of the replica that it was submitted to. It stays there if the engine
  moves it to another replica (thread "layout").
- `now` gives seconds, of the wall clock or of a simulation.
- The file refuses events after it was closed. Only `close` makes it complete.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxrl_post.ring.types import Request, Rollout, RolloutId

RING = "ring"
THREADS = {
    "reward": "reward",
    "old_log_prob": "learner",
    "update_actor": "learner",
    "update_weights": "swap",
    "train": "learner's devices",
    "relayout": "layout",
    "testing": "evaluation",
    "save_checkpoint": "checkpoint",
}  # phase of the stopwatch -> thread
NEAR_S = 1e-3  # spans of one phase that are closer than this are joined


class TraceFile:
    """Writes events as they come. `write` receives pieces of text. Times are seconds, none before `origin`.

    A write that fails closes the trace, so that the end of a run does not write to it again.
    """

    def __init__(self, write: Callable[[str], object], origin: float = 0.0):
        self._write, self._origin = write, origin
        self._tracks: dict[tuple[str, str], tuple[int, int]] = {}
        self._open, self._empty = True, True

    @property
    def closed(self) -> bool:
        return not self._open

    def span(self, process: str, thread: str, name: str, start: float, end: float, **about) -> None:
        """Writes a span of time. `about` holds its arguments."""
        pid, tid = self._track(process, thread)
        self._event(
            ph="X",
            name=name,
            pid=pid,
            tid=tid,
            ts=self._us(start),
            dur=max(self._us(end) - self._us(start), 0),
            cat=process,
            args=about,
        )

    def counter(self, process: str, name: str, at: float, value: float) -> None:
        """Writes the value of a counter from `at` on."""
        self._event(ph="C", name=name, pid=self._track(process, "")[0], ts=self._us(at), args={"value": value})

    def close(self) -> None:
        """Ends the file. A second call does nothing."""
        if self._open:
            self._put("[]\n" if self._empty else "\n]\n")
        self._open = False

    def _track(self, process: str, thread: str) -> tuple[int, int]:
        """Returns the numbers of a process and its thread. Writes their names the first time."""
        if (process, "") not in self._tracks:
            pid = 1 + sum(not name for _, name in self._tracks)
            self._tracks[process, ""] = pid, 0
            self._event(ph="M", name="process_name", pid=pid, args={"name": process})
            self._event(ph="M", name="process_sort_index", pid=pid, args={"sort_index": pid})
        pid = self._tracks[process, ""][0]
        if (process, thread) not in self._tracks:
            tid = sum(name == process for name, _ in self._tracks)
            self._tracks[process, thread] = pid, tid
            self._event(ph="M", name="thread_name", pid=pid, tid=tid, args={"name": thread})
            self._event(ph="M", name="thread_sort_index", pid=pid, tid=tid, args={"sort_index": tid})
        return self._tracks[process, thread]

    def _us(self, seconds: float) -> float:
        return round(1e6 * (seconds - self._origin), 3)

    def _event(self, **fields) -> None:
        assert self._open, "the trace is closed"
        self._put(("[\n" if self._empty else ",\n") + json.dumps(fields, separators=(",", ":")))
        self._empty = False

    def _put(self, text: str) -> None:
        try:
            self._write(text)
        except OSError:
            self._open = False
            raise


@dataclass(slots=True)
class _Life:
    """One stay of a request in the engine. `start` is None if the time at which it took its slot is unknown.

    Such a stay is drawn from the time at which the request came, or later, once a slot is free.
    """

    order: int
    replica: int
    came: float
    again: bool
    start: float | None = None
    end: float = 0.0
    about: tuple = ()


class RingTrace:
    """A listener of the ring and of the stopwatch that draws `rounds` rounds.

    Args:
      write: receives pieces of the file.
      now: returns seconds of the stopwatch's clock.
      slots: slots of one replica.
      rounds: rounds to draw.
    """

    def __init__(self, write: Callable[[str], object], now: Callable[[], float], *, slots: int, rounds: int):
        self._now, self._slots, self._left = now, slots, rounds
        self._round_began = self._stepping = now()
        self._file = TraceFile(write, self._round_began)
        self._order = self._began_at = 0
        self._in: dict[RolloutId, _Life] = {}
        self._done: list[tuple[RolloutId, _Life]] = []
        self._dispatches: list[tuple[int, int, float, float]] = []  # clock before and after, begun, ended
        self._lanes: dict[int, list[float]] = {}  # replica -> when each slot is free
        self._pending: dict[str, tuple[str, float, float]] = {}  # thread -> phase, begun, ended

    @property
    def closed(self) -> bool:
        return self._left <= 0 or self._file.closed

    def phase(self, name: str, begun: float, ended: float) -> None:
        """Draws a phase of the stopwatch. Close spans are joined. Generation is drawn dispatch by dispatch instead."""
        thread = THREADS.get(name)
        if self.closed or thread is None or ended <= begun:
            return
        before, start, last = self._pending.get(thread, (name, begun, begun))
        if before != name or begun - last > NEAR_S:
            self._file.span(RING, thread, before, start, last)
            start = begun
        self._pending[thread] = name, start, ended

    def launched(self, requests: Sequence[Request], clock: int, version: int) -> None:
        for request in requests:
            self._order += 1
            self._in[request.rollout_id] = _Life(self._order, request.replica, self._now(), request.prefix is not None)
        if not self.closed:
            self._file.counter(RING, "requests in the engine", self._now(), len(self._in))

    def stepping(self, clock: int) -> None:
        self._began_at, self._stepping = clock, self._now()

    def stepped(self, finished: Sequence[Rollout], clock: int) -> None:
        ended = self._now()
        if clock > self._began_at and not self.closed:
            self._dispatches.append((self._began_at, clock, self._stepping, ended))
            self._file.span(
                RING,
                "engine",
                f"{clock - self._began_at} steps",
                self._stepping,
                ended,
                clock=clock,
                finished=len(finished),
            )
        for rollout in finished:
            self._leaves(rollout, self._time(rollout.finish_clock, ended))
        if finished and not self.closed:
            self._file.counter(RING, "requests in the engine", ended, len(self._in))

    def stopped(self, rollouts: Sequence[Rollout], clock: int, version: int) -> None:
        for rollout in rollouts:
            self._leaves(rollout, self._now())

    def published(self, version: int) -> None:
        """Ends a round and draws its slots."""
        if self.closed:
            return
        now = self._now()
        self._file.span(RING, "round", f"round to version {version}", self._round_began, now)
        self._file.counter(RING, "version", now, version)
        self._round_began = now
        self._flush()
        self._left -= 1
        if self.closed:
            self._file.close()

    def close(self) -> None:
        """Draws the rest of an unfinished round and ends the file."""
        if not self.closed:
            self._flush()
            self._file.close()
        self._left = 0

    # ---- slots

    def _leaves(self, rollout: Rollout, end: float) -> None:
        life = self._in.pop(rollout.id, None)
        if life is None or self.closed:  # it entered before the trace began, or the trace is closed
            return
        life.end = end
        life.start = None if life.again else self._time_of_start(rollout.start_clock, life.came)
        versions = rollout.versions[rollout.sampled]
        life.about = (
            ("tokens", len(rollout)),
            ("finish", rollout.finish.value),
            ("versions", sorted({int(v) for v in versions[[0, -1]]}) if versions.size else []),
        )
        self._done.append((rollout.id, life))

    def _time(self, clock: int, otherwise: float) -> float:
        """Returns when an engine step ended, within its dispatch. `otherwise`: the clock belongs to no dispatch."""
        at = bisect_left(self._dispatches, clock, key=lambda dispatch: dispatch[1])
        if at == len(self._dispatches) or clock <= self._dispatches[at][0]:
            return otherwise
        before, after, begun, ended = self._dispatches[at]
        return begun + (ended - begun) * (clock - before) / (after - before)

    def _time_of_start(self, clock: int, otherwise: float) -> float:
        """Returns when the first dispatch at or after this clock began. `otherwise`: there is none."""
        at = bisect_left(self._dispatches, clock, key=lambda dispatch: dispatch[0])
        return self._dispatches[at][2] if at < len(self._dispatches) else otherwise

    def _flush(self) -> None:
        """Writes the pending phases and stays. Each stay goes to the lowest slot that was free."""
        for thread, (phase, begun, ended) in self._pending.items():
            self._file.span(RING, thread, phase, begun, ended)
        self._pending = {}
        changes: dict[int, list[tuple[float, int]]] = {}
        came = {id(life): life.came if life.start is None else life.start for _, life in self._done}
        for name, life in sorted(self._done, key=lambda one: (came[id(one[1])], one[1].order)):
            slot, start = self._seat(life, came[id(life)])
            if life.end <= start:
                continue
            self._lanes[life.replica][slot] = life.end
            self._file.span(
                f"replica {life.replica}",
                f"slot {slot:03d}",
                f"{name.prompt_id} #{name.sample}",
                start,
                life.end,
                epoch=name.epoch,
                attempt=name.attempt,
                again=life.again,
                **dict(life.about),
            )
            changes.setdefault(life.replica, []).extend([(start, 1), (life.end, -1)])
        for replica, steps in sorted(changes.items()):
            self._running(replica, sorted(steps))
        self._done, self._dispatches = [], self._dispatches if self._in else []

    def _seat(self, life: _Life, earliest: float) -> tuple[int, float]:
        lanes = self._lanes.setdefault(life.replica, [])
        free = next((slot for slot, at in enumerate(lanes) if at <= earliest + 1e-9), None)
        if free is None and len(lanes) < self._slots:
            lanes.append(earliest)
            free = len(lanes) - 1
        if free is None:
            free = min(range(len(lanes)), key=lambda slot: lanes[slot])
        return free, max(earliest, lanes[free])

    def _running(self, replica: int, steps: list[tuple[float, int]]) -> None:
        running = 0
        for index, (at, change) in enumerate(steps):
            running += change
            if index + 1 == len(steps) or steps[index + 1][0] > at:
                self._file.counter(f"replica {replica}", "running", at, running)
