"""Slots that a caller fills, reads and frees: JetStream's contract, over an engine that chooses slots of its own.

A dispatch settles several tokens of every running request. They wait here until they are read, one of each slot at a time.

Invariant: a slot gives the tokens of the engine driven directly, for equal weights, prompt, seed and sampling law. The
prompt and `seed` alone choose the noise, so that equal prompts have equal tokens. It refuses slots that do not exist, and
prompts that the engine can never serve.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxrl_post.engine.host.row_host import RowHost
from jaxrl_post.ring.types import Prompt, Request, RolloutId, Sampling, served_seed

TOKEN, VALID, LENGTH = range(3)  # columns of `read`
ENDED = np.iinfo(np.int32).max  # the length of a slot whose request has ended: above every limit of a caller


@dataclass(slots=True)
class _Held:
    """The request of a slot. `unread`: settled tokens in order. `settled`: how many there were. `given`: how many were read."""

    name: RolloutId | None
    unread: collections.deque[int] = field(default_factory=collections.deque)
    settled: int = 0
    given: int = 0

    @property
    def starved(self) -> bool:
        """Returns whether the next token needs a dispatch."""
        return self.name is not None and not self.unread

    def take(self) -> tuple[int, int, int]:
        """Returns the next row of `read`."""
        if not self.unread:
            return 0, 0, ENDED
        self.given += 1
        return self.unread.popleft(), 1, self.given


class Slots:
    """The slots of a row engine, for a caller that gives prompts as token ids.

    `insert` and `read` belong to one thread. `free` may be called from any.

    Args:
      sampling_params: of every request. Its ends stop a request, and else the last position of the engine's slot does.
      seed: from which the noise of every prompt is made.
    """

    def __init__(self, engine: RowHost, sampling_params: Sampling, seed: int = 0):
        self._engine, self._sampling_params, self._seed = engine, sampling_params, seed
        self._held: dict[int, _Held] = {}
        self._freed: collections.deque[int] = collections.deque()
        self._number = itertools.count()

    @property
    def count(self) -> int:
        """Returns the number of slots, over all replicas."""
        return self._engine.sizes.replicas * self._engine.sizes.slots

    @property
    def longest_prompt(self) -> int:
        """Returns the most tokens of a prompt, one position being left for a token behind it."""
        return self._engine.sizes.max_length - 1

    def refusal(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Returns why no engine step can serve this prompt, or an empty text."""
        ids, vocab = np.asarray(tokens, np.int64), self._engine.vocab_size
        if not ids.size:
            return "the prompt is empty; at least one token is needed"
        if ids.size > self.longest_prompt:
            return (
                f"the prompt has {ids.size} tokens and engine.max_length={self._engine.sizes.max_length} leaves room for "
                f"at most {self.longest_prompt} and one more; the nearest valid number is {self.longest_prompt}"
            )
        wrong = ids[(ids < 0) | (ids >= vocab)]
        return f"the prompt has token {wrong[0]}, outside 0..{vocab - 1}" if wrong.size else ""

    def insert(self, tokens: Sequence[int] | np.ndarray, slot: int) -> None:
        """Gives a slot to a prompt. A request that the slot held before is dropped.

        A prompt that `refusal` objects to gets a request that has ended before its first token.

        Raises:
          ValueError: there is no such slot.
        """
        if not 0 <= slot < self.count:
            raise ValueError(f"slots: slot {slot} of {self.count}; the largest valid slot is {self.count - 1}")
        self._drop_freed()
        self._drop(slot)
        if self.refusal(tokens):
            self._held[slot] = _Held(None)
            return
        request = self._request(np.asarray(tokens, np.int32), slot)
        self._engine.submit([request])
        self._held[slot] = _Held(request.rollout_id)

    def _request(self, tokens: np.ndarray, slot: int) -> Request:
        """Returns the request of a prompt. Its name tells requests of one prompt apart, and its noise does not."""
        prompt = Prompt.of_tokens(tokens)
        return Request(
            rollout_id=RolloutId(self._seed, "eval", 0, prompt.id, next(self._number)),
            prompt=prompt,
            seed=served_seed(self._seed, prompt.id, 0),
            max_tokens=self._engine.sizes.max_length - tokens.size,
            sampling=self._sampling_params,
            replica=slot % self._engine.sizes.replicas,
        )

    def read(self) -> np.ndarray:
        """Returns int32[S, 3]: the next token of every slot, whether there is one, and how many were read with it.

        A slot whose request has ended, and all of it was read, gives the length ENDED. An empty slot gives zeros.
        """
        self._drop_freed()
        while any(one.starved for one in self._held.values()):
            self._step()
        rows = np.zeros((self.count, 3), np.int32)
        for slot, one in self._held.items():
            rows[slot] = one.take()
        return rows

    def free(self, slot: int) -> None:
        """Drops the request of a slot before the next `insert` or `read`. An empty slot stays as it is."""
        self._freed.append(slot)

    def clear(self) -> None:
        """Drops all requests."""
        self._freed.extend(self._held)
        self._drop_freed()

    def _step(self) -> None:
        """Runs a dispatch and takes over what it settled."""
        ended = {rollout.id: rollout.tokens for rollout in self._engine.step()}
        for one in self._held.values():
            if one.name is None:
                continue
            done = one.name in ended
            tokens = ended[one.name] if done else self._engine.sequences[one.name].column("tokens")
            one.unread.extend(tokens[one.settled :].tolist())
            one.settled = len(tokens)
            one.name = None if done else one.name

    def _drop_freed(self) -> None:
        while self._freed:
            self._drop(self._freed.popleft())

    def _drop(self, slot: int) -> None:
        held = self._held.pop(slot, None)
        if held is not None and held.name is not None:
            self._engine.park([held.name])
