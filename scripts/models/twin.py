"""The exact twin of the row engine: the same host code, over a numpy device that knows the tokens of every rollout.

The twin executes the row program step by step. It plans rows, settles tokens and ends dispatches as the row program
does. The tokens that a model would sample are given. The guesses of a drafter are not known, so logs replace them
where the engine drafted:

- The known rollout gives the number of tokens that each step settled.
- The dispatch log gives the counts of drafts.

Invariant: with the logs of an engine with the same settings, the twin takes the same decisions at the same clocks. The
log of another engine is refused as soon as it does not fit.

The logs of a finished run become its inputs: lengths of rollouts, how they ended, and their scores. A deferred rollout has
several lives. A life ends when the rollout is parked or finishes. The twin must find by itself at which length a life is
parked. A life that begins with candidates accepts as many of them as in the run. The twin gets no text of the run and no
clock. A known token is a stand-in. The last token is an end token if the logged rollout ended with one. Logged clocks only
show which tokens one step settled together, never when.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxrl_post.engine import row_plan
from jaxrl_post.engine.host import wire as c
from jaxrl_post.engine.host.device import DispatchOrder
from jaxrl_post.engine.host.dispatch_log import Dispatch
from jaxrl_post.engine.host.sequence import SequenceState
from jaxrl_post.ring.types import Finish, Group, Layout, Request, Rollout, RolloutId, Sampling


class Known(NamedTuple):
    """The known tokens of a rollout, int32[T].

    `ends`, int[K] ascending to T: the number of tokens after each step that settled tokens. None: one token per step,
    except where candidates of a prefix are accepted.
    """

    tokens: np.ndarray
    ends: np.ndarray | None = None


@dataclass
class Block:
    """One replica during a dispatch. All arrays except `uses` have one row per slot [S].

    - `packed`: what the host sends for each slot, in the columns of wire.py.
    - `text` [S, T]: the tokens so far.
    - `truth` [S, T]: the tokens of the whole rollout. -1: unknown.
    - `leaps` [S, T]: the number of tokens that a step settles, indexed by the number of tokens before the step.
    - `known`: number of tokens.
    - `filled`: number of positions in the KV cache.
    - `guessed`: end of the candidates.
    - `done`: whether the rollout has ended.
    - `stamps` [S, emit]: step * 2 + drafted of each token of the dispatch.
    - `uses`: number of rows by use, in the order of wire.USES.
    """

    packed: np.ndarray
    text: np.ndarray
    truth: np.ndarray
    leaps: np.ndarray
    known: np.ndarray
    filled: np.ndarray
    guessed: np.ndarray
    done: np.ndarray
    stamps: np.ndarray
    uses: np.ndarray

    @property
    def going(self) -> np.ndarray:
        return (self.packed[:, c.ACTIVE] > 0) & ~self.done

    def bound(self, emit: int) -> np.ndarray:
        """Returns the position below which the rows of each slot must stay, [S]."""
        p = self.packed
        return np.minimum(np.minimum(p[:, c.LIMIT] - 1, p[:, c.MAPPED]), p[:, c.NUM_TOKENS] + emit - 1)


class RowTwin:
    """A RowDevice (engine/host/device.py) in numpy, for a RowHost.

    Args:
      `answers`: returns the known rollout of (request, version). It must be a pure function, because every dispatch
        calls it for each request in a slot.
      sizes: sizes of the row program.
      drafted: the logged dispatches that drafted, in order.
      classes: number of classes of drafts that the drafter counts.
    """

    watched = 0

    def __init__(
        self,
        answers: Callable[[Request, int], Known],
        sizes: c.EngineSettings,
        *,
        drafted: Iterable[Dispatch] = (),
        classes: int = 0,
    ):
        self._sizes, self._classes = sizes, classes
        self._answers, self._drafted = answers, iter(drafted)
        self._texts = np.zeros((sizes.replicas, sizes.slots, sizes.max_length), np.int32)

    def put(self, entry: c.Entry, drafts: bool) -> None:
        for replica, places in enumerate(entry.slot):
            here = places < self._sizes.slots
            self._texts[replica, places[here]] = entry.tokens[replica, here]

    def teach(self, pieces: Sequence[tuple], rates: np.ndarray) -> None:
        """Does nothing: the twin does not draft."""

    def prefill(self, tiles: np.ndarray) -> None:
        """Does nothing: the twin has no keys and values."""

    def exchange(self, params: Any, finite: Any = None) -> None:
        """Does nothing: the twin's weights are a version number."""

    def relayout(self, layout: Layout) -> None:
        """Accepts layouts with the twin's number of replicas; see RowDevice."""
        if layout.replicas != self._sizes.replicas:
            raise ValueError(f"the twin has one layout, with {self._sizes.replicas} replicas; {layout} was requested")

    def dispatch(self, order: DispatchOrder) -> Callable[[], c.DispatchResult]:
        blocks = [self._block(order.version, *each) for each in zip(order.sequences, order.packed, self._texts)]
        emit, steps = self._sizes.emit, 0
        while steps < self._sizes.steps_per_dispatch and _goes_on(blocks, emit, order.freed):
            for block in blocks:
                _step(block, steps, order.rows, self._sizes, order.drafts)
            steps += 1
        result = self._result(blocks, steps)
        result = self._with_drafts(result, order) if order.drafts else result
        return lambda: result

    def _block(
        self, version: int, slots: Sequence[SequenceState | None], packed: np.ndarray, text: np.ndarray
    ) -> Block:
        S, T = text.shape
        truth, leaps = np.full((S, T), -1, np.int32), np.ones((S, T), np.int32)
        for slot in np.flatnonzero(packed[:, c.ACTIVE]):
            sequence = slots[packed[slot, c.LEADER]]
            answer = self._answers(sequence.request, version)
            _fits(sequence, answer)
            mine = slice(sequence.prompt_length, sequence.prompt_length + answer.tokens.size)
            truth[slot, mine] = answer.tokens
            if answer.ends is not None:
                places = np.arange(answer.tokens.size)
                leaps[slot, mine] = answer.ends[np.searchsorted(answer.ends, places, side="right")] - places
        return Block(
            packed,
            text,
            truth,
            leaps,
            *(packed[:, at].copy() for at in (c.NUM_TOKENS, c.NUM_COMPUTED, c.CANDIDATE_END)),
            np.zeros(S, bool),
            np.zeros((S, self._sizes.emit), np.int32),
            np.zeros(len(c.USES), np.int64),
        )

    def _result(self, blocks: list[Block], steps: int) -> c.DispatchResult:
        replicas, emit = self._sizes.replicas, self._sizes.emit
        records = self._sizes.kept_ids * emit
        out = np.zeros((replicas, self._sizes.slots, c.OUT_WINDOW + c.BLOCKS * emit + records), np.int32)
        for row, block in zip(out, blocks):
            row[:, : c.OUT_WINDOW] = np.stack([block.known, block.filled, block.guessed, block.done], axis=-1)
            where = np.minimum(block.packed[:, c.NUM_TOKENS, None] + np.arange(emit), self._sizes.max_length - 1)
            tokens, zeros = np.take_along_axis(block.text, where, axis=1), np.zeros_like(block.stamps)
            none = np.full((len(row), records), -1, np.int32)
            row[:, c.OUT_WINDOW :] = np.concatenate([tokens, zeros, zeros, block.stamps, tokens, none], axis=1)
        return c.DispatchResult(
            out,
            np.stack([block.uses for block in blocks]),
            steps,
            np.zeros((replicas, c.OFFERS), np.int64),
            np.zeros(replicas, np.int64),
            np.zeros((replicas, 2, self._classes), np.int64),
        )

    def _with_drafts(self, result: c.DispatchResult, order: DispatchOrder) -> c.DispatchResult:
        """Adds the logged counts of drafts to a result.

        Raises:
          ValueError: the next logged dispatch is not this one.
        """
        logged = next(self._drafted, None)
        found = logged and (logged.purpose, logged.clock, logged.rows, logged.steps, *logged.uses[:2])
        mine = (order.purpose, order.clock, order.rows, result.steps, *result.uses.sum(axis=0)[:2].tolist())
        if found != mine:
            raise ValueError(
                f"the log of dispatches is of another engine: here the next that drafts is {mine}, there {found} "
                "(purpose, clock, rows, steps, rows that prefill, rows that decode)"
            )
        parts = (result.uses, result.offers, result.won, result.counts)
        uses, offers, won, counts = (np.zeros_like(part) for part in parts)
        uses[0], offers[0], won[0], counts[0] = logged.uses, logged.offers, logged.won, logged.counts
        return result._replace(uses=uses, offers=offers, won=won, counts=counts)


