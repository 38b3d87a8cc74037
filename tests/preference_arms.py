"""The gradient of DPO and IPO by two ways: the learner's, and autodiff of TRL's formula with one sequence per row."""

from __future__ import annotations

import gradient_arms as arms
import jax
import jax.numpy as jnp
import made_groups
import numpy as np

from jaxrl_post.config import AlgorithmConfig


def algorithm(loss: str, **changes) -> AlgorithmConfig:
    given = dict(loss_mode=loss, adv_estimator="pairs", loss_agg_mode="seq-mean-token-sum", dpo_beta=0.3)
    return AlgorithmConfig(**(given | changes))


def learner(given: AlgorithmConfig, dtype=np.float32, **more):
    return arms.learner(dtype, given=given, kind=arms.Uncommitted, temperature=1.0, **more)


def gradient(one, found, dtype=np.float32):
    """The divided gradient of the policy that the learner began with."""
    with arms.precision(dtype):
        one.prepare(found)
        one.accumulate(found)
        return jax.device_get(one.gradient())


def plain_losses(given: AlgorithmConfig, chosen, rejected, chosen_length, rejected_length):
    """Per pair, from the summed log-ratios, as TRL's dpo_trainer.py writes them."""
    if given.loss_mode == "ipo":
        return (chosen / chosen_length - rejected / rejected_length - 1 / (2 * given.dpo_beta)) ** 2
    z, s = given.dpo_beta * (chosen - rejected), given.label_smoothing
    return -jax.nn.log_sigmoid(z) * (1 - s) - jax.nn.log_sigmoid(-z) * s


def plain_gradient(found, given: AlgorithmConfig):
    """In float64: the mean of the losses of pairs whose two rollouts are scored, differentiated."""
    found = [group for group in found if group.scored.all()]
    tokens, mask, _ = made_groups.unpacked(found)
    with arms.precision(np.float64):
        policy = made_groups.weights(0, np.float64)
        reference = made_groups.moved(policy, 2)
        policy, reference = (jax.tree.map(jnp.asarray, tree) for tree in (policy, reference))

        def sums(params):
            return jnp.sum(jnp.where(mask, made_groups.plain_scores(params, made_groups.MODEL, tokens)[0], 0), axis=1)

        known, lengths = sums(reference), mask.sum(1).reshape(-1, 2)

        def mean(params):
            gaps = (sums(params) - known).reshape(-1, 2)
            return jnp.mean(plain_losses(given, gaps[:, 0], gaps[:, 1], lengths[:, 0], lengths[:, 1]))

        return jax.device_get(jax.jit(jax.grad(mean))(policy))
