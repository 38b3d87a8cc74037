"""Old log-probs without a pass of their own: the engine's, or between the engine's and the policy's by how old a token is.

The gradient equals that of the plain recipe when it is given, as constants, the old log-probs and corrections that numpy
computes from the formulas."""

import dataclasses

import gradient_arms as arms
import jax
import made_groups
import numpy as np
import pytest

from jaxrl_post import config
from jaxrl_post.trainer import programs

pytestmark = pytest.mark.usefixtures("quick_compilation")
STEP, BOUND = 4, 1.1


def aged(groups):
    """With versions 0 to 4, non-decreasing within an answer."""
    noise = np.random.default_rng(0)

    def old(rollout):
        return dataclasses.replace(rollout, versions=np.sort(noise.integers(0, STEP + 1, len(rollout))))

    return [dataclasses.replace(group, rollouts=tuple(map(old, group.rollouts))) for group in groups]


def recipe(method, **changes):
    terms = dict(kl_loss_coef=0.0, entropy_coef=0.0, clip_ratio_low=0.05, clip_ratio_high=0.05, prox_logp_method=method)
    return config.AlgorithmConfig(**(terms | changes))


def versions(groups, places, index, batch):
    """The version of every token of a batch, -1 where nothing was sampled."""
    out = np.full(batch.tokens.shape, -1)
    for place, rollout in zip(places, [rollout for group in groups for rollout in group.rollouts], strict=True):
        if place.batch == index:
            tail = slice(place.start, place.start + place.length)
            out[place.row, tail] = np.where(rollout.sampled, rollout.versions, -1)
    return out


@pytest.mark.extended
@pytest.mark.parametrize(
    "method, changes",
    [("rollout", {}), ("loglinear", {}), ("loglinear", {"rollout_is": "token", "rollout_is_threshold": (BOUND,)})],
)
def test_gradient_against_the_formulas(method, changes):
    with arms.precision(np.float64):
        one = arms.learner(np.float64, given=recipe(method, **changes), reference=False)
        groups = aged(made_groups.groups(1))
        one._step = STEP
        one.prepare(groups)
        one.accumulate(groups)
        got = jax.device_get(one.gradient())
        batches, places = one._packed(groups)
        sums = None
        for index, batch in enumerate(batches):
            logps = np.asarray(programs.score(one.params, one._put(batch), one._recipe)[0])
            mu, age = batch.rollout_logprobs, STEP - versions(groups, places, index, batch).astype(float)
            near = (
                np.where(age == 0, 1.0, 1.0 - 1.0 / np.maximum(age, 1.0))
                if method == "loglinear"
                else np.zeros_like(mu)
            )
            old = np.where(batch.loss_mask, mu + near * (logps - mu), 0.0)
            weights = np.minimum(np.exp(old - mu), BOUND) if changes else np.ones_like(mu)
            plain = dataclasses.replace(
                batch, old_logprobs=old, prox_weights=None, corrections=np.where(batch.loss_mask, weights, 0.0)
            )
            own = dataclasses.replace(one._recipe, algorithm=recipe("recompute", rollout_is="token"))
            grads, (counted, _) = jax.grad(programs.numerator, has_aux=True)(one.params, one._put(plain), own)
            found = (jax.device_get(grads), int(counted.count))
            sums = found if sums is None else (jax.tree.map(np.add, sums[0], found[0]), sums[1] + found[1])
        want = jax.tree.map(lambda leaf: leaf / sums[1], sums[0])
        assert arms.worst(got, want) <= 1e-12 and max(np.abs(leaf).max() for leaf in jax.tree.leaves(got)) > 0


@pytest.mark.extended
def test_no_pass_of_its_own_and_the_gap_is_still_told():
    one = arms.learner(given=recipe("loglinear", rollout_is="token"), reference=False)
    groups = aged(made_groups.groups(1))
    one.compile()
    one._programs["score"] = None  # nobody may call it
    one._step = STEP
    one.prepare(groups)
    one.accumulate(groups)
    told = one.commit()
    assert (
        0 < told["rollout_corr/rollout_is_mean"] <= 2 and told["rollout_corr/ess"] <= 1 and "rollout_corr/k3_kl" in told
    )
