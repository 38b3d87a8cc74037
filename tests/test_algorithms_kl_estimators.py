"""KL estimators against numbers computed by hand, and what the expectation of their gradients is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.algorithms import kl_estimators as estimators
from jaxrl_post.config import AlgorithmConfig

pytestmark = pytest.mark.usefixtures("quick_compilation")


def row(*values):
    return jnp.asarray([values], jnp.float32)


def test_kl_estimators_by_hand():
    logps, ref = row(-1.0, -2.0), row(-1.5, -1.0)
    np.testing.assert_allclose(estimators.k1(logps, ref), row(0.5, -1.0), rtol=1e-6)
    np.testing.assert_allclose(estimators.k2(logps, ref), row(0.125, 0.5), rtol=1e-6)
    np.testing.assert_allclose(estimators.k3(logps, ref), row(np.exp(-0.5) + 0.5 - 1, np.e - 2), rtol=1e-6)
    np.testing.assert_allclose(estimators.k3(row(-30.0), row(-1.0)), row(10.0))  # value clamped
    np.testing.assert_allclose(estimators.absolute(logps, ref), row(0.5, 1.0), rtol=1e-6)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_a_name_with_plus_has_its_own_value_and_the_gradient_of_k2(name):
    logps, ref = row(-1.0, -2.0, -30.0), row(-1.5, -1.0, -1.0)
    plus, plain = estimators.KL_ESTIMATORS[f"{name}+"], estimators.KL_ESTIMATORS[name]
    np.testing.assert_array_equal(plus(logps, ref), plain(logps, ref))
    np.testing.assert_allclose(jax.grad(lambda x: plus(x, ref).sum())(logps), logps - ref, rtol=1e-6)
    assert not np.allclose(jax.grad(lambda x: plain(x, ref).sum())(logps), logps - ref)


def test_k1_and_k3_estimate_the_kl_and_k2_has_its_gradient():
    rng = np.random.default_rng(0)
    p, q = (np.exp(x) / np.exp(x).sum() for x in rng.normal(size=(2, 50)) * 0.3)
    kl = np.sum(p * np.log(p / q))
    logp, logq = (jnp.asarray(np.log(x)[None], jnp.float32) for x in (p, q))
    for estimate in (estimators.k1, estimators.k3):
        np.testing.assert_allclose(np.sum(p * np.asarray(estimate(logp, logq)[0])), kl, rtol=1e-4)
    # E_p[grad k2] = E_p[(log p - log q) grad log p] is the gradient of KL; k3 has another one
    slope = jax.grad(lambda x: estimators.k2(x, logq).sum())(logp)
    np.testing.assert_allclose(slope, logp - logq, rtol=1e-5)


def test_k3_times_the_ratio_has_the_gradient_of_the_kl_off_policy():
    """E_old[grad (r k3)] is the gradient of KL(pi, ref), whatever policy sampled; without the ratio it is not."""
    rng = np.random.default_rng(1)
    scores, old, ref = (jnp.asarray(x, jnp.float32) for x in rng.normal(size=(3, 12)))
    behind, reference = jax.nn.log_softmax(old)[None], jax.nn.log_softmax(ref)[None]

    def expected(scores, corrected):
        logps = jax.nn.log_softmax(scores)[None]
        values = estimators.k3(logps, reference)
        return jnp.sum(jnp.exp(behind) * (values * jnp.exp(logps - behind) if corrected else values))

    def kl(scores):
        logps = jax.nn.log_softmax(scores)[None]
        return jnp.sum(jnp.exp(logps) * (logps - reference))

    np.testing.assert_allclose(jax.grad(expected)(scores, True), jax.grad(kl)(scores), atol=1e-5)
    assert np.abs(jax.grad(expected)(scores, False) - jax.grad(kl)(scores)).max() > 1e-2


def test_names_are_those_of_the_config():
    (choices,) = [f.metadata["choices"] for f in dataclasses.fields(AlgorithmConfig) if f.name == "kl_loss_type"]
    assert set(choices) == set(estimators.KL_ESTIMATORS)
