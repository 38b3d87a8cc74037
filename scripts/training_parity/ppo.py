"""PPO with GAE: the gradients of policy and critic, for a decoder of its own and for a head on the policy's.

The other side is tests/critic_arms.py: one sequence per row, dense attention, GAE by its definition, in float64.
"""

from __future__ import annotations

import dataclasses

from training_parity import SINGLE, plant


def show(record) -> None:
    import critic_arms as critics
    import gradient_arms as arms
    import made_groups
    import numpy as np

    groups = made_groups.groups()

    def distances(want, **how) -> tuple[float, float]:
        got = critics.gradients(groups, **how)
        return arms.worst(got[0], want[0]), arms.worst(got[1], want[1])

    for trunk in ("own", "policy"):
        for estimator in ("gae", "gae_turn"):
            given = dataclasses.replace(critics.ALGORITHM, adv_estimator=estimator)
            want = critics.plain_gradients(groups, np.float64, trunk=trunk, given=given)
            for tree, found in zip(("policy", "critic"), distances(want, trunk=trunk, given=given), strict=True):
                record.figure(f"ppo_{estimator}_{trunk}_trunk_{tree}", found, at_most=SINGLE)
    want = critics.plain_gradients(groups, np.float64, trunk="policy")
    plant(record, "ppo", FAULTS, lambda: max(distances(want, trunk="policy")))


def _observed_tokens_have_values(patch) -> None:
    from jaxrl_post.algorithms import gae

    whole = gae.LEVELS["gae"]
    patch.setitem(gae.LEVELS, "gae", lambda r, v, mask, g, lam: whole(r, v, mask | (mask.sum() > 0), g, lam))


def _lambda_is_one(patch) -> None:
    from jaxrl_post.algorithms import gae

    whole = gae.LEVELS["gae"]
    patch.setitem(gae.LEVELS, "gae", lambda r, v, mask, g, lam: whole(r, v, mask, g, 1.0))


def _advantages_are_not_whitened(patch) -> None:
    from jaxrl_post.algorithms import gae

    patch.setattr(gae, "whiten", lambda values, masks: values)


def _values_are_not_clipped(patch) -> None:
    from jaxrl_post.algorithms import losses

    whole = losses.clipped_value
    patch.setattr(losses, "clipped_value", lambda v, old, returns, clip: whole(v, old, returns, 0.0))


def _value_of_the_token_itself(patch) -> None:
    import jax.numpy as jnp

    from jaxrl_post.trainer.critic import Critic

    whole = Critic._values
    patch.setattr(Critic, "_values", lambda self, *given: jnp.roll(whole(self, *given), -1, axis=1))


def _values_of_the_last_step(patch) -> None:
    """The critic's loss sees the present values as the old ones, so nothing is ever clipped."""
    import dataclasses

    from jaxrl_post.trainer.critic import Critic

    whole = Critic._numerator

    def numerator(self, weights, policy, batch, recipe):
        now = self._values(weights, policy, batch, recipe)
        return whole(self, weights, policy, dataclasses.replace(batch, values=now), recipe)

    patch.setattr(Critic, "_numerator", numerator)


FAULTS = {
    "observed_tokens_have_values": _observed_tokens_have_values,
    "lambda_is_one": _lambda_is_one,
    "advantages_are_not_whitened": _advantages_are_not_whitened,
    "values_are_not_clipped": _values_are_not_clipped,
    "value_of_the_token_itself": _value_of_the_token_itself,
    "values_of_the_last_step": _values_of_the_last_step,
}
