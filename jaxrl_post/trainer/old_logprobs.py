"""Old log-probs of a round: log-probs under the policy that the round started with.

They come from one of three passes:
- Where the advantage depends on them, a forward pass computes them before training.
- Otherwise the gradient's own pass gives them for groups that are accumulated before the first commit.
- That commit computes the rest in a forward pass, before it changes the weights.

Invariant: every old log-prob is computed with the weights of the round's start, whichever pass computed it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jaxrl_post.algorithms import correction, losses
from jaxrl_post.config import AlgorithmConfig
from jaxrl_post.ring.types import Group, Rollout, RolloutId
from jaxrl_post.trainer import packing

LogProbs = Mapping[RolloutId, np.ndarray]


class OldLogprobs:
    """Old log-probs by rollout id, float[T] on the host, and which groups still lack them.

    `needed`: the loss, the reward or the correction reads them. `in_credits`: the advantage depends on them. Where an engine
    sampled and nothing needs them, those that the gradient's pass gives still become metrics.

    `written`: no engine sampled the rollouts. `version`: of the weights of the round's start.
    """

    def __init__(self, algorithm: AlgorithmConfig, written: bool = False):
        self._compares = algorithm.compares_pairs  # which no engine sampled
        self.in_credits = (
            algorithm.use_kl_in_reward or algorithm.corrects_rollouts or self._compares or algorithm.teacher_coef > 0
        )
        self.needed = losses.NEEDS_OLD_LOGPROBS[algorithm.loss_mode] or self.in_credits
        self.compared = self.needed or not (written or algorithm.loss_mode == "sft")  # with the engine's
        self._method, self.version = algorithm.prox_logp_method, 0
        self.begin_round()
        self.begin_step()

    def begin_round(self) -> None:
        self.committed = False
        self.of: dict[RolloutId, np.ndarray] = {}
        self._unscored: dict[RolloutId, Group] = {}  # by the id of the group's first rollout
        self._unread: list[tuple[list[Group], list[jax.Array], list[packing.RolloutSpan]]] = []

    def begin_step(self) -> None:
        """Discards the pairs of the last step. A pair is (old, rollout) log-probs of one rollout's sampled tokens.

        `current`: of each pair, whether the weights of the old log-probs sampled a token."""
        self.pairs: list[tuple[np.ndarray, np.ndarray]] = []
        self.current: list[np.ndarray] = []

    @property
    def from_gradient(self) -> bool:
        """Returns whether the gradient's pass gives old log-probs.

        It does so before the round's first commit, where nothing needs them earlier.
        """
        recomputes = self._method == "recompute"
        return recomputes and self.compared and not self.in_credits and not self.committed

    def prepare(self, groups: Sequence[Group], score: Callable[[Sequence[Group]], LogProbs]) -> None:
        """Registers groups of this round. `score` computes log-probs at the current weights by a forward pass."""
        if self.in_credits:
            self._record(groups, score(groups))
        elif self.compared:
            self._unscored.update((group.rollouts[0].id, group) for group in groups)

    def accumulated(self, groups: Sequence[Group], results: list[jax.Array], places: list[packing.RolloutSpan]) -> None:
        """Keeps the log-probs of a gradient's pass, unread, for groups that have no old log-probs yet."""
        fresh = [group for group in groups if self._unscored.pop(group.rollouts[0].id, None)]
        if fresh:
            self._unread.append((fresh, results, places))

    def settle(self, score: Callable[[Sequence[Group]], LogProbs]) -> None:
        """Completes the old log-probs of all groups, while the weights are still those of the round's start."""
        for groups, results, places in self._unread:
            self._record(groups, packing.per_rollout(jax.device_get(results), places))
        if self._unscored and self.needed:
            groups = list(self._unscored.values())
            self._record(groups, score(groups))
        self._unread, self._unscored = [], {}

    def leaves(self, rollouts: Sequence[Rollout], step: int) -> dict[str, LogProbs]:
        """Returns what is packed for the loss, by leaf: old log-probs where it needs them, and weights of loglinear ones.

        Old log-probs are zeros where the gradient's pass itself computes them.
        """
        out: dict[str, LogProbs] = {}
        if self._method == "loglinear":
            out["prox_weights"] = {r.id: correction.prox_weights(r.versions, step) for r in rollouts}
        if not self.needed:
            return out
        if self.from_gradient:
            return out | {"old_logprobs": {r.id: np.zeros(len(r)) for r in rollouts}}
        return out | {"old_logprobs": self.of if self._method == "recompute" else {r.id: r.logprobs for r in rollouts}}

    def _record(self, groups: Sequence[Group], logprobs: LogProbs) -> None:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self.of.update((r.id, logprobs[r.id]) for r in rollouts)
        known = [] if self._compares else rollouts
        known = [r for r in known if r.sampled.any()]
        self.pairs += [(self.of[r.id][r.sampled], r.logprobs[r.sampled]) for r in known]
        self.current += [r.versions[r.sampled] >= self.version for r in known]