def _goes_on(blocks: list[Block], emit: int, freed: int) -> bool:
    """Returns whether the dispatch takes another step."""
    going = [block.going for block in blocks]
    stalled = any(np.any(g & (block.known > block.bound(emit))) for g, block in zip(going, blocks))
    watch = [block.packed[:, c.WATCH] for block in blocks]
    ready = any(np.any((w > 0) & (block.filled >= w)) for w, block in zip(watch, blocks))
    return any(g.any() for g in going) and not stalled and not ready and max(b.done.sum() for b in blocks) < freed


def _step(block: Block, number: int, rows: int, sizes: c.EngineSettings, drafts: bool) -> None:
    """Executes one step of one replica, as `_step` of engine/row_program.py does, without the model."""
    packed, known = block.packed, block.known
    S, going, bound = known.size, block.going, block.bound(sizes.emit)
    forced = np.where(going & (known <= bound), known - block.filled, 0)
    candidates = np.maximum(np.minimum(block.guessed, bound) - known, 0)
    plan = row_plan.plan(
        np,
        forced,
        candidates,
        np.zeros((S, 0), np.float32),
        packed[:, c.ORDER],
        rows=rows,
        heads=min(sizes.head_rows, rows),
    )
    slot = plan.head_slot
    after = np.where(plan.head_real, (block.filled[plan.slot] + plan.offset)[plan.head_row] + 1, 0)
    place = np.minimum(after, sizes.max_length - 1)
    sampled = block.truth[slot, place]
    guess = np.where(after < block.guessed[slot], block.text[slot, place], -1)
    ended = np.any(sampled[:, None] == packed[slot, c.FIRST_END : c.TABLE], axis=1)
    match = (sampled == guess) & ~ended & plan.head_real
    before = np.cumsum(~match) - ~match
    counts = plan.head_real & (before == before[np.arange(match.size) - plan.head_rank])
    assert np.all(sampled[counts] >= 0), "the program samples behind the end of a rollout"
    gained, missed = (np.bincount(slot[which], minlength=S) for which in (counts, counts & ~match))
    _settle(block, number, _gains(block, gained, drafts, bound), missed, plan.count, going)
    mine = packed[:, c.LEADER] == np.arange(S)
    heads = (plan.head_real & mine[slot]).sum()
    right = (plan.head_real & mine[slot] & (plan.head_rank > 0) & counts).sum()
    first = (plan.head_real & mine[slot] & (plan.head_rank == 0)).sum()
    led, real = (plan.real & mine[plan.slot]).sum(), plan.real.sum()
    block.uses += np.array([led - heads, first, right, heads - first - right, rows - real, real - led])


