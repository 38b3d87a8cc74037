"""A reward model: gradients of pairs packed among others, against autodiff of TRL's formula in float64.

The other side is tests/reward_model_arms.py: one text per row, dense attention, the loss of TRL's reward_trainer.py with a
margin and the centering term.
"""

from __future__ import annotations

import dataclasses

from training_parity import SINGLE, plant


def show(record) -> None:
    import gradient_arms as arms
    import reward_model_arms as pairs

    found = pairs.groups()
    for name, center in (("reward_model", 0.0), ("reward_model_centered", 0.3)):
        given = pairs.algorithm(center_rewards_coefficient=center)
        want = pairs.plain_gradient(found, given)

        def distance(given=given, want=want) -> float:
            return arms.worst(pairs.gradient(found, given, rows=2), want)

        record.figure(name, distance(), at_most=SINGLE)
        plant(record, name, FAULTS[name], distance)


def _losses(patch, change) -> None:
    from jaxrl_post.algorithms import reward_model

    patch.setattr(reward_model, "bradley_terry", change(reward_model.bradley_terry))


def _sides_are_swapped(patch) -> None:
    _losses(patch, lambda true: lambda rewards, *more: true(rewards[::-1], *more))


def _no_margin(patch) -> None:
    _losses(patch, lambda true: lambda rewards, margin, center: true(rewards, 0.0, center))


def _not_centered(patch) -> None:
    _losses(patch, lambda true: lambda rewards, margin, center: true(rewards, margin, 0.0))


def _every_token_is_rewarded(patch) -> None:
    from jaxrl_post.algorithms import reward_model

    true = reward_model.compare

    def compare(group, *given):
        return dataclasses.replace(true(group, *given), masks=[rollout.sampled for rollout in group.rollouts])

    patch.setattr(reward_model, "compare", compare)


def _the_token_before(patch) -> None:
    import jax.numpy as jnp

    from jaxrl_post.models import decoder

    true = decoder.rewards
    patch.setattr(decoder, "rewards", lambda params, h: jnp.roll(true(params, h), 1, axis=-1))


def _a_pair_counts_as_two(patch) -> None:
    from jaxrl_post.algorithms import credit

    true = credit._of_a_pair
    patch.setattr(credit, "_of_a_pair", lambda *given: [one / 2 for one in true(*given)])


FAULTS = {
    "reward_model": {
        "sides_are_swapped": _sides_are_swapped,
        "no_margin": _no_margin,
        "every_token_is_rewarded": _every_token_is_rewarded,
        "the_token_before": _the_token_before,
        "a_pair_counts_as_two": _a_pair_counts_as_two,
    },
    "reward_model_centered": {"not_centered": _not_centered},
}
