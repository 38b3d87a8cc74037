"""Seconds per phase of the ring, and when a learner with devices of its own works."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from jaxrl_post.types import Rollout


class Stopwatch:
    """Seconds per phase of the ring, under verl's names where it has one: gen, reward, old_log_prob, update_actor,
    update_weights, testing, save_checkpoint, log; of a learner with devices of its own also train, whatever the ring does
    then. What is done within another phase, as chores are within gen, is called overlapped and is a part of that phase. Each
    of `listeners` gets (phase, begun, ended) of every call. `cpu`: CPU seconds of this process."""

    def __init__(self, now: Callable[[], float] = time.perf_counter, cpu: Callable[[], float] = time.process_time):
        self.now, self._begun, self._seconds = now, now(), Counter()
        self._cpu, self._used = cpu, cpu()
        self._within = False
        self.listeners: list[Callable[[str, float, float], object]] = []

    def timing(self, phase: str, call: Callable) -> Callable:
        """`call`, with its seconds added to `phase`."""

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
        """Adds what was not a call."""
        self._seconds[phase] += ended - begun
        for listener in self.listeners:
            listener(phase, begun, ended)

    def drain(self) -> dict[str, float]:
        """Since the last call: timing_s/PHASE of each, timing_s/step, everything together, and how many of the host's cores this
        process kept busy, graders not among it."""
        now, used, seconds = self.now(), self._cpu(), self._seconds
        whole, self._begun, self._seconds = now - self._begun, now, Counter()
        busy, self._used = (used - self._used) / max(whole, 1e-9), used
        return {f"timing_s/{phase}": seconds[phase] for phase in sorted(seconds)} | {
            "timing_s/step": whole,
            "perf/host_cores_busy": busy,
        }


class AtWork:
    """A listener of the ring that looks before and after every dispatch, and after every phase of the stopwatch, whether a learner
    with devices of its own, or lent ones, is at work there: seconds of phase `train`. Work begins and ends in the middle between
    two looks; what ends within update_actor, where the ring waits for it, ends with that."""

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
