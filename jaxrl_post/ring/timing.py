"""Measures seconds per phase of the ring, and when a learner with devices of its own works."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from jaxrl_post.ring.types import Rollout


class Stopwatch:
    """Measures seconds per phase of the ring.

    Phases have verl's names where verl has one: gen, reward, old_log_prob, update_actor, update_weights, testing,
    save_checkpoint, log. `train` is the work of a learner with its own devices, whatever the ring does at the time. A
    call within another phase, such as deferred work within gen, counts as `overlapped`. Its seconds are also part of
    the outer phase.

    `now`: returns seconds. `cpu`: returns CPU seconds of this process. `listeners`: called with (phase, begun, ended)
    for every call.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter, cpu: Callable[[], float] = time.process_time):
        self.now, self._begun, self._seconds = now, now(), Counter()
        self._cpu, self._used = cpu, cpu()
        self._within = False
        self.listeners: list[Callable[[str, float, float], object]] = []

    def timing(self, phase: str, call: Callable) -> Callable:
        """Returns a function that makes the call and adds its seconds to `phase`."""

        def timed(*arguments):
            begun, outer, self._within = self.now(), self._within, True
            try:
                return call(*arguments)
            finally:
                ended, self._within = self.now(), outer
                self._seconds["overlapped" if outer else phase] += ended - begun
                for listener in self.listeners:
                    listener(phase, begun, ended)

        return timed

    def spent(self, phase: str, begun: float, ended: float) -> None:
        """Adds seconds that were not measured around a call."""
        self._seconds[phase] += ended - begun
        for listener in self.listeners:
            listener(phase, begun, ended)

    def drain(self) -> dict[str, float]:
        """Returns seconds since the last drain: timing_s/PHASE of each phase, and timing_s/step of the whole time.

        perf/host_cores_busy is the number of host cores that this process kept busy, without graders.
        """
        now, used, seconds = self.now(), self._cpu(), self._seconds
        whole, self._begun, self._seconds = now - self._begun, now, Counter()
        busy, self._used = (used - self._used) / max(whole, 1e-9), used
        return {f"timing_s/{phase}": seconds[phase] for phase in sorted(seconds)} | {
            "timing_s/step": whole,
            "perf/host_cores_busy": busy,
        }


class AtWork:
    """A listener of the ring that measures when a learner with its own or lent devices works, as phase `train`.

    It checks before and after every dispatch, and after every phase of the stopwatch. Work starts and ends in the
    middle between two checks. The ring waits for the learner within update_actor, so work that ends there ends with
    that phase.
    """

    def __init__(self, at_work: Callable[[], bool], watch: Stopwatch):
        self._at_work, self._watch = at_work, watch
        self._then, self._was = watch.now(), False
        watch.listeners.append(self.phase)

    def phase(self, name: str, begun: float, ended: float) -> None:
        if name != "train":
            self._look(waited=name == "update_actor")

    def stepping(self, clock: int) -> None:
        self._look()

    def stepped(self, finished: Sequence[Rollout], clock: int) -> None:
        self._look()

    def _look(self, waited: bool = False) -> None:
        then, was, now, is_now = self._then, self._was, self._watch.now(), self._at_work()
        self._then, self._was = now, is_now
        middle = (then + now) / 2
        if was or is_now:
            self._watch.spent("train", then if was else middle, now if is_now or waited else middle)
