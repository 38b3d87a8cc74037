"""A learner without weights. It counts optimizer steps and computes the seconds that they would take.

Invariant: `params` is the step number, so a version describes simulated weights completely. The seconds of a step are:

- `token_s` for each trained token: old and reference log-probs, forward and backward pass.
- `step_s` for the step, whatever its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxrl_post.types import Group


class SimLearner:
    """A protocols.Learner. `seconds` is the duration of all steps so far."""

    def __init__(self, *, token_s: float = 0.0, step_s: float = 0.0):
        if min(token_s, step_s) < 0:
            raise ValueError(f"simulated learner: token_s={token_s} and step_s={step_s} must be at least 0")
        self._token_s, self._step_s = token_s, step_s
        self._tokens = 0
        self.step, self.seconds = 0, 0.0

    @property
    def params(self) -> int:
        """Returns the step number."""
        return self.step

    def prepare(self, groups: Sequence[Group]) -> None:
        """Does nothing: its time is part of `token_s`."""

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Counts the tokens of groups. Prompts count as trained tokens, because they pass through the model too."""
        self._tokens += sum(len(rollout) + group.prompt.tokens.size for group in groups for rollout in group.rollouts)

    def commit(self) -> Mapping[str, float]:
        seconds = self._step_s + self._tokens * self._token_s
        out = {"actor/num_tokens": float(self._tokens), "actor/seconds": seconds}
        self.seconds += seconds
        self._tokens = 0
        self.step += 1
        return out