def _gains(block: Block, gained: np.ndarray, drafts: bool, bound: np.ndarray) -> np.ndarray:
    """Returns the number of tokens that each slot settles, [S]. Without candidates the log gives this number.

    Raises:
      ValueError: a logged number is larger than the step can settle.
    """
    leap = np.take_along_axis(block.leaps, np.minimum(block.known, block.leaps.shape[1] - 1)[:, None], axis=1)[:, 0]
    leap = np.where((gained > 0) & (block.guessed <= block.known), leap, gained)
    room = np.maximum(bound + 1 - block.known, 1) if drafts else np.maximum(gained, 1)
    if np.any(leap > room):
        slot = int(np.argmax(leap > room))
        raise ValueError(
            f"slot {slot}: by the log a step settles {leap[slot]} tokens from position {block.known[slot]} on, "
            f"here it settles at most {room[slot]}, and {'drafts' if drafts else 'does not draft'}: the log is of "
            "another engine"
        )
    return leap


def _settle(
    block: Block, number: int, gained: np.ndarray, missed: np.ndarray, count: np.ndarray, going: np.ndarray
) -> None:
    packed, known = block.packed, block.known + gained
    places = np.arange(block.text.shape[1])
    np.copyto(block.text, block.truth, where=(places >= block.known[:, None]) & (places < known[:, None]))
    window = packed[:, c.NUM_TOKENS, None] + np.arange(block.stamps.shape[1])
    stamp = 2 * number + (window < known[:, None] - 1)
    np.copyto(block.stamps, stamp, where=(window >= block.known[:, None]) & (window < known[:, None]))
    last = np.take_along_axis(block.truth, np.maximum(known - 1, 0)[:, None], axis=1)
    over = (gained > 0) & np.any(last == packed[:, c.FIRST_END : c.TABLE], axis=1)
    block.filled = np.where(gained > 0, known - 1, block.filled + count)
    block.guessed = np.where(missed > 0, known, np.maximum(block.guessed, known))
    block.done |= going & (over | (known >= packed[:, c.LIMIT]))
    block.known = known


