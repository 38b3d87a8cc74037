"""The chunked log-prob head against a numpy softmax, and its promise about memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.algorithms import correction, logprobs
from jaxrl_post.algorithms.correction import mismatch

pytestmark = pytest.mark.usefixtures("quick_compilation")


def case(B=3, T=10, D=4, V=7, seed=0):
    rng = np.random.default_rng(seed)
    hidden, table = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((B, T, D), (D, V)))
    return hidden, table, jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)


def twin(hidden, table, targets, temperature):
    scores = np.asarray(hidden, float) @ np.asarray(table, float) / temperature
    logps = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return np.take_along_axis(logps, np.asarray(targets)[..., None], -1)[..., 0], -(np.exp(logps) * logps).sum(-1)


@pytest.mark.parametrize("chunk", [1, 7, 12, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_are_those_of_numpy_for_every_chunk(chunk, temperature):
    hidden, table, targets = case()
    got = logprobs.chosen(lambda h: h @ table, hidden, targets, temperature=temperature, chunk=chunk)
    for value, expected in zip(got, twin(hidden, table, targets, temperature), strict=True):
        np.testing.assert_allclose(value, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_of_kept_ids_alone_values_and_gradients_are_those_of_a_smaller_softmax(chunk):
    """Three ids a token, the target among them; the last token has no record, and so all 7 ids."""
    hidden, table, targets = case(B=1, T=5)
    kept = jnp.stack([targets, (targets + 2) % 7, (targets + 3) % 7], axis=-1).at[:, -1].set(-1)

    def among(h, t):
        return logprobs.chosen(lambda x: x @ t, h, targets, temperature=0.7, chunk=chunk, kept=kept)

    def plain(h, t):
        found = []
        for i in range(5):
            scores = h[0, i] @ (t[:, kept[0, i]] if i < 4 else t) / 0.7
            logps = jax.nn.log_softmax(scores)
            found.append((logps[0] if i < 4 else logps[targets[0, i]], -jnp.sum(jnp.exp(logps) * logps)))
        return tuple(jnp.stack(x)[None] for x in zip(*found, strict=True))

    for got, want in zip(among(hidden, table), plain(hidden, table), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    w, u = np.random.default_rng(1).normal(size=(2, 1, 5)).astype(np.float32)
    slopes = [
        jax.grad(lambda h, t, run=run: sum(jnp.sum(a * b) for a, b in zip((w, u), run(h, t), strict=True)), (0, 1))
        for run in (among, plain)
    ]
    for got, want in zip(*(slope(hidden, table) for slope in slopes), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


def test_of_kept_ids_alone_the_coldest_law_is_finite():
    hidden, table, _ = case(B=1, T=5)
    best = jnp.argmax(hidden @ table, axis=-1).astype(jnp.int32)
    kept = jnp.stack([best, (best + 1) % 7], axis=-1)
    logp, entropy = logprobs.chosen(lambda x: x @ table, hidden, best, temperature=1e-9, chunk=99, kept=kept)
    assert not np.any(logp) and not np.any(entropy)


def test_huge_logits_stay_finite():
    logits = jnp.asarray([[1e4, 0.0, -1e4]], jnp.float32)
    logp, entropy = logprobs.of_logits(logits, jnp.asarray([1]))
    np.testing.assert_allclose(logp, [-1e4])
    np.testing.assert_allclose(entropy, [0.0])


@pytest.mark.parametrize("chunk", [7, 1000])
def test_gradient_is_that_of_the_plain_softmax(chunk):
    hidden, table, targets = case()
    w, u = np.random.default_rng(1).normal(size=(2, *targets.shape)).astype(np.float32)

    def chunked(h, t):
        logp, entropy = logprobs.chosen(lambda x: x @ t, h, targets, temperature=0.7, chunk=chunk)
        return jnp.sum(w * logp + u * entropy)

    def plain(h, t):
        logps = jax.nn.log_softmax(h @ t / 0.7)
        chosen = jnp.take_along_axis(logps, targets[..., None], -1)[..., 0]
        return jnp.sum(w * chosen - u * jnp.sum(jnp.exp(logps) * logps, -1))

    got, expected = (jax.grad(f, argnums=(0, 1))(hidden, table) for f in (chunked, plain))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_no_logits_of_the_whole_batch_are_kept():
    B, T, D, V, chunk = 4, 128, 8, 4096, 32
    hidden, table, targets = case(B, T, D, V)

    def loss(h, t):
        return jnp.sum(logprobs.chosen(lambda x: x @ t, h, targets, temperature=1.0, chunk=chunk)[0])

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, table).compile()
    whole = B * T * V * 4
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 4
    kept = jax.jit(jax.grad(lambda h, t: jnp.sum(logprobs.of_logits(h @ t, targets)[0]), argnums=(0, 1)))
    assert kept.lower(hidden, table).compile().memory_analysis().temp_size_in_bytes >= whole  # the measure can see it


def test_ranks_and_dtypes_are_checked_first():
    hidden, table, targets = case()
    with pytest.raises((AssertionError, TypeError)):
        logprobs.chosen(lambda h: h @ table, hidden, targets[:, :-1], temperature=1.0, chunk=4)
    with pytest.raises((AssertionError, TypeError)):
        logprobs.of_logits(jnp.zeros((2, 3), jnp.int32).astype(jnp.float32), jnp.zeros((3,), jnp.int32))


def test_mismatch_by_hand():
    old, rollout = np.log([0.5, 0.25]), np.log([0.4, 0.5])
    got = mismatch([(old, rollout)])
    np.testing.assert_allclose(got["training/rollout_probs_diff_mean"], 0.175)
    np.testing.assert_allclose(got["training/rollout_probs_diff_max"], 0.25)
    np.testing.assert_allclose(got["training/rollout_probs_diff_std"], 0.075 * np.sqrt(2))
    np.testing.assert_allclose(got["training/rollout_logprobs_abs_diff_max"], np.log(2))
    np.testing.assert_allclose(got["training/rollout_logprobs_abs_diff_mean"], (np.log(1.25) + np.log(2)) / 2)
    np.testing.assert_allclose(got["rollout_corr/kl"], (np.log(0.8) + np.log(2)) / 2)
    np.testing.assert_allclose(got["rollout_corr/k3_kl"], (1.25 - 1 - np.log(1.25) + 0.5 - 1 + np.log(2)) / 2)
    # rho 1.25 and 0.5; of the whole answer 0.625
    np.testing.assert_allclose(got["rollout_corr/chi2_token"], (1.25**2 + 0.5**2) / 2 - 1)
    np.testing.assert_allclose(got["rollout_corr/ess"], 0.875**2 / ((1.25**2 + 0.5**2) / 2))
    np.testing.assert_allclose(got["rollout_corr/tv"], (0.25 + 0.5) / 4)
    np.testing.assert_allclose(got["rollout_corr/chi2_seq"], 0.625**2 - 1)
    np.testing.assert_allclose(got["rollout_corr/training_ppl"], 8**0.5)  # 1 / sqrt(0.5 * 0.25)
    np.testing.assert_allclose(got["rollout_corr/rollout_ppl"], 5**0.5)
    np.testing.assert_allclose(got["rollout_corr/log_ppl_diff"], np.log(1.6) / 2)
    np.testing.assert_allclose(got["rollout_corr/ppl_ratio"], 1.6**0.5)
    two = mismatch([(old[:1], rollout[:1]), (old[1:], rollout[1:])])
    np.testing.assert_allclose(two["rollout_corr/chi2_seq"], two["rollout_corr/chi2_token"])
    np.testing.assert_allclose(two["rollout_corr/log_ppl_abs_diff"], (np.log(1.25) + np.log(2)) / 2)
    same = mismatch([(old, old)])
    assert max(abs(value) for name, value in same.items() if not name.endswith(("_ppl", "ppl_ratio", "ess"))) == 0
    assert same["rollout_corr/ess"] == 1
    assert same["rollout_corr/ppl_ratio"] == 1


def test_mismatch_by_cause_by_hand():
    """The second token of the second rollout is of older weights."""
    old, rollout = np.log([0.5, 0.25]), np.log([0.4, 0.5])
    got = correction.mismatch_by_cause(
        [(old[:1], rollout[:1]), (old, rollout)], [np.array([True]), np.array([True, False])]
    )
    assert got.keys() == {
        f"rollout_corr/{what}_{cause}" for what in ("k3_kl", "extreme") for cause in ("formats", "staleness")
    }
    np.testing.assert_allclose(got["rollout_corr/k3_kl_formats"], 0.25 - np.log(1.25))
    np.testing.assert_allclose(got["rollout_corr/k3_kl_staleness"], 0.5 - 1 + np.log(2))
    assert got["rollout_corr/extreme_staleness"] == 1
    assert correction.mismatch_by_cause([(old, old)], [np.array([True, True])]) == {
        "rollout_corr/k3_kl_formats": 0,
        "rollout_corr/extreme_formats": 0,
    }


@pytest.mark.parametrize("chunk", [7, 1000])
def test_norms_are_those_of_one_hot_minus_law(chunk):
    """Which is the slope of the log-prob by the scores."""
    hidden, table, targets = case()
    how = dict(temperature=0.7, chunk=chunk, statistics=logprobs.score_norms)
    (got,) = logprobs.chosen(lambda h: h @ table, hidden, targets, **how)
    for at in np.ndindex(targets.shape):
        scores = np.asarray(hidden[at] @ table, float) / 0.7
        slope = jax.grad(lambda x, at=at: jax.nn.log_softmax(x)[targets[at]])(jnp.asarray(scores, jnp.float32))
        np.testing.assert_allclose(got[at], float(slope @ slope), rtol=2e-5)
