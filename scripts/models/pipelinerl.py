"""Generation and training side by side, each on devices of its own: no rounds, full slots, a queue between the two.

The generator starts a sample for every slot that comes free. A group goes to the queue when its last sample is
finished. The learner takes batches of samples, oldest first, and publishes after each. Staleness is the batch's step
less the version at which a sample began. A queue over its capacity drops its oldest samples. PipelineRL (arXiv
2509.19128, section 3 and appendix A) is this with an endless queue.

Invariant: everything follows from clocks of the engine, where one unit is one step; nothing is timed. It is no mode of
the ring, which shares one mesh between both.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxrl_post.ring.types import Request, Rollout, RolloutId, Sampling
from jaxrl_post.simulate.engine import SimEngine
from jaxrl_post.simulate.workloads import SimPrompts


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """What the batches after the warm-up had.

    - tokens trained and generated per unit of the clock;
    - mean and largest staleness of a sample, and mean staleness of a token;
    - samples dropped per sample trained, and mean length trained.
    """

    tokens_per_unit: float
    generated_per_unit: float
    staleness: float
    largest_staleness: int
    token_staleness: float
    dropped: float
    mean_length: float


class Stream:
    """`train(tokens)`: clock units that a batch takes the learner. `capacity`: samples the queue holds; None: any
    number.
    """

    def __init__(
        self,
        engine: SimEngine,
        prompts: SimPrompts,
        *,
        group: int,
        batch: int,
        train: Callable[[int], float],
        max_tokens: int,
        capacity: int | None = None,
    ):
        if capacity is not None and capacity < batch:
            raise ValueError(
                f"stream: a queue of {capacity} samples never holds a batch of {batch}; the nearest valid "
                f"capacity is {batch}"
            )
        self._engine, self._group, self._batch, self._train = engine, group, batch, train
        self._capacity, self._max_tokens = capacity, max_tokens
        self._asked = (self._request(prompts, number) for number in itertools.count())
        self._open: dict[tuple[int, str], list[Rollout]] = {}
        self._queue: deque[Rollout] = deque()
        self._until: float | None = None  # clock at which the learner has finished
        self._version = 0
        self._batches: list[tuple[float, int, list[Rollout]]] = []  # clock of its end, version it trained on, samples
        self._dropped = 0

    def _request(self, prompts: SimPrompts, number: int) -> Request:
        """Returns the next of the endless order of samples, a group's side by side."""
        epoch, prompt = prompts.at(number // self._group)
        name = RolloutId(0, "train", epoch, prompt.id, number % self._group)
        return Request(
            rollout_id=name, prompt=prompt, seed=name.seed(), max_tokens=self._max_tokens, sampling=Sampling()
        )

    def run(self, *, warm: int, batches: int) -> Streamed:
        """Runs until `warm` + `batches` batches are trained. The figures are of the latter."""
        self._fill()
        since = None
        while len(self._batches) < warm + batches:
            if since is None and len(self._batches) >= warm:
                since = self._engine.clock
                self._engine.metrics()
            done = self._engine.step()
            self._learn_until(self._engine.clock)
            for rollout in done:
                self._collect(rollout)
            self._begin_batch(self._engine.clock)
            self._fill()
        generated = self._engine.metrics()["sim/num_tokens_generated"] / (self._engine.clock - since)
        return self._figures(warm, batches, generated)

    def _fill(self) -> None:
        """Starts a sample in every free slot."""
        places = [at for at, slots in enumerate(self._engine.capacity.slots) for _ in range(slots)]
        self._engine.submit([dataclasses.replace(next(self._asked), replica=at) for at in places])

    def _learn_until(self, clock: float) -> None:
        """Trains the batches that end by then. The next begins at once where there are samples for it."""
        while self._until is not None and self._until <= clock:
            end, self._until = self._until, None
            self._version += 1
            self._engine.swap(None, self._version)
            self._begin_batch(end)

    def _begin_batch(self, clock: float) -> None:
        if self._until is None and len(self._queue) >= self._batch:
            samples = [self._queue.popleft() for _ in range(self._batch)]
            self._until = clock + self._train(sum(map(len, samples)))
            self._batches.append((self._until, self._version, samples))

    def _collect(self, rollout: Rollout) -> None:
        key = rollout.id.epoch, rollout.id.prompt_id
        self._open.setdefault(key, []).append(rollout)
        if len(self._open[key]) == self._group:
            self._queue.extend(self._open.pop(key))
        while self._capacity is not None and len(self._queue) > self._capacity:
            self._queue.popleft()
            self._dropped += 1

    def _figures(self, warm: int, batches: int, generated: float) -> Streamed:
        chosen = self._batches[warm : warm + batches]
        lengths = [len(sample) for _, _, samples in chosen for sample in samples]
        lags = [version - int(sample.versions[0]) for _, version, samples in chosen for sample in samples]
        tokens = sum(float(np.sum(version - sample.versions)) for _, version, samples in chosen for sample in samples)
        return Streamed(
            generated_per_unit=generated,
            tokens_per_unit=sum(lengths) / (chosen[-1][0] - self._batches[warm - 1][0]),
            staleness=float(np.mean(lags)),
            largest_staleness=max(lags),
            token_staleness=tokens / sum(lengths),
            mean_length=float(np.mean(lengths)),
            dropped=self._dropped / (len(self._batches) * self._batch),
        )
