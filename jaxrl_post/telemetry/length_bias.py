"""Measures length bias: lengths of launched, trained and dropped rollouts.

A scheduler that drops slow rollouts trains on shorter rollouts than the policy gives. RollPacker (arXiv 2509.21009,
sections 4 and 5) claims that it only reorders them. The meter puts every launched rollout into one of three boxes:

  waiting  running, parked, or finished and not trained on
  dropped  drawn again, or still waiting 64 epochs later
  trained  used by the learner

A rollout that left the engine unfinished counts with the tokens that it had. So the true launched mean is at least the
reported one, and the true shift towards short rollouts at least as large. A simulator knows every length and passes it
in.

Invariant: a box is a function of the calls and their order. The meter reads no clock and changes nothing. It refuses a
rollout longer than 2**19 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_post.ring.types import Group, Request, Rollout, RolloutId

WAITING, DROPPED, TRAINED, LEARNED = range(4)  # LEARNED: trained, by final length. Others: by launched length
_FORGOTTEN = 64  # epochs
_BINS = 40
_COUNTERS = (
    "num_tokens_generated",
    "num_tokens_wasted",
    "num_tokens_recomputed",
    "num_rollouts_launched",
    "num_rollouts_deferred",
)


def bin_of(length: int) -> int:
    """Returns the bin of a length, with two bins per octave: 0 for no tokens, else floor(2 log2(length)) + 1."""
    return (length * length).bit_length()


def edges() -> list[int]:
    """Returns the smallest length of each bin."""
    return [0] + [next(n for n in range(int(2 ** (k / 2)), 1 << 20) if bin_of(n) > k) for k in range(_BINS - 1)]


@dataclass(slots=True)
class _Entry:
    """A launched rollout that is neither trained on nor dropped yet.

    - `length`: its launched length, in tokens.
    - `had`: tokens when it last left the engine.
    - `carried`: how many of these tokens need not be generated again.
    - `candidates`: tokens still to be verified, or None.
    - `left`: the version at which it was parked, or -1.
    - `deferrals`: how often it was parked and continued under newer weights.
    """

    length: int
    had: int = 0
    carried: int = 0
    candidates: np.ndarray | None = None
    left: int = -1
    deferrals: int = 0


class BiasMeter:
    """A listener of the ring. `trained` must be called for every group before the learner gets it.

    `length(request)`: the length that the rollout would reach under the weights in use. None: not known.
    """

    def __init__(self, length: Callable[[Request], int] | None = None):
        self._length = length
        self._rows: dict[str, int] = {}  # prompt -> its row of the arrays
        self._counts = np.zeros((64, 4, _BINS), np.int32)
        self._sums = np.zeros((64, 4), np.int64)  # of lengths
        self._pooled, self._tokens = np.zeros((4, _BINS), np.int64), [0, 0, 0, 0]
        self._waiting: dict[str, dict[RolloutId, _Entry]] = {}
        self._since = dict.fromkeys(_COUNTERS, 0)
        self._total = dict.fromkeys(_COUNTERS, 0)
        self._version, self._longest_park, self._most_deferrals = 0, 0, 0
        self._step: list[int] = []  # lengths

    # ---- events of a rollout

    def launched(self, requests: Sequence[Request], clock: int, version: int) -> None:
        self._version = version
        for request in requests:
            mine = self._waiting.setdefault(request.prompt.id, {})
            if request.rollout_id in mine:
                self._goes_on(mine[request.rollout_id], request)
            else:
                self._forget(mine, request.rollout_id)
                mine[request.rollout_id] = _Entry(length=self._length(request) if self._length else 0)
                self._put(request.prompt.id, WAITING, mine[request.rollout_id].length)
                self._count("num_rollouts_launched", 1)

    def _forget(self, mine: dict[RolloutId, _Entry], id: RolloutId) -> None:
        """Drops earlier attempts of a rollout that is drawn again, and every rollout launched at least 64 epochs ago.

        A group that is deferred, or that waits for its round to fill, never gets that old.
        """
        for other in [o for o in mine if o.epoch <= id.epoch - _FORGOTTEN or o[:5] == id[:5]]:
            self._count("num_tokens_wasted", mine[other].had)
            self._drop(mine, other)

    def _drop(self, mine: dict[RolloutId, _Entry], id: RolloutId) -> None:
        entry = mine.pop(id)
        self._put(id.prompt_id, WAITING, entry.length, -1)
        self._put(id.prompt_id, DROPPED, entry.length)

    def _recovered(self, rollout: Rollout) -> _Entry:
        """Moves a rollout back to waiting that was dropped but is trained on. Returns its new entry."""
        self._put(rollout.prompt.id, DROPPED, len(rollout), -1)
        self._put(rollout.prompt.id, WAITING, len(rollout))
        self._count("num_tokens_wasted", -len(rollout))
        return _Entry(length=len(rollout), had=len(rollout))

    def _goes_on(self, entry: _Entry, request: Request) -> None:
        if self._version > entry.left >= 0:
            entry.deferrals += 1
            self._most_deferrals = max(self._most_deferrals, entry.deferrals)
            self._count("num_rollouts_deferred", 1)
        mode = "restart" if request.prefix is None else request.prefix_mode
        entry.carried, entry.candidates = entry.had if mode == "recompute" else 0, None
        if mode == "verify":  # the number of accepted candidates is known when the rollout leaves
            entry.candidates = request.prefix.tokens
        elif mode == "restart":
            self._count("num_tokens_wasted", entry.had)
        else:
            self._count("num_tokens_recomputed", entry.had)

    def stepped(self, finished: Sequence[Rollout], clock: int) -> None:
        for rollout in finished:
            self._leaves(rollout)

    def stopped(self, rollouts: Sequence[Rollout], clock: int, version: int) -> None:
        self._version = version
        for rollout in rollouts:
            self._leaves(rollout).left = version

    def _leaves(self, rollout: Rollout) -> _Entry:
        """Counts the tokens generated since the rollout entered the engine. Returns its updated entry."""
        entry = self._waiting[rollout.prompt.id][rollout.id]
        if entry.candidates is not None:
            entry.carried = _alike(entry.candidates, rollout.tokens)
            self._count("num_tokens_recomputed", entry.carried)
            self._count("num_tokens_wasted", entry.had - entry.carried)
        self._count("num_tokens_generated", len(rollout) - entry.carried)
        entry.had, entry.carried, entry.candidates = len(rollout), 0, None
        if self._length is None and len(rollout) != entry.length:
            self._put(rollout.prompt.id, WAITING, entry.length, -1)
            self._put(rollout.prompt.id, WAITING, len(rollout))
            entry.length = len(rollout)
        return entry

    def trained(self, groups: Sequence[Group]) -> None:
        """Moves the rollouts of these groups to the trained box. Drops other rollouts launched for the same groups."""
        for group in groups:
            mine = self._waiting[group.prompt.id]
            for rollout in group.rollouts:
                entry = mine.pop(rollout.id, None) or self._recovered(rollout)
                self._put(group.prompt.id, WAITING, entry.length, -1)
                self._put(group.prompt.id, TRAINED, entry.length)
                self._put(group.prompt.id, LEARNED, len(rollout))
                self._longest_park = max(self._longest_park, self._version - entry.left if entry.left >= 0 else 0)
                self._step.append(len(rollout))
            for other in [other for other in mine if other.epoch == group.rollouts[0].id.epoch]:
                self._count("num_tokens_wasted", mine[other].had)
                self._drop(mine, other)

    def _put(self, prompt_id: str, box: int, length: int, times: int = 1) -> None:
        row = self._rows.setdefault(prompt_id, len(self._rows))
        if row == len(self._counts):
            self._counts, self._sums = (np.concatenate([x, np.zeros_like(x)]) for x in (self._counts, self._sums))
        at = bin_of(length)
        self._counts[row, box, at] += times
        self._sums[row, box] += times * length
        self._pooled[box, at] += times
        self._tokens[box] += times * length

    def _count(self, name: str, number: int) -> None:
        self._since[name] += number
        self._total[name] += number

    # ---- figures

    def metrics(self, kind: str) -> dict[str, float]:
        """Returns counts since the last call. Also returns lengths in tokens and shifts over the whole run so far.

        - shift: trained mean / launched mean - 1, where launched means trained or dropped. It is 0 if nothing was
          dropped and no weights changed between launch and end.
        - shift_so_far: the same, with waiting rollouts counted as launched.
        - histogram_distance: total variation between the two histograms of `shift`.
        - step_length: mean length of this step's rollouts, under the `kind` of its round (short or long).
        - longest_park: most optimizer steps between parking and training.
        """
        since, self._since = self._since, dict.fromkeys(_COUNTERS, 0)
        step, self._step = self._step, []
        out = {f"bias/{name}": float(number) for name, number in since.items()}
        out |= {f"bias/{name}": value for name, value in self._figures().items()}
        return out | ({f"bias/step_length/{kind}": float(np.mean(step))} if step else {})

    def _figures(self) -> dict[str, float]:
        counts, tokens = self._pooled.sum(axis=1), self._tokens
        out = {
            "num_untrained": float(counts[WAITING]),
            "num_dropped": float(counts[DROPPED]),
            "longest_park": float(self._longest_park),
            "most_deferrals": float(self._most_deferrals),
        }
        launched = sum(tokens[:3]) / max(int(counts[:3].sum()), 1)
        if counts[TRAINED]:
            settled = (tokens[TRAINED] + tokens[DROPPED]) / int(counts[TRAINED] + counts[DROPPED])
            trained = tokens[LEARNED] / int(counts[TRAINED])
            out |= {
                "launched_length/mean": launched,
                "trained_length/mean": trained,
                "shift": trained / max(settled, 1e-9) - 1,
                "shift_so_far": trained / max(launched, 1e-9) - 1,
                "histogram_distance": _distance(self._pooled),
            }
        return out

    def report(self) -> dict:
        """Returns the figures and totals of `metrics` at the end of a run, with the pooled histograms.

        - prompt_shift/mean: mean shift over the prompts that were trained on.
        - num_prompts_that_differ: how many of these prompts have different histograms of trained and launched lengths.
        - edges: the smallest length of each bin.
        """
        done = self._counts[: len(self._rows), TRAINED].sum(axis=1) > 0
        counts, sums = self._counts[: len(self._rows)][done], self._sums[: len(self._rows)][done]
        settled = counts[:, TRAINED] + counts[:, DROPPED]
        shifts = _mean(sums[:, LEARNED], counts[:, LEARNED]) / _mean(sums[:, TRAINED] + sums[:, DROPPED], settled) - 1
        names = ("waiting", "dropped", "trained_as_launched", "trained")
        return (
            self._total
            | self._figures()
            | {
                "num_prompts_trained": len(counts),
                "num_prompts_that_differ": int(np.any(counts[:, LEARNED] != settled, axis=1).sum()),
                "prompt_shift/mean": float(shifts.mean()) if len(counts) else 0.0,
                "histograms": {"edges": edges()} | {name: box.tolist() for name, box in zip(names, self._pooled)},
            }
        )

    # ---- checkpoints

    def state_dict(self) -> dict:
        """Returns the state for a checkpoint. Must be called after `metrics`."""
        entries = [(id, entry) for mine in self._waiting.values() for id, entry in mine.items()]
        texts = [np.zeros(0, np.int32) if e.candidates is None else e.candidates for _, e in entries]
        return {
            "prompts": list(self._rows),
            "counts": self._counts[: len(self._rows)].copy(),
            "sums": self._sums[: len(self._rows)].copy(),
            "total": dict(self._total),
            "since": dict(self._since),
            "version": self._version,
            "longest_park": self._longest_park,
            "most_deferrals": self._most_deferrals,
            "ids": [list(id) for id, _ in entries],
            "sizes": [text.size for text in texts],
            "numbers": [
                [e.length, e.had, e.carried, e.left, e.deferrals, int(e.candidates is not None)] for _, e in entries
            ],
            "candidates": np.concatenate([np.zeros(0, np.int32), *texts]),
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Restores the state of a checkpoint."""
        self._rows = {prompt_id: row for row, prompt_id in enumerate(state["prompts"])}
        self._counts = np.zeros((max(64, len(self._rows)), 4, _BINS), np.int32)
        self._sums = np.zeros((len(self._counts), 4), np.int64)
        self._counts[: len(self._rows)], self._sums[: len(self._rows)] = state["counts"], state["sums"]
        self._pooled, self._tokens = self._counts.sum(axis=0, dtype=np.int64), self._sums.sum(axis=0).tolist()
        self._total, self._since = ({name: state[kind][name] for name in _COUNTERS} for kind in ("total", "since"))
        self._version, self._longest_park = state["version"], state["longest_park"]
        self._most_deferrals, self._waiting, at = state["most_deferrals"], {}, 0
        for id, size, numbers in zip(state["ids"], state["sizes"], state["numbers"], strict=True):
            length, had, carried, left, deferrals, verified = numbers
            text = np.array(state["candidates"][at : at + size], np.int32) if verified else None
            self._waiting.setdefault(id[3], {})[RolloutId(*id)] = _Entry(length, had, carried, text, left, deferrals)
            at += size


def _alike(one: np.ndarray, two: np.ndarray) -> int:
    """Returns the length of the common prefix."""
    size = min(one.size, two.size)
    differ = np.nonzero(one[:size] != two[:size])[0]
    return int(differ[0]) if differ.size else size


def _mean(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the mean length per prompt. A sum of 0 tokens counts as one token, so that no divisor is 0."""
    return np.maximum(sums, 1) / counts.sum(axis=1)


def _distance(pooled: np.ndarray) -> float:
    settled = pooled[TRAINED] + pooled[DROPPED]
    return float(np.abs(settled / settled.sum() - pooled[LEARNED] / pooled[LEARNED].sum()).sum() / 2)