def _fits(sequence: SequenceState, answer: Known) -> None:
    """Raises ValueError if the known rollout does not begin with the request's tokens so far."""
    if sequence.tokens != answer.tokens[: len(sequence.tokens)].tolist():
        raise ValueError(
            f"request {sequence.request.rollout_id}: its {len(sequence.tokens)} tokens are not the beginning of the "
            f"known rollout, of {answer.tokens.size} tokens"
        )


Ends = dict[int, tuple[int, Finish] | None]  # version in use -> (length, finish) of the life. None: parked


def lives(decisions: Iterable[Mapping]) -> dict[RolloutId, Ends]:
    """Returns how each life of every rollout ended, from the lines of scheduler_log.jsonl."""
    out: dict[RolloutId, Ends] = defaultdict(dict)
    commits = version = 0
    for line in decisions:
        if line["event"] == "take":
            commits += line["commit"]
            version = commits if line["publish"] else version
        elif line["event"] == "parked":
            for id, _ in line["ids"]:
                out[RolloutId(*id)][version] = None
        elif line["event"] == "complete":
            out[RolloutId(*line["id"])][version] = (line["tokens"], Finish(line["finish"]))
    return dict(out)


class LoggedTexts:
    """The known rollouts of a run, as the argument `answers` of a RowTwin.

    Args:
      train: all groups that were trained.
      ended: how lives ended, as `lives` returns it.
      evaluations: the groups of each evaluated version.
      drafted: whether one step may have settled several tokens that were no candidates.
      prefix_mode: how deferred rollouts resumed (types.PREFIX_MODES).
    """

    def __init__(
        self,
        train: Sequence[Group],
        ended: Mapping[RolloutId, Ends],
        evaluations: Mapping[int, Sequence[Group]],
        *,
        drafted: bool,
        prefix_mode: str,
    ):
        self._train, self._ended = _by_id(train), ended
        self._evaluations = {version: _by_id(groups) for version, groups in evaluations.items()}
        self._drafted, self._mode = drafted, prefix_mode
        self._known: dict[tuple[RolloutId, int], Known] = {}

    def __call__(self, request: Request, version: int) -> Known:
        """Returns the rollout of the request under this version.

        Raises:
          ValueError: the logs lack the rollout, or the steps in which its drafts were settled.
        """
        key = (request.rollout_id, version)
        if key not in self._known:
            self._known[key] = self._found(request, version)
        return self._known[key]

    def _found(self, request: Request, version: int) -> Known:
        id = request.rollout_id
        if request.purpose == "eval":
            rollout = self._evaluations.get(version, {}).get(id)
            ends = {} if rollout is None else {version: (len(rollout), rollout.finish)}
        else:
            rollout, ends = self._train.get(id), self._ended.get(id, {})
        later = [when for when in ends if when >= version]
        if not later:
            raise ValueError(
                f"{id} has no end in the logs under version {version} or a later one: the twin asks for what the "
                "run never did"
            )
        life = max(ends) if self._mode == "recompute" else min(later)  # recompute: each life continues the one before
        last = life == max(ends)
        if self._drafted and not (last and rollout):
            raise ValueError(
                f"{id} was deferred and resumed by {self._mode!r}, or was not trained: no log has the steps that "
                "its drafts took then, so this run cannot be played again"
            )
        if ends[life] is None:
            return Known(np.full(request.max_tokens, _others(request.sampling)[0], np.int32))
        tokens = stand_ins(*ends[life], request.sampling)
        return self._as_stepped(rollout, tokens, request.sampling, len(ends) > 1) if last and rollout else Known(tokens)

    def _as_stepped(self, rollout: Rollout, tokens: np.ndarray, sampling: Sampling, again: bool) -> Known:
        """Makes the first rejected candidate differ, and adds the number of tokens after each logged step."""
        if len(rollout) != tokens.size:
            raise ValueError(
                f"{rollout.id} ends with {tokens.size} tokens by the log of decisions, with {len(rollout)} by "
                "that of rollouts"
            )
        if again and self._mode == "verify" and not rollout.drafted[:-1].all():
            tokens[int(np.argmin(rollout.drafted[:-1]))] = _others(sampling)[1]
        if not self._drafted:
            return Known(tokens)
        return Known(tokens, np.append(np.flatnonzero(np.diff(rollout.clocks)) + 1, tokens.size))


