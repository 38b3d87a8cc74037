"""Losses, KL estimators and aggregation against numbers computed by hand, and identities of the papers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.algorithms import losses
from jaxrl_post.config import Algorithm

CLIP = Algorithm(clip_ratio_low=0.2, clip_ratio_high=0.3)


def row(*values):
    return jnp.asarray([values], jnp.float32)


def vanilla_of_ratio(ratio, advantage):
    old = row(-1.0)
    loss, clipped = losses.vanilla(old + jnp.log(row(ratio)), old, row(advantage), CLIP)
    return float(loss[0, 0]), float(clipped[0, 0])


@pytest.mark.parametrize("ratio, advantage, loss, clipped", [
    (1.0, 2.0, -2.0, 0),      # inside
    (1.25, 2.0, -2.5, 0),     # inside the upper bound 1.3, outside 1.2: the bounds differ
    (1.5, 2.0, -2.6, 1),      # above, good: held at 1.3
    (1.5, -2.0, 3.0, 0),      # above, bad: not held, it must come down
    (0.5, 2.0, -1.0, 0),      # below, good: not held
    (0.75, -2.0, 1.6, 1),     # below, bad: held at 0.8
    (0.5, -2.0, 1.6, 1),
    (1.5, 0.0, 0.0, 0),
])
def test_vanilla_by_hand(ratio, advantage, loss, clipped):
    got = vanilla_of_ratio(ratio, advantage)
    np.testing.assert_allclose(got[0], loss, rtol=1e-6)
    assert got[1] == clipped


def test_no_gradient_where_clipped_and_all_of_it_elsewhere():
    def total(logps):
        return losses.vanilla(logps, jnp.zeros_like(logps), row(1.0, 1.0, -1.0), CLIP)[0].sum()
    grad = jax.grad(total)(jnp.log(row(1.0, 1.5, 1.5)))
    np.testing.assert_allclose(grad, row(-1.0, 0.0, 1.5), rtol=1e-6)  # d ratio / d logp = ratio


def test_log_ratio_is_clamped_at_20():
    clamped = losses.log_ratio(row(0.0, -100.0, -1.0), row(-100.0, 0.0, -1.5))
    np.testing.assert_array_equal(clamped, row(20.0, -20.0, 0.5))
    loss, _ = losses.vanilla(row(0.0), row(-100.0), row(-1.0), CLIP)
    np.testing.assert_allclose(loss, np.exp(np.float32(20)), rtol=1e-6)


def test_sft_is_negative_log_likelihood():
    loss, clipped = losses.sft(row(-0.5, -2.0), None, row(1.0, 1.0), CLIP)
    np.testing.assert_array_equal(loss, row(0.5, 2.0))
    np.testing.assert_array_equal(clipped, row(0.0, 0.0))


def test_kl_estimators_by_hand():
    logps, ref = row(-1.0, -2.0), row(-1.5, -1.0)
    np.testing.assert_allclose(losses.k1(logps, ref), row(0.5, -1.0), rtol=1e-6)
    np.testing.assert_allclose(losses.k2(logps, ref), row(0.125, 0.5), rtol=1e-6)
    np.testing.assert_allclose(losses.k3(logps, ref), row(np.exp(-0.5) + 0.5 - 1, np.e - 2), rtol=1e-6)
    np.testing.assert_allclose(losses.k3(row(-30.0), row(-1.0)), row(10.0))  # value clamped


def test_k1_and_k3_estimate_the_kl_and_k2_has_its_gradient():
    rng = np.random.default_rng(0)
    p, q = (np.exp(x) / np.exp(x).sum() for x in rng.normal(size=(2, 50)) * 0.3)
    kl = np.sum(p * np.log(p / q))
    logp, logq = (jnp.asarray(np.log(x)[None], jnp.float32) for x in (p, q))
    for estimate in (losses.k1, losses.k3):
        np.testing.assert_allclose(np.sum(p * np.asarray(estimate(logp, logq)[0])), kl, rtol=1e-4)
    # E_p[grad k2] = E_p[(log p - log q) grad log p] is the gradient of KL; k3 has another one
    slope = jax.grad(lambda x: losses.k2(x, logq).sum())(logp)
    np.testing.assert_allclose(slope, logp - logq, rtol=1e-5)


def packed_case():
    """Two rows: lengths 1 and 3 | 2 and an all-masked one, with padding; the 3-token one has a hole."""
    segments = jnp.asarray([[1, 1, 2, 2, 2, 2, 2, 0], [1, 1, 1, 2, 2, 2, 0, 0]])
    mask = jnp.asarray([[0, 1, 0, 1, 1, 0, 1, 0], [0, 1, 1, 0, 0, 0, 0, 0]]).astype(bool)
    values = jnp.asarray(np.arange(16, dtype=np.float32).reshape(2, 8) ** 2)
    return values, mask, segments


def test_aggregation_by_hand():
    values, mask, segments = packed_case()
    a, b, c = [1.0], [9.0, 16.0, 36.0], [81.0, 100.0]
    total = sum(a) + sum(b) + sum(c)
    number, count = losses.token_mean(values, mask, segments, 10)
    np.testing.assert_allclose((number, count), (total, 6), rtol=1e-6)
    number, count = losses.seq_mean_token_mean(values, mask, segments, 10)
    np.testing.assert_allclose((number, count), (np.mean(a) + np.mean(b) + np.mean(c), 3), rtol=1e-6)
    number, count = losses.seq_mean_token_sum_norm(values, mask, segments, 10)
    np.testing.assert_allclose((number, count), (total / 10, 3), rtol=1e-6)


@pytest.mark.parametrize("mode", list(losses.AGGREGATIONS))
def test_aggregation_adds_over_rows_and_ignores_what_is_masked(mode):
    values, mask, segments = packed_case()
    aggregate = losses.AGGREGATIONS[mode]
    whole = aggregate(values, mask, segments, 10)
    parts = [aggregate(values[i:i + 1], mask[i:i + 1], segments[i:i + 1], 10) for i in range(2)]
    np.testing.assert_allclose(whole, np.sum(parts, axis=0), rtol=1e-6)
    spoiled = jnp.where(mask, values, jnp.nan)
    np.testing.assert_array_equal(aggregate(spoiled, mask, segments, 10), whole)
    slope = jax.grad(lambda v: aggregate(v, mask, segments, 10)[0])(spoiled)
    assert np.all(np.asarray(slope)[~np.asarray(mask)] == 0) and np.all(np.asarray(slope)[np.asarray(mask)] > 0)


def test_names_are_those_of_the_config():
    choices = {f.name: set(f.metadata["choices"]) for f in dataclasses.fields(Algorithm) if "choices" in f.metadata}
    assert choices["loss_mode"] == set(losses.LOSSES) == set(losses.NEEDS_OLD_LOGPROBS)
    assert choices["loss_agg_mode"] == set(losses.AGGREGATIONS)
    assert choices["kl_loss_type"] == set(losses.KL_ESTIMATORS)


def test_mixed_dtypes_and_ranks_are_refused_first():
    with pytest.raises((AssertionError, TypeError)):
        losses.vanilla(row(0.0), row(0.0).astype(jnp.bfloat16), row(0.0), CLIP)
    with pytest.raises((AssertionError, TypeError)):
        losses.token_mean(row(0.0), jnp.ones((1, 2), bool), jnp.ones((1, 2), jnp.int32), 1)
