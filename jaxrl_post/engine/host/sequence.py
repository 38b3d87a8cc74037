"""The state of one request inside an engine: settled tokens, candidates, slot and pages; and the checks of a request.

Invariant: the settled text is the text of an uninterrupted run. Parking, preemption and resumption only move it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from jaxrl_post.engine.host.wire import Sizes
from jaxrl_post.types import MOST_ENDS, PER_TOKEN, Finish, Prompt, Request, Rollout, RolloutId, Sampling


def check_sizes(sizes: Sizes, row_sizes: Sequence[int]) -> None:
    """Checks that a row device of these sizes can serve every request.

    Raises:
      ValueError: the largest row size is below the number of slots, or the pages hold less than one rollout.
    """
    if max(row_sizes) < sizes.slots:
        raise ValueError(
            f"engine.row_sizes={tuple(row_sizes)} must reach engine.slots={sizes.slots}: every running slot "
            f"needs a row; nearest valid size is {sizes.slots}"
        )
    if sizes.pages * sizes.page < sizes.max_length:
        raise ValueError(
            f"engine.pages={sizes.pages} of {sizes.page} cannot hold one rollout of engine.max_length="
            f"{sizes.max_length}; the nearest valid value is {sizes.blocks}"
        )


def check_request(request: Request, sizes: Sizes, vocab_size: int, *, decodes: bool) -> None:
    """Checks that the engine can serve the request. `decodes`: whether the engine has a tokenizer.

    Raises:
      ValueError: the request can never fit, or it needs a feature that the engine was not built with.
    """
    name, need, most = request.rollout_id, request.prompt.tokens.size + request.max_tokens, sizes.max_length
    ends = len(request.sampling.eos_ids) + len(request.sampling.stop_ids)
    if need > most:
        raise ValueError(
            f"request {name}: prompt of {request.prompt.tokens.size} and max_tokens={request.max_tokens} need "
            f"{need} positions, engine.max_length={most}; the largest valid max_tokens is "
            f"{most - request.prompt.tokens.size}"
        )
    if not 0 <= request.replica < sizes.replicas:
        raise ValueError(
            f"request {name}: replica {request.replica} of {sizes.replicas}; the largest valid replica is "
            f"{sizes.replicas - 1}"
        )
    if ends > MOST_ENDS:
        raise ValueError(f"request {name}: {ends} eos and stop ids, at most {MOST_ENDS}")
    if request.sampling.restricted and not sizes.restricted:
        raise ValueError(
            f"request {name}: top_k={request.sampling.top_k} and top_p={request.sampling.top_p} need an engine "
            "with restricted=True; the nearest valid values are 0 and 1.0"
        )
    if request.sampling.stop_strings and not decodes:
        raise ValueError(f"request {name}: stop_strings need an engine with a tokenizer")
    if np.any(request.prompt.tokens < 0) or np.any(request.prompt.tokens >= vocab_size):
        raise ValueError(f"request {name}: prompt has a token outside 0..{vocab_size - 1}")


# Per-token lists of a SequenceState, and their dtypes. `sampled` is missing, because an engine samples every token.
_SETTLED = {name: kind for name, kind in PER_TOKEN.items() if name not in ("sampled", "favourites")} | {
    "argmax_tokens": np.int32
}
_SAVED = _SETTLED | {"candidates": np.int32}
# Names that differ in a Rollout and in a saved state.
_OUTSIDE = {"argmax_tokens": "favourites", "candidates": "guesses"}


class Settled(NamedTuple):
    """The tokens that a dispatch settled in one slot, as plain lists of one length.

    `num_computed`: positions whose keys and values are in the cache afterwards."""

    num_computed: int
    tokens: list[int]
    logprobs: list[float]
    entropies: list[float]
    drafted: list[bool]
    clocks: list[int]
    argmax_tokens: list[int]


@dataclass
class SequenceState:
    """A request with its settled tokens.

    `candidates`: proposals for the tokens after the settled ones, which the device verifies. `age`: rank in the order
    of submission. `slot`: -1 outside a slot. In a slot, `num_computed` counts positions whose keys and values are in
    the cache. `place` locates the prompt's tables for the drafter (wire.PLACE columns; None before the first draft).
    `seen` counts tokens that the drafter's live table has learned."""

    request: Request
    age: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    argmax_tokens: list[int] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)
    candidates: list[int] = field(default_factory=list)
    start_clock: int = -1
    slot: int = -1
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    place: np.ndarray | None = None
    seen: int = 0

    @property
    def prompt_length(self) -> int:
        """Returns the number of prompt tokens."""
        return self.request.prompt.tokens.size

    @property
    def num_tokens(self) -> int:
        """Returns the number of settled tokens, prompt included."""
        return self.prompt_length + len(self.tokens)

    @property
    def num_candidates(self) -> int:
        """Returns the number of candidates."""
        return len(self.candidates)

    @property
    def limit(self) -> int:
        """Returns the most tokens that the text may have, prompt included."""
        return self.prompt_length + self.request.max_tokens

    @property
    def shared(self) -> int:
        """Returns the number of prompt positions that sequences of one prompt share.

        The last prompt token is not shared, because its row samples."""
        return self.prompt_length - 1

    def learnable(self) -> np.ndarray:
        """Returns the tokens that a drafter learns: the prompt, then the argmax token at each settled position."""
        return np.concatenate([self.request.prompt.tokens, np.array(self.argmax_tokens, np.int32)])

    def text(self) -> np.ndarray:
        """Returns prompt, settled tokens and candidates."""
        return np.concatenate([self.request.prompt.tokens, np.array(self.tokens + self.candidates, np.int32)])

    def extend(self, more: Settled, version: int) -> None:
        """Appends settled tokens. Removes the candidates they confirmed, or all candidates after a mismatch."""
        tokens = more.tokens
        self.candidates = self.candidates[len(tokens) :] if self.candidates[: len(tokens)] == tokens else []
        self.tokens += tokens
        self.logprobs += more.logprobs
        self.entropies += more.entropies
        self.drafted += more.drafted
        self.argmax_tokens += more.argmax_tokens
        self.clocks += more.clocks
        self.versions += [version] * len(tokens)

    def cut(self, length: int) -> int:
        """Drops all tokens after the first `length`. Returns how many were dropped."""
        overrun = len(self.tokens) - length
        for name in _SETTLED:
            del getattr(self, name)[length:]
        return overrun

    def unsettle(self) -> None:
        """Turns all settled tokens into candidates."""
        self.candidates = self.tokens + self.candidates
        for name in _SETTLED:
            setattr(self, name, [])

    def ending(self, stopped: bool = False) -> Finish | None:
        """Returns how the tokens end the rollout, or None for an unfinished one.

        `stopped`: the last token completes a stop string."""
        sampling = self.request.sampling
        if self.tokens and self.tokens[-1] in sampling.eos_ids:
            return Finish.EOS
        if stopped or (self.tokens and self.tokens[-1] in sampling.stop_ids):
            return Finish.STOP
        return Finish.LENGTH if self.num_tokens >= self.limit else None

    def stopped_at(self, decode: Callable[[np.ndarray], str], checked: int) -> int | None:
        """Returns the number of tokens at which a stop string is complete, or None.

        The first `checked` tokens are known to complete no stop string."""
        strings = self.request.sampling.stop_strings
        if not strings or not any(s in decode(np.array(self.tokens, np.int32)) for s in strings):
            return None
        for length in range(checked + 1, len(self.tokens) + 1):
            text = decode(np.array(self.tokens[:length], np.int32))
            if any(s in text for s in strings):
                return length
        return None

    def rollout(self, finish: Finish, clock: int) -> Rollout:
        """Returns the settled tokens as a Rollout that ended at `clock`."""
        return Rollout(
            id=self.request.rollout_id,
            prompt=self.request.prompt,
            sampled=np.ones(len(self.tokens), bool),
            finish=finish,
            start_clock=max(self.start_clock, 0),
            finish_clock=clock,
            **{_OUTSIDE.get(name, name): getattr(self, name) for name in _SETTLED},
        )


