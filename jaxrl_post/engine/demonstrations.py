"""Engines that take rollouts from the data instead of a model: worked solutions, and pairs of completions.

With the first, supervised fine-tuning is the ordinary loop with `loss_mode="sft"` and `adv_estimator="ones"`. Prompts, masks,
packing and learner are those of reinforcement learning. With pairs, DPO is the ordinary loop with
`adv_estimator="pairs"`. Both refuse prefixes, and solutions longer than a request
allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxrl_post.engine.host.sequence import begin, from_state, to_state
from jaxrl_post.parallel import weight_sync
from jaxrl_post.ring.types import Capacity, Finish, Layout, Prompt, Request, Rollout, RolloutId


class Demonstrations:
    """A protocols.Engine without a device.

    `write(prompt, seed uint32[2])` returns a solution's tokens with the end token. It must be a pure function of its
    arguments. `trained`: which tokens of a solution are trained on, by prompt id, where not all are. A step writes every
    waiting request. Log-probs and entropies are 0. A token that is trained on counts as sampled by the present version."""

    def __init__(
        self,
        write: Callable[[Any, np.ndarray], Sequence[int]],
        *,
        slots: int,
        replicas: int = 1,
        version: int = 0,
        trained: Mapping[str, Sequence[bool]] = MappingProxyType({}),
    ):
        self._write, self._trained, self._slots, self._replicas = write, trained, slots, replicas
        self._version, self._clock, self._tokens = version, 0, 0
        self._waiting: dict[RolloutId, tuple[Request, np.ndarray]] = {}

    @property
    def capacity(self) -> Capacity:
        """Returns free slots. Slots are only numbers, and waiting requests take them. Free pages are as many as free
        slots."""
        used = [sum(request.replica == r for request, _ in self._waiting.values()) for r in range(self._replicas)]
        free = tuple(max(self._slots - n, 0) for n in used)
        return Capacity(slots=free, pages=free)

    @property
    def clock(self) -> int:
        return self._clock

    @property
    def version(self) -> int:
        return self._version

    @property
    def pending(self) -> int:
        return len(self._chosen())

    def _chosen(self) -> list[tuple[Request, np.ndarray]]:
        """Returns the requests that the next step finishes: evaluation alone while the engine has any."""
        evaluation = [waiting for waiting in self._waiting.values() if waiting[0].purpose == "eval"]
        return evaluation or list(self._waiting.values())

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests with their solutions.

        Raises:
          ValueError: a request has a prefix, or its solution has more than `max_tokens` tokens. Then nothing is queued.
        """
        accepted = {}
        for request in requests:
            tokens = np.asarray(self._written(request), np.int32)
            if request.prefix is not None:
                raise ValueError(f"request {request.rollout_id}: demonstrations do not continue a prefix")
            if not 1 <= tokens.size <= request.max_tokens:
                raise ValueError(
                    f"prompt {request.prompt.id!r}: its demonstration has {tokens.size} tokens, the bound "
                    f"is 1 to sampling.max_tokens={request.max_tokens}; nearest valid bound is "
                    f"{tokens.size}"
                )
            accepted[request.rollout_id] = (request, tokens)
        self._waiting.update(accepted)

    def _written(self, request: Request) -> Sequence[int]:
        return self._write(request.prompt, request.seed)

    def park(self, ids: Iterable[RolloutId]) -> list[Rollout]:
        """Removes requests. Their rollouts have no tokens, because a waiting request has none."""
        taken = [self._waiting.pop(id)[0] for id in sorted(set(ids)) if id in self._waiting]
        return [self._rollout(request, np.zeros(0, np.int32), Finish.PARKED, self._clock) for request in taken]

    def step(self) -> list[Rollout]:
        chosen = sorted(self._chosen(), key=lambda waiting: waiting[0].rollout_id)
        start = self._clock
        self._clock += bool(chosen) and chosen[0][0].purpose == "train"
        for request, tokens in chosen:
            del self._waiting[request.rollout_id]
            self._tokens += tokens.size
        return [self._rollout(request, tokens, _finish(request, tokens), start) for request, tokens in chosen]

    def _rollout(self, request: Request, tokens: np.ndarray, finish: Finish, start: int) -> Rollout:
        written = Rollout.written(
            request.rollout_id, request.prompt, tokens, finish, version=self._version, clocks=(start, self._clock)
        )
        trained = self._trained.get(request.prompt.id)
        return written if trained is None or not len(tokens) else replace(written, sampled=np.asarray(trained, bool))

    def swap(self, params: Any, version: int, finite: Any = None) -> None:
        """Stores the version alone, because solutions do not depend on weights.

        Raises:
          ValueError: the version is not greater than the current one.
          weight_sync.NotFinite: a weight is not finite.
        """
        if version <= self._version:
            raise ValueError(f"swap: version {version} must be greater than the current {self._version}")
        weight_sync.check_finite(params, finite)
        self._version = version

    def relayout(self, layout: Layout) -> None:
        if layout != Layout(self._replicas, 1):
            raise ValueError(
                f"demonstrations use no devices: {layout} was requested, the only one is {Layout(self._replicas, 1)}"
            )

    def state_dict(self) -> dict:
        return {
            "clock": self._clock,
            "tokens": self._tokens,
            "waiting": [to_state(begin(request, 0)) for request, _ in self._waiting.values()],
        }

    def load_state_dict(self, state: Mapping, prompts: Mapping[str, Prompt]) -> None:
        self._clock, self._tokens, self._waiting = state["clock"], state["tokens"], {}
        self.submit([from_state(request, prompts).request for request in state["waiting"]])

    def metrics(self) -> dict[str, float]:
        tokens, self._tokens = self._tokens, 0
        return {"rows/num_demonstrated_tokens": float(tokens)}


def _finish(request: Request, tokens: np.ndarray) -> Finish:
    last = int(tokens[-1])
    if last in request.sampling.eos_ids:
        return Finish.EOS
    return Finish.STOP if last in request.sampling.stop_ids else Finish.LENGTH


class Preferences(Demonstrations):
    """Pairs of a chosen and a rejected completion: the first rollout of a group is the chosen one.

    `pairs`: tokens of both completions with their end tokens, by prompt id.
    """

    def __init__(
        self, pairs: Mapping[str, Sequence[Sequence[int]]], *, slots: int, replicas: int = 1, version: int = 0
    ):
        super().__init__(lambda prompt, seed: (), slots=slots, replicas=replicas, version=version)
        self._pairs = pairs

    def _written(self, request: Request) -> Sequence[int]:
        return self._pairs[request.prompt.id][request.rollout_id.sample]
