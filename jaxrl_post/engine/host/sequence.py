"""The state of one request inside an engine: settled tokens, candidates, slot and pages; and the checks of a request.

Invariant: the settled text is the text of an uninterrupted run. Parking, preemption and resumption only move it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np

from jaxrl_post.engine.host.wire import CANDIDATE_END, NUM_COMPUTED, NUM_TOKENS, PROMPT_TILE, EngineSettings
from jaxrl_post.ring.ragged import Ragged
from jaxrl_post.ring.types import (
    COLUMNS,
    MOST_ENDS,
    PER_TOKEN,
    Finish,
    Prompt,
    Request,
    Rollout,
    RolloutId,
    Sampling,
    frozen,
    saved_name,
)


def check_sizes(sizes: EngineSettings) -> None:
    """Checks that a row device of these sizes can serve every request.

    Raises:
      ValueError: the largest row size is below the number of slots, the pages hold less than one rollout, or the rows
        of the wide prompt program are no whole tiles.
    """
    if sizes.prompt_rows % PROMPT_TILE:
        raise ValueError(
            f"engine.prompt_rows={sizes.prompt_rows} must be a multiple of {PROMPT_TILE}; the nearest valid value is "
            f"{-(-sizes.prompt_rows // PROMPT_TILE) * PROMPT_TILE}"
        )
    if max(sizes.row_sizes) < sizes.slots:
        raise ValueError(
            f"engine.row_sizes={tuple(sizes.row_sizes)} must reach engine.slots={sizes.slots}: every running slot "
            f"needs a row; nearest valid size is {sizes.slots}"
        )
    if sizes.pages * sizes.page_size < sizes.max_length:
        raise ValueError(
            f"engine.pages={sizes.pages} of {sizes.page_size} cannot hold one rollout of engine.max_length="
            f"{sizes.max_length}; the nearest valid value is {sizes.blocks}"
        )


def check_request(request: Request, sizes: EngineSettings, vocab_size: int, *, decodes: bool) -> None:
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


_BROKEN = "\ufffd"  # what bytes that are no character decode to


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
    kept: Ragged | None = None


NEVER = 1 << 30  # a version above all
_NOTHING: dict[str, Any] = {name: frozen(np.zeros(0, kind)) for name, kind in PER_TOKEN.items()}


class SequenceState:
    """A request with its settled tokens.

    `candidates`: proposals for the tokens after the settled ones, which the device verifies. `age`: rank in the order
    of submission. `slot`: -1 outside a slot. In a slot, `num_computed` counts positions whose keys and values are in
    the cache. `place` locates the prompt's tables for the drafter (wire.PLACE columns; None before the first draft).
    `seen` counts tokens that the drafter's live table has learned.

    Between `enter` and `leave` its counts are a row of the table of slots (host/slot_table.py), which also has its new
    tokens. So a dispatch updates all slots at once.

    Args:
      settled: per-token values by name (types.COLUMNS). Without a name there are none; tokens without `sampled` are sampled.
    """

    _settled: dict[str, Any]

    def __init__(self, *, request: Request, age: int, start_clock: int = -1, candidates: Sequence[int] = (), **settled):
        self.request, self.age, self.start_clock = request, age, start_clock
        self.candidates = list(candidates)
        self.slot, self.place = -1, None
        self.pages: list[int] = []
        self.prompt_length: int = request.prompt.tokens.size
        self._table: Any = None  # the SlotTable, while it has a slot
        self._row, self._seen = np.zeros(CANDIDATE_END + 1, np.int64), np.zeros(1, np.int64)
        count = len(settled.get("tokens", ()))
        settled.setdefault("sampled", np.ones(count, bool))
        kept = settled.pop("kept", None) or Ragged.empty(count)
        given = {name: np.asarray(values, PER_TOKEN[name]) for name, values in settled.items()}
        self._replace(_NOTHING | given | {"kept": kept})

    # ---- counts

    @property
    def num_tokens(self) -> int:
        """Returns the number of settled tokens, prompt included."""
        return int(self._row[NUM_TOKENS])

    @property
    def num_answered(self) -> int:
        """Returns the number of settled tokens behind the prompt."""
        return self.num_tokens - self.prompt_length

    @property
    def num_computed(self) -> int:
        return int(self._row[NUM_COMPUTED])

    @num_computed.setter
    def num_computed(self, count: int) -> None:
        self._row[NUM_COMPUTED] = count

    @property
    def seen(self) -> int:
        return int(self._seen[0])

    @seen.setter
    def seen(self, count: int) -> None:
        self._seen[0] = count

    @property
    def limit(self) -> int:
        """Returns the most tokens that the text may have, prompt included."""
        return self.prompt_length + self.request.max_tokens

    @property
    def turn(self) -> int:
        """Returns the number of settled tokens before the present turn, which begins behind the last observed token.

        In a slot every new token is sampled."""
        return last_turn(self._settled["sampled"])

    @property
    def shared(self) -> int:
        """Returns the number of prompt positions that sequences of one prompt share.

        The last prompt token is not shared, because its row samples."""
        return self.prompt_length - 1

    @property
    def oldest(self) -> int:
        """Returns the oldest version of any token, or NEVER without a token."""
        if self._table is not None:
            return self._table.oldest(self)
        return int(self._settled["versions"].min(initial=NEVER))

    # ---- the slot

    def enter(self, table: Any, row: np.ndarray, seen: np.ndarray) -> None:
        """Makes its counts those of a row of the table of slots, which has read them."""
        self._table, self._row, self._seen = table, row, seen

    def leave(self) -> None:
        """Takes its counts and new tokens back from the table of slots."""
        assert self._table is not None
        self._gather()
        self._table, self._row, self._seen = None, self._row[: CANDIDATE_END + 1].copy(), self._seen.copy()

    # ---- what is settled

    def column(self, name: str) -> Any:
        """Returns the settled values of a name (types.COLUMNS), one for each token."""
        own = self._settled[name]
        return own if self._table is None else _joined(own, self._table.column(self, name))

    @property
    def tokens(self) -> list[int]:
        """Returns the settled tokens behind the prompt, in a new list."""
        return self.column("tokens").tolist()

    def _gather(self) -> None:
        """Takes the tokens that were settled in the slot."""
        if self._table is not None:
            more = self._table.gather(self)
            self._settled = {name: _joined(own, more[name]) for name, own in self._settled.items()}

    def _replace(self, settled: dict[str, Any]) -> None:
        """Replaces all settled values."""
        self._settled = settled
        self._row[NUM_TOKENS] = self.prompt_length + settled["tokens"].size
        self._row[CANDIDATE_END] = self._row[NUM_TOKENS] + len(self.candidates)

    def learnable(self) -> np.ndarray:
        """Returns the tokens that a drafter learns: the prompt, then the argmax token at each settled position."""
        return np.concatenate([self.request.prompt.tokens, self.column("argmax_tokens")])

    def text(self) -> np.ndarray:
        """Returns prompt, settled tokens and candidates."""
        return np.concatenate([self.request.prompt.tokens, self.column("tokens"), np.array(self.candidates, np.int32)])

    def extend(self, more: Settled, version: int) -> None:
        """Appends settled tokens. Removes the candidates they confirmed, or all candidates after a mismatch."""
        tokens = more.tokens
        self.candidates = self.candidates[len(tokens) :] if self.candidates[: len(tokens)] == tokens else []
        new = more._asdict() | {"versions": [version] * len(tokens), "sampled": [True] * len(tokens)}
        self._gather()
        kept = _joined(self._settled["kept"], more.kept or Ragged.empty(len(tokens)))
        arrays = {name: _joined(self._settled[name], np.array(new[name], kind)) for name, kind in PER_TOKEN.items()}
        self._replace(arrays | {"kept": kept})

    def cut(self, length: int) -> int:
        """Drops all tokens after the first `length`. Returns how many were dropped."""
        self._gather()
        overrun = self._settled["tokens"].size - length
        self._replace({name: own[:length] for name, own in self._settled.items()})
        return overrun

    def unsettle(self) -> None:
        """Turns the settled tokens of the present turn into candidates. What was observed stays, and what led to it."""
        self._gather()
        self.candidates = self._settled["tokens"][self.turn :].tolist() + self.candidates
        self._replace({name: own[: self.turn] for name, own in self._settled.items()})

    def ending(self, stopped: bool = False) -> Finish | None:
        """Returns how the tokens end the rollout, or None for an unfinished one.

        `stopped`: the last token completes a stop string."""
        sampling, last = self.request.sampling, self._last()
        if last is not None and last in sampling.eos_ids:
            return Finish.EOS
        if stopped or (last is not None and last in sampling.stop_ids):
            return Finish.STOP
        return Finish.LENGTH if self.num_tokens >= self.limit else None

    def _last(self) -> int | None:
        """Returns the last token of the present turn."""
        if self.num_answered > self._settled["tokens"].size:
            return self._table.last_token(self)
        return int(self._settled["tokens"][-1]) if self._settled["tokens"].size > self.turn else None

    def stopped_at(self, decode: Callable[..., str], checked: int) -> int | None:
        """Returns the number of tokens at which a stop string is complete, or None. The present turn alone is searched.

        The first `checked` tokens are known to complete no stop string. A later byte may break characters of a text, so
        that a broken one does not tell that no earlier text had the string."""
        strings, begin = self.request.sampling.stop_strings, self.turn
        if not strings:
            return None
        tokens = self.column("tokens")
        before = np.concatenate([self.request.prompt.tokens, tokens[:begin]])
        text = decode(tokens[begin:], before=before)
        if _BROKEN not in text and not any(s in text for s in strings):
            return None
        for length in range(max(checked, begin) + 1, len(tokens) + 1):
            text = decode(tokens[begin:length], before=before)
            if any(s in text for s in strings):
                return length
        return None

    def rollout(self, finish: Finish, clock: int) -> Rollout:
        """Returns the settled tokens as a Rollout that ended at `clock`."""
        return Rollout(
            id=self.request.rollout_id,
            prompt=self.request.prompt,
            finish=finish,
            start_clock=max(self.start_clock, 0),
            finish_clock=clock,
            **{name: self.column(name) for name in COLUMNS},
        )


def _joined(one: Any, other: Any) -> Any:
    """Returns the values of both as one. An array is read-only, so that a Rollout takes it without a copy."""
    if isinstance(one, Ragged):
        return Ragged.joined([one, other])
    return frozen(np.concatenate([one, other]) if one.size else other)


def to_request_state(request: Request) -> dict:
    """Returns the request as plain values for `from_request_state`, without its prefix. The prompt is saved by id."""
    return {
        "id": list(request.rollout_id),
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "sampling": asdict(request.sampling),
        "replica": request.replica,
    }


def from_request_state(state: Mapping, prompts: Mapping[str, Prompt]) -> Request:
    """Returns the request of a saved state. Other entries of the state are not read."""
    id = RolloutId(*state["id"])
    sampling: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in state["sampling"].items()}
    return Request(
        rollout_id=id,
        prompt=prompts[id.prompt_id],
        seed=state["seed"],
        max_tokens=state["max_tokens"],
        sampling=Sampling(**sampling),
        replica=state["replica"],
    )


def to_state(sequence: SequenceState) -> dict:
    """Returns the sequence as plain values and arrays for `from_state`. The prompt is saved by id.

    The sequence must not have a slot."""
    assert sequence.slot < 0, f"{sequence.request.rollout_id} is in a slot"
    return {
        **to_request_state(sequence.request),
        "age": sequence.age,
        "start_clock": sequence.start_clock,
        **{saved_name(name): sequence.column(name) for name in PER_TOKEN},
        **sequence.column("kept").state("kept"),
        "guesses": np.array(sequence.candidates, np.int32),
    }


def from_state(state: Mapping, prompts: Mapping[str, Prompt]) -> SequenceState:
    """Returns the sequence of a saved state. Its tokens are forced when it enters a slot again."""
    return SequenceState(
        request=from_request_state(state, prompts),
        age=state["age"],
        start_clock=state["start_clock"],
        candidates=state["guesses"].tolist(),
        **{name: state[key] for name in PER_TOKEN if (key := saved_name(name)) in state},
        kept=Ragged.restored(state, "kept"),
    )


def last_turn(sampled: np.ndarray) -> int:
    """Returns where the last turn begins: behind the last token that was not sampled, 0 without one."""
    return sampled.size - int(np.argmin(sampled[::-1])) if sampled.size and not sampled.all() else 0


def begin(request: Request, age: int) -> SequenceState:
    """Returns the state of a request that enters the engine. Its prefix is handled by `request.prefix_mode`.

    Raises:
      ValueError: the prefix belongs to another prompt.
    """
    bare, prefix = replace(request, prefix=None), request.prefix
    if prefix is None or request.prefix_mode == "restart":
        return SequenceState(request=bare, age=age)
    if prefix.prompt.id != request.prompt.id:
        raise ValueError(f"request {request.rollout_id}: its prefix belongs to prompt {prefix.prompt.id!r}")
    verified = request.prefix_mode == "verify"
    stays = min(last_turn(prefix.sampled), request.max_tokens) if verified else request.max_tokens
    settled = {name: getattr(prefix, name)[:stays] for name in COLUMNS}
    candidates = prefix.tokens[stays : request.max_tokens].tolist()
    start_clock = prefix.start_clock if stays else -1
    return SequenceState(request=bare, age=age, start_clock=start_clock, candidates=candidates, **settled)
