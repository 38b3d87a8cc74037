"""One request on its way: what is settled, what is still a guess, and how it becomes a Rollout.

Invariant: the text up to `known` is what an uninterrupted run would have; parking, preemption and resumption only carry it
around.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

import numpy as np

from jaxrl_post.engine.host.wire import Sizes
from jaxrl_post.types import MOST_ENDS, PER_TOKEN, Finish, Prompt, Request, Rollout, RolloutId, Sampling


def check_sizes(sizes: Sizes, row_sizes: Sequence[int]) -> None:
    """ValueError: row sizes below the slots, or pages for less than one rollout."""
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
    """ValueError: it can never fit, or asks for what this engine was not built for."""
    name, need, most = request.rollout_id, request.prompt.tokens.size + request.max_tokens, sizes.max_length
    ends = len(request.sampling.eos_ids) + len(request.sampling.stop_ids)
    if need > most:
        raise ValueError(
            f"request {name}: prompt of {request.prompt.tokens.size} and max_tokens={request.max_tokens} need "
            f"{need} positions, engine.max_length={most}; the largest valid max_tokens is "
            f"{most - request.prompt.tokens.size}"
        )
    if not 0 <= request.replica < sizes.replicas:
        raise ValueError(f"request {name}: replica {request.replica} of {sizes.replicas}")
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


_SETTLED = {name: kind for name, kind in PER_TOKEN.items() if name != "sampled"}  # all of it was
_WRITTEN = _SETTLED | {"guesses": np.int32}


class Settled(NamedTuple):
    """What a dispatch settled of one slot, plain lists of one length; `filled`: positions whose KV is computed."""

    filled: int
    tokens: list[int]
    logprobs: list[float]
    entropies: list[float]
    drafted: list[bool]
    clocks: list[int]
    favourites: list[int]


@dataclass
class Live:
    """A request with the tokens it has. `guesses` are candidates for the tokens after them; `age` is its place in the order
    of submission. While it sits in `slot`: `filled`, positions whose KV is computed; `place`, where the drafter finds its
    prompt; `seen`, tokens of the text that the drafter's live table has learned."""

    request: Request
    age: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    favourites: list[int] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)
    guesses: list[int] = field(default_factory=list)
    start_clock: int = -1
    slot: int = -1
    filled: int = 0
    pages: list[int] = field(default_factory=list)
    place: np.ndarray | None = None
    seen: int = 0

    @property
    def prompt_length(self) -> int:
        return self.request.prompt.tokens.size

    @property
    def known(self) -> int:
        return self.prompt_length + len(self.tokens)

    @property
    def limit(self) -> int:
        return self.prompt_length + self.request.max_tokens

    @property
    def shared(self) -> int:
        """Positions that a sibling can take over: all of the prompt but its last token, whose row samples."""
        return self.prompt_length - 1

    def learnable(self) -> np.ndarray:
        """What a drafter should learn at each position of prompt and settled tokens."""
        return np.concatenate([self.request.prompt.tokens, np.array(self.favourites, np.int32)])

    def text(self) -> np.ndarray:
        """Prompt, settled tokens and guesses."""
        return np.concatenate([self.request.prompt.tokens, np.array(self.tokens + self.guesses, np.int32)])

    def extend(self, more: Settled, version: int) -> None:
        """Settles more tokens; guesses they used up go, and all of them when one was wrong."""
        tokens = more.tokens
        self.guesses = self.guesses[len(tokens) :] if self.guesses[: len(tokens)] == tokens else []
        self.tokens += tokens
        self.logprobs += more.logprobs
        self.entropies += more.entropies
        self.drafted += more.drafted
        self.favourites += more.favourites
        self.clocks += more.clocks
        self.versions += [version] * len(tokens)

    def cut(self, length: int) -> int:
        """Drops what comes after `length` tokens; how many that were."""
        overrun = len(self.tokens) - length
        for name in _SETTLED:
            del getattr(self, name)[length:]
        return overrun

    def doubt(self) -> None:
        """Nothing of it is settled any more: its tokens are candidates."""
        self.guesses = self.tokens + self.guesses
        for name in _SETTLED:
            setattr(self, name, [])

    def ending(self, stopped: bool = False) -> Finish | None:
        """How the text ended, by its tokens alone; `stopped`: its last token completes a stop string."""
        sampling = self.request.sampling
        if self.tokens and self.tokens[-1] in sampling.eos_ids:
            return Finish.EOS
        if stopped or self.tokens and self.tokens[-1] in sampling.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if self.known >= self.limit else None

    def stopped_at(self, decode: Callable[[np.ndarray], str], checked: int) -> int | None:
        """Length at which a stop string is complete, looking at tokens from `checked` on."""
        strings = self.request.sampling.stop_strings
        if not strings or not any(s in decode(np.array(self.tokens, np.int32)) for s in strings):
            return None
        for length in range(checked + 1, len(self.tokens) + 1):
            text = decode(np.array(self.tokens[:length], np.int32))
            if any(s in text for s in strings):
                return length
        return None

    def rollout(self, finish: Finish, clock: int) -> Rollout:
        """What it has, as a Rollout that ended at `clock`."""
        size = len(self.tokens)
        return Rollout(
            id=self.request.rollout_id,
            prompt=self.request.prompt,
            tokens=self.tokens,
            sampled=[True] * size,
            logprobs=self.logprobs,
            entropies=self.entropies,
            versions=self.versions,
            drafted=self.drafted,
            favourites=self.favourites,
            clocks=self.clocks,
            finish=finish,
            start_clock=max(self.start_clock, 0),
            finish_clock=clock,
        )


def written(live: Live) -> dict:
    """What `revived` needs, as plain values and arrays; its prompt by id. It sits in no slot."""
    assert live.slot < 0, f"{live.request.rollout_id} is in a slot"
    request = live.request
    return {
        "id": list(request.rollout_id),
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "sampling": asdict(request.sampling),
        "replica": request.replica,
        "age": live.age,
        "start_clock": live.start_clock,
        **{name: np.array(getattr(live, name), kind) for name, kind in _WRITTEN.items()},
    }


def revived(state: Mapping, prompts: Mapping[str, Prompt]) -> Live:
    """The request that was written, with the tokens it had: those are forced when it enters a slot again."""
    id, law = RolloutId(*state["id"]), state["sampling"]
    request = Request(
        rollout_id=id,
        prompt=prompts[id.prompt_id],
        seed=state["seed"],
        max_tokens=state["max_tokens"],
        sampling=Sampling(**{name: tuple(v) if isinstance(v, list) else v for name, v in law.items()}),
        replica=state["replica"],
    )
    return Live(
        request=request,
        age=state["age"],
        start_clock=state["start_clock"],
        **{name: state[name].tolist() for name in _WRITTEN},
    )


def begin(request: Request, age: int) -> Live:
    """A request that enters the engine, with its prefix as its mode says."""
    live = Live(request=replace(request, prefix=None), age=age)
    prefix = request.prefix
    if prefix is None or request.prefix_mode == "restart":
        return live
    if prefix.prompt.id != request.prompt.id:
        raise ValueError(f"request {request.rollout_id}: its prefix belongs to prompt {prefix.prompt.id!r}")
    if request.prefix_mode == "verify":
        live.guesses = [int(t) for t in prefix.tokens[: request.max_tokens]]
        return live
    for name in _SETTLED:
        setattr(live, name, getattr(prefix, name)[: request.max_tokens].tolist())
    live.start_clock = prefix.start_clock
    return live
