"""Rounds on the real engine under weights that the test chooses: what a scheduler trains on, for tests and for shows."""

from __future__ import annotations

import engine_lab as lab
import numpy as np
from toy_ring import ToyLearner, ToyObserver, ToyRewards, observed, scheduler_of

from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring import loop
from jaxrl_post.ring.types import Prompt, Sampling
from jaxrl_post.scheduler.registry import SCHEDULERS


class Prompts:
    """`count` random prompts in order, over and over."""

    def __init__(self, count: int, seed: int = 0):
        noise = np.random.default_rng(seed)
        self.prompts = [
            Prompt(id=f"p{i}", tokens=noise.integers(4, lab.TINY.vocab_size, noise.integers(2, 20)))
            for i in range(count)
        ]

    def at(self, position: int):
        epoch, index = divmod(position, len(self.prompts))
        return epoch, self.prompts[index]


class _Learner(ToyLearner):
    """Learns nothing; keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.rollouts = []

    def accumulate(self, groups):
        super().accumulate(groups)
        self.rollouts.append([rollout for group in groups for rollout in group.rollouts])


def rounds(
    name: str,
    *,
    steps: int,
    weights=lambda version: lab.weights(0),
    prompts: int = 11,
    engine: dict | None = None,
    longest: int = 40,
    **policy,
):
    """The rollouts of every step, of the scheduler called `name`, and its counts. `weights`: those of a version."""
    placed = meshes.param_shardings(meshes.make_mesh(), decoder.axes(lab.TINY), "engine")
    machine = lab.engine(weights(0), **(engine or {}))
    given = dict(run_seed=5, steps=steps, prompts=4, group_size=3, max_tokens=longest, max_waves=1)
    sampling, learner = Sampling(temperature=1.0, eos_ids=(lab.EOS,)), _Learner()
    made = scheduler_of(SCHEDULERS[name], Prompts(prompts), sampling=sampling, **given | policy)

    def publish(learner, engine):
        engine.swap(meshes.put(weights(learner.step), placed), learner.step)
        return engine.version

    rewards = ToyRewards(lambda rollout: float(rollout.tokens.sum() % 2))
    loop.run(observed(ToyObserver()), machine, made, rewards, learner, publish, steps)
    return learner.rollouts, made.metrics()


def multiset(steps) -> list:
    """Every (prompt, seed, tokens) trained on, sorted."""
    return sorted(
        (rollout.prompt.id, rollout.id.seed().tobytes(), rollout.tokens.tobytes())
        for rollouts in steps
        for rollout in rollouts
    )
