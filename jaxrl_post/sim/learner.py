"""A learner without weights: it counts steps, and what they would take.

Invariant: `params` is the step itself, so a version says everything about simulated weights. Seconds come from
`token_s`, of one trained token with everything done to it (old and reference log-probs, forward, backward), and `step_s`,
of what a step takes in any case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxrl_post.types import Group


class SimLearner:
    """A protocols.Learner. `seconds`: of all steps so far."""

    def __init__(self, *, token_s: float = 0.0, step_s: float = 0.0):
        if min(token_s, step_s) < 0:
            raise ValueError(f"simulated learner: token_s={token_s} and step_s={step_s} must be at least 0")
        self._token_s, self._step_s = token_s, step_s
        self._tokens = 0
        self.step, self.seconds = 0, 0.0

    @property
    def params(self) -> int:
        """The step."""
        return self.step

    def prepare(self, groups: Sequence[Group]) -> None:
        """Its time is part of `token_s`."""

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Prompts count as trained tokens: they go through the model too."""
        self._tokens += sum(len(rollout) + group.prompt.tokens.size for group in groups for rollout in group.rollouts)

    def commit(self) -> Mapping[str, float]:
        seconds = self._step_s + self._tokens * self._token_s
        out = {"actor/num_tokens": float(self._tokens), "actor/seconds": seconds}
        self.seconds += seconds
        self._tokens = 0
        self.step += 1
        return out
