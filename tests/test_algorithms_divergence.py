"""Divergences of laws by hand, and the gradient that the sampled form estimates."""

import distill_arms as distill
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.algorithms import divergence


def logs(*rows):
    return jnp.log(jnp.asarray(rows, jnp.float32))


def test_by_hand():
    own, teacher = logs([0.5, 0.5]), logs([0.25, 0.75])
    reverse = 0.5 * np.log(2) + 0.5 * np.log(2 / 3)
    forward = 0.25 * np.log(0.5) + 0.75 * np.log(1.5)
    mixed = np.array([0.375, 0.625])
    jsd = 0.5 * np.sum([0.25, 0.75] * np.log([0.25, 0.75] / mixed)) + 0.5 * np.sum(0.5 * np.log(0.5 / mixed))
    for beta, want in ((1.0, reverse), (0.0, forward), (0.5, jsd)):
        np.testing.assert_allclose(divergence.of_logs(own, teacher, beta), [want], rtol=1e-5)
        np.testing.assert_allclose(divergence.of_logs(own, own, beta), [0.0], atol=1e-7)


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.9, 1.0])
def test_from_logs_as_from_probabilities(beta):
    rng = np.random.default_rng(0)
    own, teacher = (jax.nn.log_softmax(jnp.asarray(rng.normal(size=(5, 7)), jnp.float32)) for _ in range(2))
    want = distill.plain_divergence(jnp.exp(own), jnp.exp(teacher), beta)
    np.testing.assert_allclose(divergence.of_logs(own, teacher, beta), want, rtol=1e-4, atol=1e-6)


def test_the_gain_of_the_sampled_form_has_the_gradient_of_the_reverse_kl():
    """The mean over all tokens, each as likely as the policy draws it, of minus gain times the slope of its log-prob."""
    rng = np.random.default_rng(1)
    scores, teacher = (jnp.asarray(rng.normal(size=6), jnp.float32) for _ in range(2))
    teacher = jax.nn.log_softmax(teacher)

    def kl(x):
        return divergence.of_logs(jax.nn.log_softmax(x), teacher, 1)

    own = jax.nn.log_softmax(scores)
    slopes = jax.jacobian(jax.nn.log_softmax)(scores)
    np.testing.assert_allclose(-jnp.exp(own) * (teacher - own) @ slopes, jax.grad(kl)(scores), rtol=1e-4, atol=1e-6)


def test_certain_laws_stay_finite():
    """An id that is never allowed has the score -1e30 in both models."""
    own, teacher = jnp.asarray([[0.0, -1e30]], jnp.float32), jnp.asarray([[-0.5, -1e30]], jnp.float32)
    for beta in (0.0, 0.5, 1.0):
        assert np.isfinite(divergence.of_logs(own, teacher, beta)).all()
        assert np.isfinite(jax.grad(lambda x, beta=beta: divergence.of_logs(x, teacher, beta).sum())(own)).all()
