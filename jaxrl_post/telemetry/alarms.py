"""Alarms on the rows of metrics: collapse, divergence and signs of reward hacking, each said when it begins.

Invariants:

- Alarms read rows and change nothing. Only `Diverged` ends a run, before its weights are used or written.
- An alarm depends on deterministic metrics and on its own saved state, so a resumed run repeats it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from jaxrl_post.config import AlarmConfig, Config
from jaxrl_post.telemetry import mode_report

FIRST = 4  # rows whose lengths and rewards later rows are compared with


class Diverged(RuntimeError):
    """The weights are not finite, or several steps in a row had no finite gradient. Nothing may be exported."""


def thresholds(config: Config) -> AlarmConfig:
    """Returns config.alarms without what says nothing of the run: rewards where its loss reads none, lengths where the data
    wrote the completions."""
    idle = ("equal_rewards", "hacking") if mode_report.supervised(config) else ()
    idle += ("shrinkage", "growth") if config.engine.name != "rows" else ()
    return dataclasses.replace(config.alarms, **dict.fromkeys(idle, 0.0))


class Alarms:
    """Looks at each row of metrics.

    Args:
      thresholds: as config.alarms. A threshold of 0 switches its alarm off.
      vocabulary: tokens that can be sampled.
      say: prints a line.
    """

    def __init__(self, thresholds: AlarmConfig, vocabulary: int, say: Callable[[str], object]):
        self._at, self._say = thresholds, say
        self._most_entropy = thresholds.max_entropy * math.log(max(vocabulary, 2))
        self._lengths: list[float] = []
        self._rewards: list[float] = []
        self._ringing: set[str] = set()
        self._skipped = 0

    def look(self, step: int, row: Mapping[str, float]) -> dict[str, float]:
        """Returns `alarm/NAME` for each alarm that the row has metrics for: 1 while it lasts, else 0."""
        found = self._found(row)
        for name, words in found.items():
            if words and name not in self._ringing:
                self._say(f"alarm: step {step}: {words}")
        self._ringing = {name for name, words in found.items() if words}
        return {f"alarm/{name}": float(bool(words)) for name, words in found.items()}

    def check(self, step: int, row: Mapping[str, float]) -> None:
        """Ends a run that has no sound gradients any more.

        Raises:
          Diverged: `max_skipped` steps in a row had no finite gradient.
        """
        self._skipped = self._skipped + 1 if row.get("training/skip_reason", 0.0) == 2.0 else 0
        if self._at.max_skipped and self._skipped >= self._at.max_skipped:
            raise Diverged(
                f"step {step}: the gradient was not finite in {self._skipped} steps in a row, which is "
                f"alarms.max_skipped={self._at.max_skipped}; nothing is exported, and the last checkpoint is whole"
            )

    def _found(self, row: Mapping[str, float]) -> dict[str, str]:
        """Returns what is wrong by alarm. An alarm without a finding is empty; one without metrics is left out."""
        out = {}
        if self._at.equal_rewards and (share := row.get("frac_reward_zero_std")) is not None:
            bound = self._at.equal_rewards
            out["equal_rewards"] = _above(
                share >= bound, f"{share:.0%} of the groups have equal rewards", f"from {bound:.0%} on"
            )
        if (entropy := row.get("actor/entropy")) is not None:
            low, high = self._at.min_entropy, self._most_entropy
            if low:
                out["low_entropy"] = _above(entropy < low, f"the entropy is {entropy:.3g} nats", f"below {low:g}")
            if high:
                out["high_entropy"] = _above(entropy > high, f"the entropy is {entropy:.3g} nats", f"above {high:.3g}")
        if self._at.max_mismatch and (kl := row.get("rollout_corr/k3_kl")) is not None:
            bound = self._at.max_mismatch
            out["mismatch"] = _above(
                kl > bound, f"engine and learner differ by {kl:.3g} nats per token", f"above {bound:g}"
            )
        return out | self._against_the_first(row)

    def _against_the_first(self, row: Mapping[str, float]) -> dict[str, str]:
        """Returns alarms that compare with the first rows, which set the scale and never ring."""
        length, reward = row.get("response_length/mean"), row.get("critic/score/mean")
        if length is None or reward is None:
            return {}
        if len(self._lengths) < FIRST:
            self._lengths.append(length)
            self._rewards.append(reward)
            return {}
        first, earned = sum(self._lengths) / FIRST, sum(self._rewards) / FIRST
        words, out = f"the mean length is {length:.3g} tokens, at first {first:.3g}", {}
        if self._at.shrinkage:
            bound = self._at.shrinkage * first
            out["length_collapse"] = _above(length < bound, words, f"below {bound:.3g}")
        if self._at.growth:
            bound = self._at.growth * first
            out["length_growth"] = _above(length > bound, words, f"above {bound:.3g}")
        if self._at.hacking:
            hacked = reward > earned and length < self._at.hacking * first
            more = f"the mean reward rose from {earned:.3g} to {reward:.3g} while {words}"
            out["reward_hacking"] = _above(hacked, more, "a sign of reward hacking")
        return out

    def state_dict(self) -> dict:
        return {
            "lengths": self._lengths,
            "rewards": self._rewards,
            "ringing": sorted(self._ringing),
            "skipped": self._skipped,
        }

    def load_state_dict(self, state: Mapping) -> None:
        self._lengths, self._rewards = list(state["lengths"]), list(state["rewards"])
        self._ringing, self._skipped = set(state["ringing"]), state["skipped"]


def _above(rings: bool, words: str, bound: str) -> str:
    return f"{words}: {bound}" if rings else ""
