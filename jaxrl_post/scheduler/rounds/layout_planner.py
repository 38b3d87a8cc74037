"""Which layout the engine shall have in the next round, from what the last ones would have taken in each.

RollPacker's parallelism planner (arXiv 2509.21009, section 4.2) doubles the tensor parallelism of its replicas when
preemptions rise by more than 1.05x and halves it after four rounds without any; its paper and its code disagree on which
rounds gain. Here the lengths of a round are replayed in every layout with the cost table and the KV of its replicas, and
the same hysteresis acts on the seconds forecast. Invariant: a plan follows from lengths and tables alone, so every process
of a job plans the same. It changes the layout between two rounds only. On one program over all replicas a layout changes
device time as it does with replicas of their own: each replica has other devices, slots and pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from jaxrl_post.scheduler.forecast import Replica, replay, share
from jaxrl_post.scheduler.rounds.around import AroundRounds, RoundScheduler
from jaxrl_post.types import Layout, Part, Rollout, Stop

GAIN = 1.05  # a layout must be so many times faster
QUIET = 4  # rounds in a row that must say so before replicas get fewer devices


class Planner(AroundRounds):
    """A protocols.Scheduler around `scheduler` that chooses a layout for each of its rounds.

    More devices a replica: as soon as one round says so. Fewer: when the last `quiet` rounds of that kind agree.

    Args:
      replicas: a replica of each layout; the first is where the engine begins.
      move_s: seconds of a relayout, which a round must gain beside.
    """

    def __init__(
        self,
        scheduler: RoundScheduler,
        replicas: Mapping[Layout, Replica],
        *,
        move_s: float = 0.0,
        gain: float = GAIN,
        quiet: int = QUIET,
    ):
        super().__init__(scheduler)
        self._replicas = dict(replicas)
        self._move_s, self._gain, self._quiet = move_s, gain, quiet
        self._layout = next(iter(replicas))
        self._work: list[tuple[int, int]] = []  # of this round: prompt and answer tokens, by completion
        self._now = ""  # the kind of this round
        self._better: dict[str, list] = {}  # of a kind: the layout its last round was best in, and rounds in a row
        self._fresh = True  # nothing of this round was admitted yet
        self._counts: Counter[str] = Counter()

    def __str__(self) -> str:
        return f"{self._inside}, {self._layout}"

    def layout(self) -> Layout:
        """Decided once a round, before its first request."""
        if self._fresh:
            self._fresh, self._now = False, self.kind()
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
        """Which layout this round would have been best in; the present one, unless another gains enough."""
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
        """Between two rounds."""
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
