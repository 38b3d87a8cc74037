"""An engine that asks the data instead of a model: its rollouts are worked solutions.

Through it supervised fine-tuning is the one loop with `loss_mode="sft"` and `adv_estimator="ones"`: prompts, masks,
packing and learner are those of reinforcement learning. It refuses prefixes, and solutions longer than a request
allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_post.engine.host.sequence import begin, revived, written
from jaxrl_post.types import Capacity, Finish, Layout, Prompt, Request, Rollout, RolloutId


class Demonstrations:
    """A protocols.Engine. `write(prompt, seed uint32[2])` gives a solution's tokens, its end token included, as a pure
    function: like any rollout it depends on (prompt, seed), never on its company. A step writes everything that waits;
    log-probs and entropies are 0, every token counts as sampled by the current version."""

    def __init__(
        self, write: Callable[[Any, np.ndarray], Sequence[int]], *, slots: int, replicas: int = 1, version: int = 0
    ):
        self._write, self._slots, self._replicas = write, slots, replicas
        self._version, self._clock, self._tokens = version, 0, 0
        self._waiting: dict[RolloutId, tuple[Request, np.ndarray]] = {}

    @property
    def capacity(self) -> Capacity:
        """Slots are only a number here; waiting requests take theirs. Pages do not exist: as many as slots."""
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
        """What the next step will finish: evaluation first, alone."""
        evaluation = [waiting for waiting in self._waiting.values() if waiting[0].purpose == "eval"]
        return evaluation or list(self._waiting.values())

    def submit(self, requests: Sequence[Request]) -> None:
        """ValueError, with nothing queued, for a prefix or a solution of more than `max_tokens` tokens."""
        written = {}
        for request in requests:
            tokens = np.asarray(self._write(request.prompt, request.seed), np.int32)
            if request.prefix is not None:
                raise ValueError(f"request {request.rollout_id}: demonstrations do not go on from a prefix")
            if not 1 <= tokens.size <= request.max_tokens:
                raise ValueError(
                    f"prompt {request.prompt.id!r}: its demonstration has {tokens.size} tokens, the bound "
                    f"is 1 to sampling.max_tokens={request.max_tokens}; nearest valid bound is "
                    f"{tokens.size}"
                )
            written[request.rollout_id] = (request, tokens)
        self._waiting.update(written)

    def park(self, ids: Iterable[RolloutId]) -> list[Rollout]:
        """What waits has no token yet."""
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
        zeros = np.zeros(tokens.size)
        return Rollout(
            id=request.rollout_id,
            prompt=request.prompt,
            tokens=tokens,
            sampled=zeros == 0,
            logprobs=zeros,
            entropies=zeros,
            versions=zeros + self._version,
            drafted=zeros,
            finish=finish,
            start_clock=start,
            finish_clock=self._clock,
        )

    def swap(self, params: Any, version: int) -> None:
        """Only the number is kept: solutions do not depend on weights."""
        if version <= self._version:
            raise ValueError(f"swap: version {version} must be greater than the current {self._version}")
        self._version = version

    def relayout(self, layout: Layout) -> None:
        if layout != Layout(self._replicas, 1):
            raise ValueError(
                f"demonstrations lie on no devices: {layout} was asked for, there is {Layout(self._replicas, 1)}"
            )

    def state_dict(self) -> dict:
        return {
            "clock": self._clock,
            "tokens": self._tokens,
            "waiting": [written(begin(request, 0)) for request, _ in self._waiting.values()],
        }

    def load_state_dict(self, state: Mapping, prompts: Mapping[str, Prompt]) -> None:
        self._clock, self._tokens, self._waiting = state["clock"], state["tokens"], {}
        self.submit([revived(request, prompts).request for request in state["waiting"]])

    def metrics(self) -> dict[str, float]:
        tokens, self._tokens = self._tokens, 0
        return {"rows/num_demonstrated_tokens": float(tokens)}


def _finish(request: Request, tokens: np.ndarray) -> Finish:
    last = int(tokens[-1])
    if last in request.sampling.eos_ids:
        return Finish.EOS
    return Finish.STOP if last in request.sampling.stop_ids else Finish.LENGTH
