"""The protocols between packages. The docstring of each method is its contract. The loop sees only these methods.

No class inherits from these protocols: an object that has the methods satisfies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jaxrl_post.ring.types import Capacity, Group, Layout, Part, Prompt, Request, Rollout, RolloutId, Stop


class Engine(Protocol):
    """Turns requests into rollouts. A rollout is a function of (weights, prompt, seed, sampling), never of other
    requests.
    """

    @property
    def capacity(self) -> Capacity:
        """Returns free slots (at least 0) and free pages of each replica. Slots that waiting requests will take do not
        count.
        """

    @property
    def clock(self) -> int:
        """Returns the engine steps taken so far for training rollouts. Evaluation does not advance the clock."""

    @property
    def version(self) -> int:
        """Returns the version of the weights that the next step will use."""

    @property
    def pending(self) -> int:
        """Returns the number of requests submitted and not yet returned or parked.

        While evaluation requests are pending, only those are counted.
        """

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests in this order.

        Raises:
          ValueError: a request can never fit. Then no request is queued.
        """

    def park(self, ids: Iterable[RolloutId]) -> list[Rollout]:
        """Takes rollouts out and returns them unfinished (finish PARKED), sorted by id. Unknown ids are ignored."""

    def step(self) -> list[Rollout]:
        """Runs one dispatch of several engine steps. Returns finished rollouts, ordered by (finish_clock, id).

        While evaluation requests are pending, only their rollouts advance. Only the engine's state can end a dispatch
        early, never time.
        """

    def swap(self, params: Any, version: int, finite: Any = None) -> None:
        """Uses `params` as `version` from the next step on. `version` must be greater than the current one.

        Args:
          finite: device bool that says whether all trained weights are finite. None: the engine reads them.

        Raises:
          ValueError: the tree, a shape, a weight or the version is wrong. Then the old weights are kept.
        """

    def relayout(self, layout: Layout) -> None:
        """Uses another layout from the next step on. Weights, version, clocks and counters are kept.

        Pending requests re-enter as in `recompute`. Samples of a prompt that shared a replica still share one. The
        present layout is a no-op.

        Raises:
          ValueError: the layout was not compiled at start-up. Then nothing changes.
        """

    def state_dict(self) -> Mapping:
        """Returns clocks, counters and every request with its tokens, as plain values and arrays.

        It is called between `swap` and `step`. Saving takes all running requests out of their slots. They wait and
        re-enter as in `recompute`, so this engine and one that loads the state continue alike.
        """

    def load_state_dict(self, state: Mapping, prompts: Mapping[str, Prompt]) -> None:
        """Replaces everything except weights and version. `prompts`: the data's prompts by id.

        Raises:
          ValueError: the state belongs to an engine that would choose other row sizes.
        """


class Scheduler(Protocol):
    """Decides what is generated and what is trained, from counts alone: no wall clock, no I/O, no jax."""

    def admit(self, capacity: Capacity, clock: int) -> list[Request]:
        """Returns new requests. The samples of a group are adjacent."""

    def complete(self, rollout: Rollout) -> Stop:
        """Takes in a finished rollout. Returns which other rollouts to park."""

    def parked(self, rollouts: Sequence[Rollout]) -> None:
        """Takes back the rollouts that `Stop.park` named."""

    def due(self) -> list[Group]:
        """Returns complete groups whose score is needed now, unscored, in admission order."""

    def scored(self, group: Group) -> None:
        """Takes back a scored group. Filters (dynamic sampling) act here."""

    def take(self) -> list[Part]:
        """Returns parts to train on now: groups in admission order, rollouts by sample index, never by completion.

        It is called until it returns no parts. In each list of parts, a publish follows the last commit.
        """

    def layout(self) -> Layout | None:
        """Returns the engine's layout from now on, or None for no change. It is called before every `admit`.

        The layout changes between two rounds. Within a round it may change to fewer replicas of the same kind and
        back, while all admitted requests are with the engine.
        """

    def held(self) -> Sequence[Rollout]:
        """Returns finished rollouts whose group is not scored.

        After `load_state_dict`, `Rewards.start` must be called for each of them.
        """

    def state_dict(self) -> Mapping:
        """Returns everything that later decisions depend on, as plain values and arrays.

        It is called after a part that publishes.
        """

    def load_state_dict(self, state: Mapping) -> None:
        """Continues as the scheduler that returned the state."""


class Learner(Protocol):
    """Turns groups into new weights."""

    @property
    def step(self) -> int:
        """Returns the optimizer steps so far: the version of `params`. A commit skipped for NaN counts too."""

    @property
    def params(self) -> Any:
        """Returns the policy's weights, in the learner's layout."""

    def prepare(self, groups: Sequence[Group]) -> None:
        """Computes reference log-probs and advantages of these groups, once, at the weights of the round's start.

        The results are kept by rollout id until the first fresh groups after a commit. Old log-probs are of the same
        weights: they are computed before a commit changes the weights. No groups: does nothing.
        """

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Adds an unnormalised gradient sum and its counts. No groups: does nothing."""

    def commit(self) -> Mapping[str, Any]:
        """Divides the sum once and takes an optimizer step. Returns metrics as device scalars.

        The old arrays of `params` are donated. A round may commit several times. An engine that shares the arrays gets
        the new ones before its next step.
        """


class Rewards(Protocol):
    """Computes rewards by pure functions in processes that can be killed."""

    def start(self, rollout: Rollout) -> None:
        """Starts to score a rollout. Returns at once."""

    def join(self, group: Group) -> Group:
        """Returns the group with its rewards. Waits, with a deadline.

        A judged program that exceeds its limit is scored: that is a verdict. A grader that fails twice leaves `scored`
        False.
        """


class Judge(Protocol):
    """Replies to questions about finished rollouts, on devices that it shares with an engine."""

    def work(self, slots: int) -> None:
        """Runs at most one dispatch, or one batch of questions, where slots are free and a question waits.

        Args:
          slots: free slots of the engine, of which each running question takes one.
        """


class Environments(Protocol):
    """Carries conversations on, by pure functions in processes that can be killed."""

    def start(self, rollout: Rollout) -> None:
        """Hands over a rollout that ended a turn. Returns at once."""

    def join(self, rollout: Rollout) -> Sequence[int] | None:
        """Returns the observed tokens that follow, or None where the conversation ends. Waits, with a deadline."""


class Source(Protocol):
    """A part of the run that keeps counters: engine, scheduler, rewards, history or drafting."""

    def metrics(self) -> Mapping[str, float]:
        """Returns the counters since the last call, by metric name."""


class Ring(Protocol):
    """What the loop calls: it announces events, times calls by phase, and defers calls that can wait."""

    def tell(self, event: str, *what: Any) -> None:
        """Passes an event to its listeners. They measure the run and never change what it computes."""

    def call(self, phase: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the function and returns its result. Its seconds count as `phase`."""

    def later(self, phase: str, function: Callable[..., object], *arguments: Any) -> None:
        """Calls the function now, or defers the call until `flush`. Deferred calls keep their order."""

    def flush(self) -> None:
        """Makes every deferred call. It is called before a call that needs one of them, and while a dispatch runs."""
