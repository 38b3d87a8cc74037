"""Off-policy sequence masking by hand: packed rows, two rollouts in one of them."""

import jax.numpy as jnp
import numpy as np

from jaxrl_post.algorithms.correction import off_policy


def test_by_hand():
    """Drifts: 0.3 in the first rollout, the observed token left out; 0.1 in the second; 0.3 in the third, which gained."""
    old = jnp.zeros((1, 7))
    logps = -jnp.asarray([[0.1, 9.0, 0.5, 0.1, 0.1, 0.3, 0.0]])
    mask = jnp.asarray([[1, 0, 1, 1, 1, 1, 0]], bool)
    segments = jnp.asarray([[1, 1, 1, 2, 2, 3, 0]])
    gains = jnp.asarray([[-1.0, -1, -1, -1, -1, 2, -1]])
    got = off_policy(logps, old, gains, mask, segments, 0.2)
    np.testing.assert_array_equal(got, [[1, 0, 1, 0, 0, 0, 0]])
    assert not off_policy(logps, old, gains, mask, segments, 0.31).any()
    assert not off_policy(old, logps, gains, mask, segments, 0.2).any()  # the policy's log-probs have risen
