"""Writes one row of metrics per optimizer step and the rollout log, and starts evaluations and checkpoints.

Invariant: an observer reads what is trained and never changes it. Metrics have verl's names where verl has one. Names
of timed metrics begin with timing_s/ or perf/. All other metrics are functions of config and code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxrl_post.ring.protocols import Ring, Source
from jaxrl_post.ring.timing import Stopwatch
from jaxrl_post.ring.types import Group, Part
from jaxrl_post.telemetry.alarms import Alarms
from jaxrl_post.telemetry.length_bias import BiasMeter
from jaxrl_post.telemetry.metrics import describe


@dataclass(frozen=True, kw_only=True)
class Begun:
    """Where this start of the run began: its step, and the tokens sampled before."""

    step: int = 0
    tokens: int = 0


@dataclass(kw_only=True, eq=False)
class Observer:
    """Listens to `committed` and `published`: writes rows, and starts evaluations and checkpoints.

    - `ring`: defers logs, and times evaluations and checkpoints.
    - `sources`: parts whose `metrics()` are drained at every commit, for example engine, scheduler, rewards and history.
    - `meter`: the length bias meter, also drained at every commit.
    - `write`: called with (step, row).
    - `log`: writes the rollout log. It is called with (step, groups) for groups that are new to the learner.
    - `evaluate`: called with the version if `when(version before, version)` is true. It writes its own row.
    - `save`: called with the version, last of a publish, if `saved_at(version before, version)` is true.
    - `alarms`: looks at every row before it is written, and adds its own metrics.
    - `dump`: writes the batch of a step whose gradient was not finite. It is called with (step, groups).
    - `warm`: called once, after the first round and its evaluation. From then on nothing may be compiled.
    - `watch`: measures seconds per phase.
    - `devices`: number of devices, for tokens per second and device.
    - `step`, `tokens`: steps so far, and tokens sampled for training.
    """

    ring: Ring
    sources: Sequence[Source]
    meter: BiasMeter
    write: Callable[[int, Mapping], None]
    log: Callable[[int, Sequence[Group]], None]
    evaluate: Callable[[int], None]
    when: Callable[[int, int], bool]
    save: Callable[[int], None]
    saved_at: Callable[[int, int], bool]
    alarms: Alarms
    dump: Callable[[int, Sequence[Group]], None]
    warm: Callable[[], None]
    watch: Stopwatch
    devices: int
    step: int = 0
    tokens: int = 0
    begun: Begun = Begun()
    _waiting: tuple[Mapping, dict, Sequence[Group]] | None = None
    _seconds: dict[str, float] | None = None  # of the waiting row, once its weights are published
    _trained: float = 0.0  # tokens since the last row with seconds
    _generated: float = 0.0  # tokens since then
    _steps: int = 0  # rows since then
    _warmed: bool = False
    _version: int = 0  # last published

    def commit(self, metrics: Mapping[str, Any], part: Part) -> None:
        self.flush()
        self.step += 1
        self.tokens += sum(int(r.sampled.sum()) for group in part.fresh for r in group.rollouts)
        row = {"training/global_step": float(self.step)}
        for source in self.sources:
            row |= source.metrics()
        row |= self.meter.metrics("long" if row.get("sched/num_long_rounds") else "short")
        self._generated += row.get("rows/decode", 0.0) + row.get("spec/num_accepted", 0.0)
        self._waiting = metrics, row, part.groups
        if part.fresh:  # a round's rollouts are logged once, with its first step
            self.ring.later("log", self.log, self.step, part.fresh)

    def published(self, version: int) -> None:
        """Takes the seconds of the step, and evaluates and saves where due.

        The publish has waited for the weights, so reading the metrics of the commit costs no further wait.
        """
        self._seconds = self.watch.drain() if self._waiting else None
        self.ring.later("log", self.flush)
        before, self._version = self._version, version
        evaluated, saved = self.when(before, version), self.saved_at(before, version)
        if evaluated or saved or not self._warmed:
            self.ring.flush()
        if evaluated:
            self.ring.call("testing", self.evaluate, version)
        if saved:
            self.ring.call("save_checkpoint", self.save, version)
        if not self._warmed:
            self._warmed = True
            self.warm()

    def state_dict(self) -> dict:
        """Returns the state for a checkpoint, within `published`."""
        own = {"step": self.step, "tokens": self.tokens, "version": self._version}
        return own | {"alarms": self.alarms.state_dict()}

    def load_state_dict(self, state: Mapping) -> None:
        self.step, self.tokens, self._version = state["step"], state["tokens"], state["version"]
        self.alarms.load_state_dict(state["alarms"])
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
            self.dump(self.step, groups)
        self.write(self.step, row | self.alarms.look(self.step, row) | self._speed())
        self.alarms.check(self.step, row)

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
            "perf/throughput": trained / whole / self.devices,
        }
        if generated:
            out["perf/generated_tokens_per_s"] = generated / max(seconds.get("timing_s/gen", whole), 1e-9)
        self._trained, self._generated, self._steps = 0.0, 0.0, 0
        return seconds | out
