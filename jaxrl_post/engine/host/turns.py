"""Engines around another one: with conversations of several turns, and with a judge in the free slots.

Between the turns of a rollout an environment speaks. The engine ends a rollout at the end of a turn, and its slot is free. A
fixed number of engine steps later the observed tokens are joined, and the rollout enters again as its own prefix. If nothing
else can run, it enters at once. The ring waits here for an environment that is late.

Invariant: when a turn is joined depends on counts alone, so a late environment never changes an order. Sampled tokens stay
as they are. The noise of a token follows from its position in the whole conversation. So a conversation is a function of
weights, prompt, seed and environment. Without environment and judge a run uses the engine itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxrl_post.engine.host.sequence import from_request_state, to_request_state
from jaxrl_post.ring.protocols import Engine, Environments, Judge
from jaxrl_post.ring.types import COLUMNS, Capacity, Finish, Layout, Prompt, Request, Rollout, RolloutId

_ENDS = (Finish.EOS, Finish.STOP)


class AroundEngine:
    """A protocols.Engine around another one, to which it hands every call that a subclass does not answer."""

    _engine: Any  # an Engine, and where a subclass knows more, that

    @property
    def capacity(self) -> Capacity:
        return self._engine.capacity

    @property
    def clock(self) -> int:
        return self._engine.clock

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def pending(self) -> int:
        return self._engine.pending

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.submit(requests)

    def park(self, ids: Iterable[RolloutId]) -> list[Rollout]:
        return self._engine.park(ids)

    def step(self) -> list[Rollout]:
        return self._engine.step()

    def swap(self, params: Any, version: int, finite: Any = None) -> None:
        self._engine.swap(params, version, finite)

    def relayout(self, layout: Layout) -> None:
        self._engine.relayout(layout)

    def state_dict(self) -> Mapping:
        return self._engine.state_dict()

    def load_state_dict(self, state: Mapping, prompts: Mapping[str, Prompt]) -> None:
        self._engine.load_state_dict(state, prompts)


class Turns(AroundEngine):
    """A protocols.Engine over another one, whose rollouts are whole conversations.

    A conversation between two turns has no slot. At a swap, turns that have ended keep their tokens and versions.

    Args:
      delay: engine steps from the end of a turn to its continuation. Turns of evaluation are joined before the next
        dispatch.
      steps_cut: whether a turn of training that is cut at the limit of tokens is handed over too. Its conversation ends
        all the same. Those of evaluation always are.
    """

    def __init__(self, engine: Engine, environments: Environments, *, delay: int, steps_cut: bool = True):
        self._engine, self._environments, self._delay = engine, environments, delay
        self._steps_cut = steps_cut
        self._requests: dict[RolloutId, Request] = {}  # of every conversation, without prefix
        self._purposes: Counter[str] = Counter()
        self._waiting: dict[RolloutId, tuple[int, Rollout]] = {}  # between two turns: when it is joined, and its tokens
        self._former: dict[RolloutId, Rollout] = {}  # whose later turns are still to be verified

    # ---- protocols.Engine

    @property
    def pending(self) -> int:
        """Returns the number of conversations in the engine or between two turns; with any of evaluation, only those."""
        return self._purposes[self._purpose]

    @property
    def _purpose(self) -> str:
        return "eval" if self._purposes["eval"] else "train"

    def submit(self, requests: Sequence[Request]) -> None:
        """A prefix that ends a turn waits for its environment."""
        again = [request.rollout_id for request in requests if request.rollout_id in self._waiting]
        if again:
            raise ValueError(f"request {again[0]} is already in the engine")
        ended = {request.rollout_id for request in requests if _ends_turn(request)}
        self._engine.submit([_first(request) for request in requests if request.rollout_id not in ended])
        for request in requests:
            id, prefix = request.rollout_id, request.prefix
            self._requests[id] = replace(request, prefix=None, prefix_mode="recompute")
            self._purposes[request.purpose] += 1
            if prefix is not None and id in ended:
                cut = len(prefix) >= request.max_tokens
                self._wait(replace(prefix, finish=Finish.LENGTH if cut else Finish.TURN), self.clock)
            elif prefix is not None and request.prefix_mode == "verify" and not prefix.sampled.all():
                self._former[id] = prefix

    def park(self, ids: Iterable[RolloutId]) -> list[Rollout]:
        ids = list(ids)
        between = [replace(self._waiting.pop(id)[1], finish=Finish.PARKED) for id in ids if id in self._waiting]
        parked = sorted([*self._engine.park(ids), *between], key=lambda rollout: rollout.id)
        for rollout in parked:
            self._forget(rollout.id)
        return parked

    def step(self) -> list[Rollout]:
        """Continues the conversations that are due, and runs one dispatch. Returns those that have finished."""
        purpose, finished = self._purpose, self._continue()
        # A dispatch behind the last conversation of an evaluation would be one of training.
        ran = self._engine.step() if self._purpose == purpose else []
        for rollout in ran:
            if rollout.finish in _ENDS:
                self._wait(replace(rollout, finish=Finish.TURN), rollout.finish_clock)
            elif rollout.finish is Finish.LENGTH and (self._steps_cut or rollout.id.purpose == "eval"):
                self._wait(rollout, rollout.finish_clock)
            else:
                finished.append(rollout)
        for rollout in finished:
            self._forget(rollout.id)
        return sorted(finished, key=lambda rollout: (rollout.finish_clock, rollout.id))

    def state_dict(self) -> dict:
        """Returns every conversation as plain values and arrays, without what the engine itself holds."""
        return {
            "requests": [to_request_state(request) for request in self._requests.values()],
            "waiting": [[due, rollout.state()] for due, rollout in self._waiting.values()],
            "former": [rollout.state() for rollout in self._former.values()],
        }

    def load_state_dict(self, state: Mapping, prompts: Mapping[str, Prompt]) -> None:
        """Restores what `state_dict` gave. The engine itself is restored before. Turns that wait are handed over again."""
        requests = [from_request_state(one, prompts) for one in state["requests"]]
        self._requests = {request.rollout_id: request for request in requests}
        self._purposes = Counter(request.purpose for request in requests)

        def restored(one: Mapping) -> Rollout:
            return Rollout.restored(one, prompts[RolloutId(*one["id"]).prompt_id])

        self._former = {rollout.id: rollout for rollout in map(restored, state["former"])}
        self._waiting = {}
        for due, one in state["waiting"]:
            rollout = restored(one)
            self._waiting[rollout.id] = due, rollout
            self._environments.start(rollout)

    # ---- turns

    def _wait(self, rollout: Rollout, clock: int) -> None:
        self._waiting[rollout.id] = clock + self._delay, rollout
        self._environments.start(rollout)

    def _continue(self) -> list[Rollout]:
        """Joins the turns that are due, and continues their conversations. Returns those that have ended."""
        ended: list[Rollout] = []
        while due := self._due():
            requests = []
            for rollout in due:
                del self._waiting[rollout.id]
                observed = self._environments.join(rollout)
                most = self._requests[rollout.id].max_tokens
                cut = rollout.finish is Finish.LENGTH or (observed is not None and len(rollout) + len(observed) >= most)
                if observed is None or cut:
                    ended.append(self._ended(rollout, cut))
                else:
                    requests.append(self._continued(rollout.extended(observed, self._now(rollout))))
            self._engine.submit(requests)
        return ended

    def _due(self) -> list[Rollout]:
        """Returns the turns to join now. If nothing runs, those that would be joined first are due."""
        purpose = self._purpose
        mine = [(due, rollout) for id, (due, rollout) in self._waiting.items() if id.purpose == purpose]
        if not mine:
            return []
        idle = len(mine) == self._purposes[purpose]
        now = min(due for due, _ in mine) if idle else self.clock
        return [rollout for due, rollout in sorted(mine, key=_order) if due <= now or purpose == "eval"]

    def _now(self, rollout: Rollout) -> int:
        """Returns the clock of a rollout's purpose, or that of its end, where the engine does not tell it."""
        return max(self.clock, rollout.finish_clock) if rollout.id.purpose == "train" else rollout.finish_clock

    def _ended(self, rollout: Rollout, cut: bool) -> Rollout:
        """Returns a conversation that ends with its last turn. `cut`: that was cut, or what follows would not fit."""
        sampling = self._requests[rollout.id].sampling
        finish = Finish.LENGTH if cut else Finish.EOS if int(rollout.tokens[-1]) in sampling.eos_ids else Finish.STOP
        self._forget(rollout.id)
        return replace(rollout, finish=finish, finish_clock=self._now(rollout))

    def _continued(self, rollout: Rollout) -> Request:
        """Returns the request of the next turn. Tokens that the conversation had before are verified in it."""
        request = self._requests[rollout.id]
        replica = request.replica % len(self.capacity.slots)
        former, mode = self._former.get(rollout.id), "recompute"
        if former is not None:
            begin = len(rollout)
            if len(former) > begin and np.array_equal(former.tokens[:begin], rollout.tokens):
                stop = begin + int(np.argmin(np.append(former.sampled[begin:], False)))
                rollout = rollout.extended(former.tokens[begin:stop].tolist(), rollout.finish_clock, sampled=True)
                mode = "verify"
            else:
                del self._former[rollout.id]
        return replace(request, prefix=rollout, prefix_mode=mode, replica=replica)

    def _forget(self, id: RolloutId) -> None:
        if self._requests.pop(id, None) is not None:
            self._purposes[id.purpose] -= 1
        self._former.pop(id, None)


