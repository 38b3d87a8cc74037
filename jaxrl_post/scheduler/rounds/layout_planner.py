"""Chooses the engine's layout for each round, from forecasts of the last rounds in every layout.

RollPacker's parallelism planner (arXiv 2509.21009, section 4.2) doubles tensor parallelism when preemptions rise by
more than 1.05x. It halves tensor parallelism after four rounds without preemptions. Its paper and its code disagree on
which rounds gain. This planner replays the lengths of a round in every layout, with the step cost and the KV capacity
of its replicas. It applies the same hysteresis to the predicted seconds.

Invariant: a plan follows from lengths and cost tables alone, so every process of a job plans the same. The layout
changes between rounds only. Each replica has its own devices, slots and pages. So a layout also changes device time
where one program runs all replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from jaxrl_post.ring.types import Layout, Part, Rollout, Stop
from jaxrl_post.scheduler.forecast import ReplicaCapacity, replay, share
from jaxrl_post.scheduler.rounds.around import AroundScheduler, RoundScheduler

GAIN = 1.05  # speed-up that a layout must reach
QUIET = 4  # rounds in a row that must agree before replicas get fewer devices


class Planner(AroundScheduler):
    """Chooses a layout for each round of the scheduler inside.

    More devices per replica are chosen as soon as the last round of a kind would have gained. Fewer devices are chosen
    when the last `quiet` rounds of that kind agree.

    Args:
      scheduler: the scheduler to wrap.
      replicas: the replica of each layout. The engine starts in the first layout.
      move_s: seconds of a relayout. A round must gain more than this.
      gain: how many times faster a layout must be.
      quiet: rounds in a row that must agree before replicas get fewer devices.
    """

    def __init__(
        self,
        scheduler: RoundScheduler,
        replicas: Mapping[Layout, ReplicaCapacity],
        *,
        move_s: float = 0.0,
        gain: float = GAIN,
        quiet: int = QUIET,
    ):
        super().__init__(scheduler)
        self._replicas = dict(replicas)
        self._move_s, self._gain, self._quiet = move_s, gain, quiet
        self._layout = next(iter(replicas))
        self._work: list[tuple[int, int]] = []  # prompt and rollout tokens of this round, in order of completion
        self._now = ""  # kind of this round
        self._better: dict[str, list] = {}  # kind -> fastest layout, rounds in a row
        self._fresh = True  # whether this round has admitted nothing yet
        self._counts: Counter[str] = Counter()

    def __str__(self) -> str:
        return f"{self._inside}, {self._layout}"

    def layout(self) -> Layout:
        """Returns the layout of the round. It is chosen before the first request of the round."""
        if self._fresh:
            self._fresh, self._now = False, self.next_kind()
            best, rounds = self._better.get(self._now, (self._layout, 0))
            if best != self._layout and rounds >= (1 if best.tensor > self._layout.tensor else self._quiet):
                self._layout = best
                self._counts["num_layout_changes"] += 1
        return self._layout

    def complete(self, rollout: Rollout) -> Stop:
        self._work.append((int(rollout.prompt.tokens.size), len(rollout)))
        return self._inside.complete(rollout)

    def take(self) -> list[Part]:
        parts = self._inside.take()
        if any(part.publish for part in parts):
            self._judge()
        return parts

    def _judge(self) -> None:
        """Records the layout in which this round would have been fastest. That is the current one, unless another one
        gains enough.
        """
        seconds = {
            layout: replay(replica, share(self._work, layout.replicas)).seconds
            for layout, replica in self._replicas.items()
        }
        best = min(seconds, key=lambda layout: (seconds[layout], layout.tensor))
        if self._gain * seconds[best] + self._move_s >= seconds[self._layout]:
            best = self._layout
        before, rounds = self._better.get(self._now, (best, 0))
        self._better[self._now] = [best, rounds + 1 if best == before else 1]
        self._work, self._fresh = [], True

    def state_dict(self) -> dict:
        return {
            "layout": list(self._layout),
            "better": {kind: [list(layout), rounds] for kind, (layout, rounds) in self._better.items()},
            "now": self._now,
            "fresh": self._fresh,
            "work": [list(pair) for pair in self._work],
            "counts": dict(self._counts),
            "scheduler": self._inside.state_dict(),
        }

    def load_state_dict(self, state: Mapping) -> None:
        self._layout = Layout(*state["layout"])
        self._better = {kind: [Layout(*layout), rounds] for kind, (layout, rounds) in state["better"].items()}
        self._now, self._fresh = state["now"], state["fresh"]
        self._work, self._counts = [tuple(pair) for pair in state["work"]], Counter(state["counts"])
        self._inside.load_state_dict(state["scheduler"])

    def metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        return self._inside.metrics() | {
            "sched/num_layout_changes": float(counts["num_layout_changes"]),
            "sched/tensor": float(self._layout.tensor),
        }
