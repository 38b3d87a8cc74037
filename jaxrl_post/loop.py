"""The ring: prompts -> scheduler -> engine -> reward -> scheduler -> learner -> engine. One loop for every mode.

It knows types and protocols only: another way of training is another scheduler, never another loop. Whether a rollout
is done depends on its tokens, never on how fast its reward came back: the ring waits for rewards at one place.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxrl_post.protocols import Engine, Learner, Observer, Rewards, Scheduler
from jaxrl_post.types import Part


def run(
    engine: Engine,
    scheduler: Scheduler,
    rewards: Rewards,
    learner: Learner,
    observe: Observer,
    publish: Callable[[Learner, Engine], int],
    steps: int,
) -> None:
    """Turns until the learner has taken `steps` optimizer steps. `publish` hands its weights to the engine and returns
    their version.

    Raises:
      RuntimeError: a whole turn changed nothing, so no later turn ever would.
    """
    since: list[Part] = []  # the last commit
    moves = True
    while True:
        # First of all, as a run that is resumed was saved by a publish, in the midst of this.
        while learner.step < steps and (parts := scheduler.take()):
            moves, owed = True, False
            for part in parts:
                learner.prepare(part.fresh)
                learner.accumulate(part.groups)
                since.append(part)
                if part.commit:
                    observe.commit(learner.commit(), Part.joined(since))
                    since, owed = [], True
                if part.publish:
                    observe.published(publish(learner, engine))
                    owed = False
            assert not owed, "a step is committed and its weights are not published"
        if learner.step >= steps:
            return
        if not moves:
            raise RuntimeError(
                f"the ring stands still at learner step {learner.step} of {steps}: nothing was "
                f"admitted, finished, due or taken and the engine's clock stays at {engine.clock} with "
                f"{engine.pending} requests pending; scheduler: {scheduler}"
            )
        before = engine.clock
        if (layout := scheduler.layout()) is not None:
            engine.relayout(layout)
        requests = scheduler.admit(engine.capacity, engine.clock)
        engine.submit(requests)
        finished = engine.step()
        for rollout in finished:
            rewards.start(rollout)
            stop = scheduler.complete(rollout)
            engine.cancel(stop.cancel)
            scheduler.parked(engine.park(stop.park))
        due = scheduler.due()
        for group in due:  # the only place where the ring waits for a reward
            scheduler.scored(rewards.join(group))
        moves = bool(requests or finished or due or engine.clock > before)