def _order(waiting: tuple[int, Rollout]) -> tuple[int, RolloutId]:
    return waiting[0], waiting[1].id


def _ends_turn(request: Request) -> bool:
    """Returns whether the prefix is kept and ends with the end of a turn."""
    prefix, sampling = request.prefix, request.sampling
    if prefix is None or request.prefix_mode != "recompute" or not len(prefix) or not prefix.sampled[-1]:
        return False
    ended = prefix.finish is Finish.TURN or len(prefix) >= request.max_tokens
    return ended or int(prefix.tokens[-1]) in sampling.eos_ids + sampling.stop_ids


def _first(request: Request) -> Request:
    """Returns the request for the engine. To be verified, a conversation begins with its first turn alone."""
    prefix = request.prefix
    if prefix is None or request.prefix_mode != "verify" or prefix.sampled.all():
        return request
    end = int(np.argmin(prefix.sampled))
    cut = {name: getattr(prefix, name)[:end] for name in COLUMNS}
    return replace(request, prefix=replace(prefix, **cut))


class Judging(AroundEngine):
    """A protocols.Engine over another one, beside which a judge works: its questions run in slots that the policy leaves free.

    After each dispatch of the policy the judge may make one of its own, on the same devices. Whether it does depends on free
    slots and waiting questions alone, never on time. Neither engine reads the other's state, so a rollout and a verdict are
    what they would be apart. Slots, clock, weights and saved state are the policy's. Open questions are asked again after a resume.
    """

    def __init__(self, engine: Engine, judge: Judge):
        self._engine, self._judge = engine, judge

    def step(self) -> list[Rollout]:
        """Runs one dispatch of the policy, then lets the judge work in the slots that are free."""
        finished = self._engine.step()
        self._judge.work(sum(self._engine.capacity.slots))
        return finished