def to_state(sequence: SequenceState) -> dict:
    """Returns the sequence as plain values and arrays for `from_state`. The prompt is saved by id.

    The sequence must not have a slot."""
    assert sequence.slot < 0, f"{sequence.request.rollout_id} is in a slot"
    request = sequence.request
    return {
        "id": list(request.rollout_id),
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "sampling": asdict(request.sampling),
        "replica": request.replica,
        "age": sequence.age,
        "start_clock": sequence.start_clock,
        **{_OUTSIDE.get(name, name): np.array(getattr(sequence, name), kind) for name, kind in _SAVED.items()},
    }


def from_state(state: Mapping, prompts: Mapping[str, Prompt]) -> SequenceState:
    """Returns the sequence of a saved state. Its tokens are forced when it enters a slot again."""
    id = RolloutId(*state["id"])
    law: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in state["sampling"].items()}
    request = Request(
        rollout_id=id,
        prompt=prompts[id.prompt_id],
        seed=state["seed"],
        max_tokens=state["max_tokens"],
        sampling=Sampling(**law),
        replica=state["replica"],
    )
    return SequenceState(
        request=request,
        age=state["age"],
        start_clock=state["start_clock"],
        **{name: state[_OUTSIDE.get(name, name)].tolist() for name in _SAVED},
    )


def begin(request: Request, age: int) -> SequenceState:
    """Returns the state of a request that enters the engine. Its prefix is handled by `request.prefix_mode`.

    Raises:
      ValueError: the prefix belongs to another prompt.
    """
    sequence = SequenceState(request=replace(request, prefix=None), age=age)
    prefix = request.prefix
    if prefix is None or request.prefix_mode == "restart":
        return sequence
    if prefix.prompt.id != request.prompt.id:
        raise ValueError(f"request {request.rollout_id}: its prefix belongs to prompt {prefix.prompt.id!r}")
    if request.prefix_mode == "verify":
        sequence.candidates = [int(t) for t in prefix.tokens[: request.max_tokens]]
        return sequence
    for name in _SETTLED:
        setattr(sequence, name, getattr(prefix, _OUTSIDE.get(name, name))[: request.max_tokens].tolist())
    sequence.start_clock = prefix.start_clock
    return sequence