def _by_id(groups: Sequence[Group]) -> dict[RolloutId, Rollout]:
    return {rollout.id: rollout for group in groups for rollout in group.rollouts}


def _others(sampling: Sampling) -> list[int]:
    """Returns two tokens that do not end a rollout."""
    ends = sampling.eos_ids + sampling.stop_ids
    return [id for id in range(len(ends) + 2) if id not in ends][:2]


def stand_ins(length: int, finish: Finish, sampling: Sampling) -> np.ndarray:
    """Returns stand-in tokens, int32[length], that end in the same way as the rollout.

    Raises:
      ValueError: no token shows how the rollout ended (a stop string).
    """
    tokens = np.full(length, _others(sampling)[0], np.int32)
    if finish is not Finish.LENGTH:
        last = {Finish.EOS: sampling.eos_ids, Finish.STOP: sampling.stop_ids}.get(finish)
        if not last:
            raise ValueError(
                f"a rollout ended by {finish.value!r} and the law names no token that does so: what ended it is "
                "not known from its length"
            )
        tokens[-1] = last[0]
    return tokens


class LoggedRewards:
    """A protocols.Rewards that gives every group its logged scores, from the lines of scheduler_log.jsonl."""

    def __init__(self, decisions: Iterable[Mapping]):
        self._scored = {tuple(line["group"]): line for line in decisions if line["event"] == "scored"}

    def start(self, rollout: Rollout) -> None:
        """Does nothing: scores come from the log."""

    def join(self, group: Group) -> Group:
        """Returns the group with its logged scores.

        Raises:
          ValueError: no group of this prompt, epoch and size was scored.
        """
        line = self._scored.get((group.rollouts[0].id.epoch, group.prompt.id), {"scored": ()})
        if len(line["scored"]) != len(group.rollouts):
            raise ValueError(f"the group of {group.rollouts[0].id} and {len(group.rollouts)} rollouts was never scored")
        return dataclasses.replace(
            group, rewards=line["rewards"], scored=line["scored"], components={"acc": line["accuracies"]}
        )

    def metrics(self) -> dict[str, float]:
        return {}
