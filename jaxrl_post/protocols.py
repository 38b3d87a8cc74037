"""The contracts between rooms. The docstring of each method is its contract, and the loop calls every method.

Nothing inherits from these classes: an object that has the methods satisfies the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jaxrl_post.types import Capacity, Group, Layout, Part, Prompt, Request, Rollout, RolloutId, Stop


class Engine(Protocol):
    """Turns requests into rollouts. A rollout is a function of (weights, prompt, seed, sampling), never of other
    requests.
    """

    @property
    def capacity(self) -> Capacity:
        """Per replica: free slots that no waiting request will take, at least 0, and free pages."""

    @property
    def clock(self) -> int:
        """Engine steps taken so far for training rollouts; evaluation does not advance it."""

    @property
    def version(self) -> int:
        """Version of the weights that the next step will use."""

    @property
    def pending(self) -> int:
        """Requests submitted and not yet returned or parked. While evaluation requests are pending, only those count."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests in this order. ValueError, with nothing queued, when one of them can never fit."""

    def park(self, ids: Iterable[RolloutId]) -> list[Rollout]:
        """Takes rollouts out and returns them unfinished (finish PARKED), sorted by id. Unknown ids are no-ops."""

    def step(self) -> list[Rollout]:
        """Runs one dispatch of several device steps. Returns finished rollouts, by (finish_clock, id).

        While evaluation requests are pending, only they advance. A dispatch ends early only on the state itself, never
        on time.
        """

    def swap(self, params: Any, version: int) -> None:
        """Uses `params` from the next step on, as `version`, which must be greater than the current one.

        ValueError when tree, shape or version are wrong; then the old weights stay.
        """

    def relayout(self, layout: Layout) -> None:
        """Uses another layout from the next step on. Weights, version, clocks and counters are kept.

        Pending requests re-enter as in `recompute`. Samples of a prompt that shared a replica still do. The present
        layout is a no-op. ValueError, with nothing changed, for a layout that was not compiled at start-up.
        """

    def state_dict(self) -> Mapping:
        """Returns clocks, counters and every request with its tokens, as plain values and arrays, between swap and
        step.

        Saving is a boundary: all running requests go back to waiting and re-enter as in `recompute`. So this engine
        and one that loads the state continue alike.
        """

    def load_state_dict(self, state: Mapping, prompts: Mapping[str, Prompt]) -> None:
        """Replaces everything but weights and version. `prompts`: those of the data, by id.

        ValueError when the state belongs to an engine that would choose other row sizes.
        """


class Scheduler(Protocol):
    """Decides what is generated and what is trained, from counts alone: no wall clock, no I/O, no jax."""

    def admit(self, capacity: Capacity, clock: int) -> list[Request]:
        """Returns new requests, the samples of a group side by side."""

    def complete(self, rollout: Rollout) -> Stop:
        """Takes in a finished rollout. Returns which other rollouts to park."""

    def parked(self, rollouts: Sequence[Rollout]) -> None:
        """Takes back the rollouts that `Stop.park` asked for."""

    def due(self) -> list[Group]:
        """Returns complete groups whose score is needed now, in admission order, unscored."""

    def scored(self, group: Group) -> None:
        """Takes back a scored group. Filters (dynamic sampling) act here."""

    def take(self) -> list[Part]:
        """Returns parts to train on now: groups in admission order, rollouts by sample index, never by completion.

        It is called until it returns nothing. The last commit of the parts returned at once is followed by a publish.
        """

    def layout(self) -> Layout | None:
        """Returns the engine's layout from now on, or None for no change. It is asked before every `admit`.

        The layout changes between two rounds. Within a round it may change to fewer replicas of the same kind and
        back, while all admitted requests are with the engine.
        """

    def held(self) -> Sequence[Rollout]:
        """Returns finished rollouts whose group is not scored. After `load_state_dict`, graders must be started on
        each.
        """

    def state_dict(self) -> Mapping:
        """Returns everything that later decisions depend on, as plain values and arrays, after a part that publishes."""

    def load_state_dict(self, state: Mapping) -> None:
        """Continues as the scheduler that returned the state."""


class Learner(Protocol):
    """Turns groups into new weights."""

    @property
    def step(self) -> int:
        """Optimizer steps so far: the version of `params`. A commit skipped for NaN counts too."""

    @property
    def params(self) -> Any:
        """The policy's weights, in the learner's layout."""

    def prepare(self, groups: Sequence[Group]) -> None:
        """Computes reference log-probs and advantages of these groups, once, at the weights of the round's start.

        They are kept by rollout id until the first fresh groups after a commit. Old log-probs are of the same weights;
        they are computed at the latest before a commit moves the weights. No groups: does nothing.
        """

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Adds an unnormalised gradient sum and its counts. No groups: does nothing."""

    def commit(self) -> Mapping[str, Any]:
        """Divides once and takes an optimizer step. Returns metrics as device scalars.

        The old arrays of `params` are donated. A round may commit several times; an engine that shares the arrays gets
        the new ones before its next step.
        """


class Rewards(Protocol):
    """Pure functions in killable processes."""

    def start(self, rollout: Rollout) -> None:
        """Starts to score a rollout. Returns at once."""

    def join(self, group: Group) -> Group:
        """Returns the group with its rewards. Waits, with a deadline.

        The judged program over its limit is a verdict. A grader that fails twice leaves `scored` False.
        """


class Source(Protocol):
    """A part of the run that counts: engine, scheduler, rewards, history, drafting."""

    def metrics(self) -> Mapping[str, float]:
        """Counters since the last call, by metric name."""


class Ring(Protocol):
    """What the loop calls while it turns: it tells events, times calls by phase, and defers calls that can wait."""

    def tell(self, event: str, *what: Any) -> None:
        """Tells an event to its listeners. They measure the run and change nothing that it computes."""

    def call(self, phase: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the function and returns its result. Its seconds count as `phase`."""

    def later(self, phase: str, function: Callable[..., object], *arguments: Any) -> None:
        """Calls the function now, or defers the call until `flush`. Deferred calls keep their order."""

    def flush(self) -> None:
        """Makes every deferred call: before a call that needs one of them, and while a dispatch is under way."""
