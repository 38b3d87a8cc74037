"""The contracts between rooms. The docstring of each method is its contract; the loop calls every one of them.

Nothing inherits from these classes: an object that has the methods satisfies the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jaxrl_post.types import Capacity, Group, Layout, Part, Prompt, Request, Rollout, RolloutId, Stop


class Engine(Protocol):
    """Turns requests into rollouts. A rollout is a function of (weights, prompt, seed, sampling), never of its company."""

    @property
    def capacity(self) -> Capacity:
        """Per replica: free slots that no waiting request will take, at least 0, and free pages."""

    @property
    def clock(self) -> int:
        """Engine steps taken so far for training rollouts; evaluation does not advance it."""

    @property
    def version(self) -> int:
        """Of the weights that the next step will use."""

    @property
    def pending(self) -> int:
        """Requests submitted and not yet returned or parked; of evaluation alone while any of those is left."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests in this order. ValueError, with nothing queued, when one can never fit."""

    def park(self, ids: Iterable[RolloutId]) -> list[Rollout]:
        """Takes them out and returns what they have (finish PARKED), sorted by id. Unknown ids are no-ops."""

    def step(self) -> list[Rollout]:
        """One dispatch of several device steps; what finished, by (finish_clock, id). While evaluation requests are
        pending only they advance. It ends early only on the state itself, never on time."""

    def swap(self, params: Any, version: int) -> None:
        """Uses `params` from the next step on, and calls them `version`, which must be greater than the current one.
        ValueError when tree, shape or version are wrong; then the old weights stay."""

    def relayout(self, layout: Layout) -> None:
        """Lies as `layout` says from the next step on: other replicas, no other weights and version, clocks and counters go
        on. Whatever is pending re-enters as in `recompute`; samples of a prompt that shared a replica still do. Of the
        present layout: does nothing. ValueError, with nothing changed, for one that was not compiled at the start."""

    def state_dict(self) -> Mapping:
        """For a checkpoint, between swap and step: clocks, counters, and every request with its tokens, as plain values and
        arrays. It is a boundary: all that run go back to waiting and re-enter as in `recompute`, so that this engine and
        one that loads the state go on alike."""

    def load_state_dict(self, state: Mapping, prompts: Mapping[str, Prompt]) -> None:
        """Takes the place of everything but weights and version. `prompts`: those of the data, by id. ValueError when the
        state belongs to an engine that would choose other row sizes."""


class Scheduler(Protocol):
    """Decides what is generated and what is trained, from counts alone: no clock of the wall, no I/O, no jax."""

    def admit(self, capacity: Capacity, clock: int) -> list[Request]:
        """New requests, a group's samples side by side."""

    def complete(self, rollout: Rollout) -> Stop:
        """Takes a finished rollout in; says which others need not go on."""

    def parked(self, rollouts: Sequence[Rollout]) -> None:
        """Takes back what `Stop.park` asked for."""

    def due(self) -> list[Group]:
        """Whole groups whose score is needed now, in admission order, unscored."""

    def scored(self, group: Group) -> None:
        """Takes a scored group back. Filters (dynamic sampling) act here."""

    def take(self) -> list[Part]:
        """What can be trained on now: groups in admission order, rollouts by sample index, never by completion. Asked again
        until there is nothing; after the last commit of what it gives at once comes a publish."""

    def layout(self) -> Layout | None:
        """Asked before every `admit`: how the engine shall lie from now on; None: as it does. It changes between two rounds, or
        within one to fewer replicas of the same kind and back, when all that it admitted is with the engine."""

    def held(self) -> Sequence[Rollout]:
        """Finished rollouts whose group is not scored: graders that know of none of them, after `load_state_dict`, must be
        started on each."""

    def state_dict(self) -> Mapping:
        """For a checkpoint, after a part that publishes: everything that later decisions depend on, as plain values and
        arrays."""

    def load_state_dict(self, state: Mapping) -> None:
        """Decides from now on as the one that gave the state."""


class Learner(Protocol):
    """Turns groups into new weights."""

    @property
    def step(self) -> int:
        """Optimizer steps so far: the version of `params`. A commit skipped for NaN advances it too."""

    @property
    def params(self) -> Any:
        """The policy's weights, in the learner's layout."""

    def prepare(self, groups: Sequence[Group]) -> None:
        """Reference log-probs and advantages of these groups, once, at the weights of the round's start; kept by rollout id
        until groups come that are fresh after a commit. So are the old log-probs, which are of those weights too and are
        computed at the latest when a commit is about to move them. Of no groups: does nothing."""

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Adds an unnormalised gradient sum and its counts. Of no groups: does nothing."""

    def commit(self) -> Mapping[str, Any]:
        """Divides once and takes an optimizer step; metrics as device scalars. The arrays of `params` are used up: a round
        may commit several times, and an engine that shares them gets the new ones before it is stepped again."""


class Rewards(Protocol):
    """Pure functions in killable processes."""

    def start(self, rollout: Rollout) -> None:
        """Begins to score it. Returns at once."""

    def join(self, group: Group) -> Group:
        """The group with its rewards. Waits, with a deadline. The judged program over its limit is a verdict; a grader
        that fails twice leaves `scored` False."""


class Source(Protocol):
    """A part of the run that counts: engine, scheduler, rewards, history, drafting."""

    def metrics(self) -> Mapping[str, float]:
        """Counters since the last call, by metric name."""


class Ring(Protocol):
    """What the loop says while it turns: what happens, whose seconds a call counts as, and which calls can wait."""

    def tell(self, event: str, *what: Any) -> None:
        """Tells an event to its listeners. They measure the run and change nothing that it computes."""

    def call(self, phase: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the function and returns its result. Its seconds count as `phase`."""

    def later(self, phase: str, function: Callable[..., object], *arguments: Any) -> None:
        """Calls the function now, or defers the call until `flush`. Deferred calls keep their order."""

    def flush(self) -> None:
        """Makes every deferred call: before a call that needs one of them, and while a dispatch is under way."""
