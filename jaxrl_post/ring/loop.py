"""The ring: prompts -> scheduler -> engine -> reward -> scheduler -> learner -> engine. One loop for every mode.

The loop knows types and protocols only. Another way of training is another scheduler, never another loop. Whether a
rollout is finished depends on its tokens, never on how fast its reward was computed. The ring waits for rewards at
one place only.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxrl_post.ring.protocols import Engine, Learner, Rewards, Ring, Scheduler
from jaxrl_post.ring.types import Part


def run(
    ring: Ring,
    engine: Engine,
    scheduler: Scheduler,
    rewards: Rewards,
    learner: Learner,
    publish: Callable[[Learner, Engine], int],
    steps: int,
) -> None:
    """Iterates until the learner has taken `steps` optimizer steps.

    Args:
      ring: receives events, and makes the calls that are timed or deferred.
      publish: hands the learner's weights to the engine and returns their version.

    Raises:
      RuntimeError: a whole iteration changed nothing, so no later iteration could.
    """
    since: list[Part] = []  # parts since the last commit
    moves = True
    while True:
        # Training comes first: a checkpoint is saved within a publish, and a resumed run continues from there.
        while learner.step < steps and (parts := scheduler.take()):
            moves, unpublished = True, False
            for part in parts:
                since = train(ring, learner, part, since)
                unpublished |= part.commit
                if part.publish:
                    ring.tell("published", publish(learner, engine))
                    unpublished = False
            assert not unpublished, "a step is committed and its weights are not published"
        if learner.step >= steps:
            return
        if not moves:
            raise RuntimeError(
                f"the ring stands still at learner step {learner.step} of {steps}: nothing was "
                f"admitted, finished, due or taken and the engine's clock stays at {engine.clock} with "
                f"{engine.pending} requests pending; scheduler: {scheduler}"
            )
        moves = generate(ring, engine, scheduler, rewards)


def train(ring: Ring, learner: Learner, part: Part, since: list[Part]) -> list[Part]:
    """Trains on one part. Returns the parts that no optimizer step contains yet."""
    ring.tell("preparing", part.fresh)
    ring.later("old_log_prob", learner.prepare, part.fresh)
    ring.tell("accumulating", part.groups)
    ring.later("update_actor", learner.accumulate, part.groups)
    since = [*since, part]
    if not part.commit:
        return since
    ring.flush()
    metrics = ring.call("update_actor", learner.commit)
    ring.tell("committed", metrics, Part.joined(since))
    return []


def generate(ring: Ring, engine: Engine, scheduler: Scheduler, rewards: Rewards) -> bool:
    """Generates once: admits requests, runs one dispatch, scores groups. Returns whether anything changed."""
    before = engine.clock
    if (layout := scheduler.layout()) is not None:
        ring.flush()  # groups handed over so far are packed for the devices that the learner has now
        ring.call("relayout", engine.relayout, layout)
    requests = scheduler.admit(engine.capacity, engine.clock)
    ring.call("gen", engine.submit, requests)
    if requests:
        ring.tell("launched", requests, engine.clock, engine.version)
    ring.tell("stepping", engine.clock)
    finished = ring.call("gen", engine.step)
    ring.tell("stepped", finished, engine.clock)
    for rollout in finished:
        ring.later("reward", rewards.start, rollout)
        stopped = engine.park(scheduler.complete(rollout).park)
        if stopped:
            ring.tell("stopped", stopped, engine.clock, engine.version)
        scheduler.parked(stopped)
    due = scheduler.due()
    for group in due:  # the only place where the ring waits for a reward
        ring.flush()
        scored = ring.call("reward", rewards.join, group)
        ring.tell("scored", scored)
        scheduler.scored(scored)
    return bool(requests or finished or due or engine.clock > before)
