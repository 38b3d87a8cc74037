"""An engine that takes pairs of rollouts from the data instead of a model: a chosen and a rejected completion.

With it, DPO is the ordinary loop with `adv_estimator="pairs"`. The first rollout of a group is the chosen one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxrl_post.engine.demonstrations import Demonstrations
from jaxrl_post.types import Request


class Preferences(Demonstrations):
    """A protocols.Engine without a device. `pairs`: tokens of both completions with their end tokens, by prompt id."""

    def __init__(
        self, pairs: Mapping[str, Sequence[Sequence[int]]], *, slots: int, replicas: int = 1, version: int = 0
    ):
        super().__init__(lambda prompt, seed: (), slots=slots, replicas=replicas, version=version)
        self._pairs = pairs

    def _written(self, request: Request) -> Sequence[int]:
        return self._pairs[request.prompt.id][request.rollout_id.sample]
