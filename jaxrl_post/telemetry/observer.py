"""Writes one row of metrics per optimizer step and the rollout log, and starts evaluations and checkpoints.

Invariant: an observer reads what is trained and never changes it. Metrics have verl's names where verl has one. Names
of timed metrics begin with timing_s/ or perf/. All other metrics are functions of config and code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxrl_post.protocols import Ring, Source
from jaxrl_post.telemetry.alarms import Alarms
from jaxrl_post.telemetry.length_bias import BiasMeter
from jaxrl_post.telemetry.metrics import describe
from jaxrl_post.telemetry.timing import Stopwatch
from jaxrl_post.types import Group, Part


@dataclass(frozen=True, kw_only=True)
class Begun:
    """Where this start of the run began: its step, and the tokens sampled before."""

    step: int = 0
    tokens: int = 0


class Observer:
    """Listens to `committed` and `published`: writes rows, and starts evaluations and checkpoints.

    Args:
      ring: defers logs, and times evaluations and checkpoints.
      sources: parts whose `metrics()` are drained at every commit, for example engine, scheduler, rewards and history.
      meter: the length bias meter, also drained at every commit.
      write: called with (step, row).
      log: writes the rollout log. It is called with (step, groups) for groups that are new to the learner.
      evaluate: called with the version if `when(version before, version)` is true. It writes its own row.
      save: called with the version, last of a publish, if `saved_at(version before, version)` is true.
      alarms: looks at every row before it is written, and adds its own metrics.
      dump: writes the batch of a step whose gradient was not finite. It is called with (step, groups).
      warm: called once, after the first round and its evaluation. From then on nothing may be compiled.
      watch: measures seconds per phase.
      devices: number of devices, for tokens per second and device.
    """

    def __init__(
        self,
        *,
        ring: Ring,
        sources: Sequence[Source],
        meter: BiasMeter,
        write: Callable[[int, Mapping], None],
        log: Callable[[int, Sequence[Group]], None],
        evaluate: Callable[[int], None],
        when: Callable[[int, int], bool],
        save: Callable[[int], None],
        saved_at: Callable[[int, int], bool],
        alarms: Alarms,
        dump: Callable[[int, Sequence[Group]], None],
        warm: Callable[[], None],
        watch: Stopwatch,
        devices: int,
    ):
        self._ring, self._sources, self._meter = ring, sources, meter
        self._write, self._log = write, log
        self._evaluate, self._when, self._warm = evaluate, when, warm
        self._save, self._saved_at = save, saved_at
        self._alarms, self._dump = alarms, dump
        self._watch, self._devices = watch, devices
        self._waiting: tuple[Mapping, dict, Sequence[Group]] | None = None
        self._seconds: dict[str, float] | None = None  # of the waiting row, once its weights are published
        self._trained, self._generated, self._steps = (
            0.0,
            0.0,
            0,
        )  # trained tokens, generated tokens and rows since the last row with seconds
        self._warmed = False
        self._version = 0  # last published
        self.step = 0
        self.tokens = 0  # tokens sampled for training so far
        self.begun = Begun()

    def commit(self, metrics: Mapping[str, Any], part: Part) -> None:
        self.flush()
        self.step += 1
        self.tokens += sum(int(r.sampled.sum()) for group in part.fresh for r in group.rollouts)
        row = {"training/global_step": float(self.step)}
        for source in self._sources:
            row |= source.metrics()
        row |= self._meter.metrics("long" if row.get("sched/num_long_rounds") else "short")
        self._generated += row.get("rows/decode", 0.0) + row.get("spec/num_accepted", 0.0)
        self._waiting = metrics, row, part.groups
        if part.fresh:  # a round's rollouts are logged once, with its first step
            self._ring.later("log", self._log, self.step, part.fresh)

    def published(self, version: int) -> None:
        """Takes the seconds of the step, and evaluates and saves where due.

        The publish has waited for the weights, so reading the metrics of the commit costs no further wait.
        """
        self._seconds = self._watch.drain() if self._waiting else None
        self._ring.later("log", self.flush)
        before, self._version = self._version, version
        evaluated, saved = self._when(before, version), self._saved_at(before, version)
        if evaluated or saved or not self._warmed:
            self._ring.flush()
        if evaluated:
            self._ring.call("testing", self._evaluate, version)
        if saved:
            self._ring.call("save_checkpoint", self._save, version)
        if not self._warmed:
            self._warmed = True
            self._warm()

    def state_dict(self) -> dict:
        """Returns the state for a checkpoint, within `published`."""
        own = {"step": self.step, "tokens": self.tokens, "version": self._version}
        return own | {"alarms": self._alarms.state_dict()}

    def load_state_dict(self, state: Mapping) -> None:
        self.step, self.tokens, self._version = state["step"], state["tokens"], state["version"]
        self._alarms.load_state_dict(state["alarms"])
        self.begun = Begun(step=self.step, tokens=self.tokens)

    def flush(self) -> None:
        """Writes the row of the last commit, if not written yet."""
        if self._waiting is None:
            return
        metrics, row, groups = self._waiting
        self._waiting = None
        row |= describe(groups, self.step - 1)
        row |= {name: float(value) for name, value in jax.device_get(dict(metrics)).items()}
        self._trained, self._steps = self._trained + row.get("rollout/num_tokens", 0.0), self._steps + 1
        if row.get("training/skip_reason") == 2.0:
            self._dump(self.step, groups)
        self._write(self.step, row | self._alarms.look(self.step, row) | self._speed())
        self._alarms.check(self.step, row)

    def _speed(self) -> dict[str, float]:
        """Returns timed metrics since the publish before, for the row of the commit that is published now.

        A commit without a publish has no seconds of its own, because its work on the device ends after the next commit
        began. Its row has no timed metrics. Its tokens count in the next row that has them.
        """
        if self._seconds is None:
            return {}
        seconds, self._seconds = self._seconds, None
        whole, trained, generated = seconds["timing_s/step"], self._trained, self._generated
        out = {
            "perf/time_per_step": whole / self._steps,
            "perf/total_num_tokens": trained,
            "perf/throughput": trained / whole / self._devices,
        }
        if generated:
            out["perf/generated_tokens_per_s"] = generated / max(seconds.get("timing_s/gen", whole), 1e-9)
        self._trained, self._generated, self._steps = 0.0, 0.0, 0
        return seconds | out
