"""Losses against numbers computed by hand, and identities of the papers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.algorithms import aggregation, losses
from jaxrl_post.algorithms.losses import Terms
from jaxrl_post.config import AlgorithmConfig

pytestmark = pytest.mark.usefixtures("quick_compilation")

CLIP = AlgorithmConfig(clip_ratio_low=0.2, clip_ratio_high=0.3)


def row(*values):
    return jnp.asarray([values], jnp.float32)


def one_row(like):
    """Every token is of one sequence and sampled."""
    return jnp.ones(like.shape, bool), jnp.ones(like.shape, jnp.int32)


def at(name, ratios, advantages, algorithm=CLIP):
    """The loss at these ratios, as one sequence: old log-probs are -1, so the new ones are log r - 1."""
    old = jnp.full((1, len(ratios)), -1.0)
    logps = old + jnp.log(row(*ratios))
    return losses.LOSSES[name](Terms(logps, old, row(*advantages), *one_row(old), algorithm))


def slope(name, ratios, advantages, algorithm=CLIP):
    """Of the summed loss, per log-prob."""
    old = jnp.full((1, len(ratios)), -1.0)
    return jax.grad(lambda x: losses.LOSSES[name](Terms(x, old, row(*advantages), *one_row(old), algorithm))[0].sum())(
        old + jnp.log(row(*ratios))
    )


def vanilla_of_ratio(ratio, advantage):
    loss, indicators = at("vanilla", [ratio], [advantage])
    return float(loss[0, 0]), float(indicators["actor/pg_clipfrac"][0, 0])


@pytest.mark.parametrize(
    "ratio, advantage, loss, clipped",
    [
        (1.0, 2.0, -2.0, 0),  # inside
        (1.25, 2.0, -2.5, 0),  # inside the upper bound 1.3, outside 1.2: the bounds differ
        (1.5, 2.0, -2.6, 1),  # above, good: held at 1.3
        (1.5, -2.0, 3.0, 0),  # above, bad: not held, it must come down
        (0.5, 2.0, -1.0, 0),  # below, good: not held
        (0.75, -2.0, 1.6, 1),  # below, bad: held at 0.8
        (0.5, -2.0, 1.6, 1),
        (1.5, 0.0, 0.0, 0),
    ],
)
def test_vanilla_by_hand(ratio, advantage, loss, clipped):
    got = vanilla_of_ratio(ratio, advantage)
    np.testing.assert_allclose(got[0], loss, rtol=1e-6)
    assert got[1] == clipped


def test_no_gradient_where_clipped_and_all_of_it_elsewhere():
    grad = slope("vanilla", [1.0, 1.5, 1.5], [1.0, 1.0, -1.0])
    np.testing.assert_allclose(grad, row(-1.0, 0.0, 1.5), rtol=1e-6)  # d ratio / d logp = ratio


DUAL = dataclasses.replace(CLIP, clip_ratio_c=3.0)


@pytest.mark.parametrize(
    "ratio, advantage, loss, held, grad",
    [
        (2.5, -2.0, 5.0, 0, 5.0),  # below c: PPO
        (4.0, -2.0, 6.0, 1, 0.0),  # held at 3 * 2, and no gradient any more
        (4.0, 2.0, -2.6, 0, 0.0),  # good: only clip-higher
        (0.5, -2.0, 1.6, 0, 0.0),
    ],
)
def test_dual_clip_by_hand(ratio, advantage, loss, held, grad):
    got, indicators = at("vanilla", [ratio], [advantage], DUAL)
    np.testing.assert_allclose(got, row(loss), rtol=1e-6)
    assert float(indicators["actor/pg_clipfrac_lower"][0, 0]) == held
    np.testing.assert_allclose(slope("vanilla", [ratio], [advantage], DUAL), row(grad), rtol=1e-6)
    assert "actor/pg_clipfrac_lower" not in at("vanilla", [ratio], [advantage])[1]


def test_gspo_by_hand():
    """Ratios 1.1 and 1.4: s = sqrt(1.54) = 1.24097; above 1.3 it would be clipped; 0.5 and 0.98 give 0.7."""
    s = 1.54**0.5
    np.testing.assert_allclose(at("gspo", [1.1, 1.4], [2, 2])[0], row(-2 * s, -2 * s), rtol=1e-6)
    np.testing.assert_allclose(slope("gspo", [1.1, 1.4], [2, 2]), row(-2 * s, -2 * s), rtol=1e-6)
    loss, indicators = at("gspo", [1.3, 1.6], [1, 1])
    np.testing.assert_allclose(loss, row(-1.3, -1.3), rtol=1e-6)
    np.testing.assert_array_equal(indicators["actor/pg_clipfrac"], row(1, 1))
    np.testing.assert_array_equal(slope("gspo", [1.3, 1.6], [1, 1]), row(0, 0))
    np.testing.assert_allclose(at("gspo", [0.5, 0.98], [-1, -1])[0], row(0.8, 0.8), rtol=1e-6)
    np.testing.assert_allclose(at("gspo", [1e9], [-1])[0], row(np.exp(10)), rtol=1e-6)  # log s is at most 10


def test_gspo_with_equal_ratios_in_a_sequence_is_vanilla():
    for ratio in (0.7, 1.0, 1.2, 1.6):
        for a in (-1.5, 2.0):
            one, two = (at(name, [ratio] * 3, [a] * 3) for name in ("gspo", "vanilla"))
            np.testing.assert_allclose(one[0], two[0], rtol=1e-6)
            np.testing.assert_array_equal(one[1]["actor/pg_clipfrac"], two[1]["actor/pg_clipfrac"])
            grads = [slope(name, [ratio] * 3, [a] * 3) for name in ("gspo", "vanilla")]
            np.testing.assert_allclose(*grads, rtol=1e-6)


def test_a_sequences_mean_leaves_out_what_is_masked_and_other_segments():
    values = row(1, 2, 30, 4, 50, 6, 7)
    mask = jnp.asarray([[1, 1, 0, 1, 0, 1, 0]], bool)
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 0]])
    np.testing.assert_allclose(losses.sequence_mean(values, mask, segments), row(1.5, 1.5, 1.5, 5, 5, 5, 0))


def test_cispo_by_hand():
    """Old log-probs are -1, so log pi = log r - 1; the weight is held at 1.3 and 0.8, the gradient is not stopped."""
    loss, indicators = at("cispo", [1.1, 2.0, 0.5, 2.0], [2, 2, -1, -1])
    logps = np.log([1.1, 2.0, 0.5, 2.0]) - 1
    np.testing.assert_allclose(loss, row(*(np.array([-2 * 1.1, -2 * 1.3, 0.8, 1.3]) * logps)), rtol=1e-6)
    np.testing.assert_array_equal(indicators["actor/pg_clipfrac"], row(0, 1, 1, 1))
    grad = slope("cispo", [1.1, 2.0, 0.5, 2.0], [2, 2, -1, -1])
    np.testing.assert_allclose(grad, row(-2.2, -2.6, 0.8, 1.3), rtol=1e-6)


LOG = AlgorithmConfig(loss_mode="geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.2)


def test_geo_mean_by_hand():
    """Log-ratios 0.1 and 0.6. A gain: the second is held at 0.2, so the mean is 0.15. A loss: neither is below -0.4."""
    ratios = np.exp([0.1, 0.6])
    loss, indicators = at("geo_mean", ratios, [2, 2], LOG)
    np.testing.assert_allclose(loss, row(*[-2 * np.exp(0.15)] * 2), rtol=1e-6)
    np.testing.assert_array_equal(indicators["actor/pg_clipfrac"], row(0, 1))
    np.testing.assert_allclose(slope("geo_mean", ratios, [2, 2], LOG), row(-2 * np.exp(0.15), 0), rtol=1e-5)
    loss, indicators = at("geo_mean", ratios, [-2, -2], LOG)
    np.testing.assert_allclose(loss, row(*[2 * np.exp(0.35)] * 2), rtol=1e-6)
    np.testing.assert_array_equal(indicators["actor/pg_clipfrac"], row(0, 0))
    loss, _ = at("geo_mean", np.exp([-0.1, -0.8]), [-2, -2], LOG)  # held at -0.4: the mean is -0.25
    np.testing.assert_allclose(loss, row(*[2 * np.exp(-0.25)] * 2), rtol=1e-6)
    np.testing.assert_allclose(at("geo_mean", np.exp([-0.8]), [2], LOG)[0], row(-2 * np.exp(-0.8)), rtol=1e-6)


def of_probabilities(name, new, old, advantages, algorithm):
    """Loss, indicators and slope per log-prob, at these probabilities of one sequence."""

    def loss(logps):
        before = jnp.log(row(*old))
        return losses.LOSSES[name](Terms(logps, before, row(*advantages), *one_row(before), algorithm))

    logps = jnp.log(row(*new))
    return (*loss(logps), jax.grad(lambda x: loss(x)[0].sum())(logps))


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_a_token_leaves_dppo_only_in_the_direction_of_its_advantage(name):
    """0.5 -> 0.8 moves by 0.3, a binary KL of 0.223; 0.5 -> 0.6 by 0.1, a KL of 0.0204."""
    given = AlgorithmConfig(loss_mode=name, clip_ratio_low=0.15, clip_ratio_high=0.15)
    new, old, a = [0.8, 0.8, 0.2, 0.2, 0.6, 0.4], [0.5] * 6, [2, -2, 2, -2, 2, -2]
    loss, indicators, grad = of_probabilities(name, new, old, a, given)
    outside = np.array([1, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(indicators["actor/pg_clipfrac"], row(*outside))
    ratio = np.array(new) / 0.5
    want = -np.array(a) * ratio * (1 - outside)
    np.testing.assert_allclose(loss, row(*(want * np.log(new))), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(grad, row(*want), rtol=1e-5, atol=1e-7)  # the ratio is a weight


def test_the_bounds_of_dppo_are_two_and_of_the_named_divergence():
    tv = AlgorithmConfig(loss_mode="dppo_tv", clip_ratio_low=0.25, clip_ratio_high=0.35)
    cut = of_probabilities("dppo_tv", [0.8, 0.2], [0.5, 0.5], [1, -1], tv)[1]["actor/pg_clipfrac"]
    np.testing.assert_array_equal(cut, row(0, 1))
    kl = AlgorithmConfig(loss_mode="dppo_kl", clip_ratio_low=0.22, clip_ratio_high=0.23)  # around 0.2231
    cut = of_probabilities("dppo_kl", [0.8, 0.2], [0.5, 0.5], [1, -1], kl)[1]["actor/pg_clipfrac"]
    np.testing.assert_array_equal(cut, row(0, 1))


def test_dppo_cuts_the_weight_at_c():
    given = AlgorithmConfig(loss_mode="dppo_tv", clip_ratio_low=1.0, clip_ratio_high=1.0, clip_ratio_c=3.0)
    loss, indicators, _ = of_probabilities("dppo_tv", [0.4, 0.2], [0.1, 0.1], [1, 1], given)
    np.testing.assert_allclose(loss, row(-3 * np.log(0.4), -2 * np.log(0.2)), rtol=1e-5)
    np.testing.assert_array_equal(indicators["actor/pg_clipfrac_lower"], row(1, 0))


@pytest.mark.parametrize(
    "value, loss, clipped, grad",
    [
        (1.5, 0.125, 0, -0.5),  # within 0.6 of the old value 1: half of the square of 0.5
        (3.0, 0.5, 0, 1.0),  # past the return 2: the value held at 1.6 is nearer, so the free loss counts
        (1.9, 0.08, 1, 0.0),  # moved far towards the return: held at 1.6, half of 0.16, and no gradient
        (0.1, 1.805, 0, -1.9),  # moved away from it: held at 0.4, which is nearer
    ],
)
def test_clipped_value_by_hand(value, loss, clipped, grad):
    got, indicators = losses.clipped_value(row(value), row(1.0), row(2.0), 0.6)
    np.testing.assert_allclose(got, row(loss), rtol=1e-5)
    assert float(indicators["critic/vf_clipfrac"][0, 0]) == clipped
    found = jax.grad(lambda v: losses.clipped_value(v, row(1.0), row(2.0), 0.6)[0].sum())(row(value))
    np.testing.assert_allclose(found, row(grad), rtol=1e-5)
    free = losses.clipped_value(row(value), row(1.0), row(2.0), 0.0)[0]
    np.testing.assert_allclose(free, row((value - 2) ** 2 / 2), rtol=1e-5)


def test_topr_and_gpg_by_hand():
    """Log pi = log r - 1. Gains keep weight 1; of losses, 2 is cut to 1 and 0.5 stays."""
    ratios, a = [2.0, 0.5, 2.0, 0.5], [1, 1, -1, -1]
    logps = np.log(ratios) - 1
    loss, indicators = at("topr", ratios, a)
    np.testing.assert_allclose(loss, row(*(-np.array([1, 1, -1, -0.5]) * logps)), rtol=1e-6)
    np.testing.assert_array_equal(indicators["actor/pg_clipfrac"], row(0, 0, 1, 0))
    np.testing.assert_allclose(slope("topr", ratios, a), row(-1, -1, 1, 0.5), rtol=1e-6)
    np.testing.assert_allclose(at("gpg", ratios, a)[0], row(*(-np.array(a) * logps)), rtol=1e-6)
    np.testing.assert_allclose(slope("gpg", ratios, a), row(-1, -1, 1, 1), rtol=1e-6)


def test_dro_by_hand():
    """Log r is log 2 and -log 2: half its square is 0.2402, and its slope is log r."""
    given, ratios, a = AlgorithmConfig(loss_mode="dro", old_kl_coef=0.5), [2.0, 0.5], [1, -1]
    logs = np.log(ratios)
    loss, indicators = at("dro", ratios, a, given)
    np.testing.assert_allclose(loss, row(*(-np.array(a) * (logs - 1) + 0.25 * logs**2)), rtol=1e-6)
    np.testing.assert_allclose(slope("dro", ratios, a, given), row(*(-np.array(a) + 0.5 * logs)), rtol=1e-6)
    assert indicators == {}
    plain = dataclasses.replace(given, old_kl_coef=0.0)
    np.testing.assert_array_equal(at("dro", ratios, a, plain)[0], at("gpg", ratios, a)[0])


def test_prime_ipo_leaves_in_any_direction():
    """0.5 -> 0.8 and 0.5 -> 0.2 are outside of 0.25, whatever the advantage; 0.5 -> 0.6 is inside."""
    given = AlgorithmConfig(loss_mode="prime_ipo", clip_ratio_low=0.25, clip_ratio_high=0.25)
    new, a = [0.8, 0.8, 0.2, 0.2, 0.6, 0.6], [1, -1, 1, -1, 1, -1]
    _, indicators, grad = of_probabilities("prime_ipo", new, [0.5] * 6, a, given)
    np.testing.assert_array_equal(indicators["actor/pg_clipfrac"], row(1, 1, 1, 1, 0, 0))
    np.testing.assert_allclose(grad, row(0, 0, 0, 0, -1.2, 1.2), rtol=1e-5)
    low = dataclasses.replace(given, clip_ratio_low=0.35)
    cut = of_probabilities("prime_ipo", new, [0.5] * 6, a, low)[1]["actor/pg_clipfrac"]
    np.testing.assert_array_equal(cut, row(1, 1, 0, 0, 0, 0))


def test_dppo_adds_the_squared_log_ratio_everywhere():
    given = AlgorithmConfig(loss_mode="dppo_tv", clip_ratio_low=0.15, clip_ratio_high=0.15)
    held = dataclasses.replace(given, old_kl_coef=0.4)
    new, old, a = [0.8, 0.6], [0.5, 0.5], [1, 1]
    plain, more = (of_probabilities("dppo_tv", new, old, a, one)[0] for one in (given, held))
    np.testing.assert_allclose(more - plain, row(0.2 * np.log(1.6) ** 2, 0.2 * np.log(1.2) ** 2), rtol=1e-5)


def test_trls_delta_is_our_second_bound():
    """max(-A min(r, d), -A clip(r)) is the dual clip at c = d, for any d above the upper bound."""
    ratios, a = np.array([0.5, 1.0, 1.25, 2.0, 3.5, 9.0] * 2), np.array([1.5] * 6 + [-1.5] * 6)
    want = np.maximum(-a * np.minimum(ratios, 3.0), -a * np.clip(ratios, 0.8, 1.3))
    np.testing.assert_allclose(at("vanilla", ratios, a, DUAL)[0][0], want, rtol=1e-6)


def test_clip_cov_and_kl_cov_without_picked_tokens():
    ratios, a = [1.0, 1.25, 1.5, 0.5, 4.0], [2, 2, 2, -2, -2]
    np.testing.assert_array_equal(at("clip_cov", ratios, a, DUAL)[0], at("vanilla", ratios, a)[0])  # no second bound
    loss, indicators = at("kl_cov", ratios, a)
    np.testing.assert_allclose(loss, row(*(-np.array(a) * ratios)), rtol=1e-6)
    assert indicators == {}


def test_luspo_is_gspo_times_the_length():
    ratios, a = [1.1, 1.4, 0.9], [2, 2, 2]
    one, many = (at(name, ratios, a) for name in ("gspo", "luspo"))
    np.testing.assert_allclose(many[0], 3 * one[0], rtol=1e-6)
    np.testing.assert_array_equal(many[1]["actor/pg_clipfrac"], one[1]["actor/pg_clipfrac"])


def test_luspo_with_its_own_mean_is_trls():
    """Rollouts of 2 and 10 tokens with A = 1 and -1 at ratio 1: the mean of -A times the length is (-2 + 10) / 2 = 4."""
    (short, _), (long, _) = at("luspo", [1.0] * 2, [1] * 2), at("luspo", [1.0] * 10, [-1] * 10)
    weights, counts = aggregation.seq_mean_token_mean(np.array([2, 10]), 10)
    sums = [float(np.sum(one)) for one in (short, long)]
    assert np.dot(weights, sums) / counts.sum() == pytest.approx(4.0)


def test_vespo_by_hand():
    """W = 1.1 * 1.4 = 1.54. A gain: W^2 e^(3 (1 - W)); a loss: W^3 e^(2 (1 - W)). At W = 1 the weight is 1."""
    w, logps = 1.54, np.log([1.1, 1.4]) - 1
    for sign, weight in ((1, w**2 * np.exp(3 * (1 - w))), (-1, w**3 * np.exp(2 * (1 - w)))):
        np.testing.assert_allclose(at("vespo", [1.1, 1.4], [sign] * 2)[0], row(*(-sign * weight * logps)), rtol=1e-5)
        np.testing.assert_allclose(slope("vespo", [1.1, 1.4], [sign] * 2), row(*[-sign * weight] * 2), rtol=1e-5)
    np.testing.assert_allclose(slope("vespo", [2.0, 0.5], [1, 1]), row(-1, -1), rtol=1e-5)


def test_a_sequences_length_leaves_out_what_is_masked_and_other_segments():
    mask = jnp.asarray([[1, 1, 0, 1, 0, 1, 0]], bool)
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 0]])
    np.testing.assert_array_equal(losses.sequence_length(mask, segments), [[2, 2, 2, 2, 2, 2, 0]])


def test_sapo_by_hand():
    """At r = 1 the gate is 2 / tau and its slope 1; at r = 2, tau = 1, A = 1: 4 sigmoid(1)."""
    loss, indicators = at("sapo", [1.0, 1.0, 2.0, 2.0], [1, -2, 1, -1])
    gate = [2.0, 2 / 1.05, 4 / (1 + np.exp(-1)), 4 / 1.05 / (1 + np.exp(-1.05))]
    np.testing.assert_allclose(loss, row(-gate[0], 2 * gate[1], -gate[2], gate[3]), rtol=1e-6)
    assert indicators == {}
    np.testing.assert_allclose(slope("sapo", [1.0, 1.0], [1, -2]), row(-1, 2), rtol=1e-6)
    p = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(slope("sapo", [2.0], [1]), row(-4 * p * (1 - p) * 2), rtol=1e-5)


@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo", "sapo"])
def test_on_policy_every_loss_has_the_policy_gradient(name):
    np.testing.assert_allclose(slope(name, [1.0, 1.0], [1.5, 1.5], AlgorithmConfig()), row(-1.5, -1.5), rtol=1e-6)


@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo", "sapo"])
def test_every_loss_is_linear_in_a_positive_factor_of_the_advantage(name):
    """So that a correction may weigh the loss or the advantage."""
    ratios, advantages = [0.3, 1.1, 2.0, 5.0], np.array([1.0, -1.0, 2.0, -2.0])
    np.testing.assert_allclose(at(name, ratios, 3 * advantages)[0], 3 * at(name, ratios, advantages)[0], rtol=1e-6)


def test_log_ratio_is_clamped_at_20():
    clamped = losses.log_ratio(row(0.0, -100.0, -1.0), row(-100.0, 0.0, -1.5))
    np.testing.assert_array_equal(clamped, row(20.0, -20.0, 0.5))
    loss, _ = losses.vanilla(Terms(row(0.0), row(-100.0), row(-1.0), *one_row(row(0.0)), CLIP))
    np.testing.assert_allclose(loss, np.exp(np.float32(20)), rtol=1e-6)


def test_sft_is_negative_log_likelihood():
    loss, indicators = losses.sft(Terms(row(-0.5, -2.0), None, row(1.0, 1.0), *one_row(row(1.0, 1.0)), CLIP))
    np.testing.assert_array_equal(loss, row(0.5, 2.0))
    assert indicators == {}


def test_names_are_those_of_the_config():
    choices = {
        f.name: set(f.metadata["choices"]) for f in dataclasses.fields(AlgorithmConfig) if "choices" in f.metadata
    }
    assert choices["loss_mode"] == set(losses.LOSSES) == set(losses.NEEDS_OLD_LOGPROBS)


def test_mixed_dtypes_and_ranks_are_refused_first():
    with pytest.raises((AssertionError, TypeError)):
        losses.vanilla(Terms(row(0.0), row(0.0).astype(jnp.bfloat16), row(0.0), *one_row(row(0.0)), CLIP))
    with pytest.raises((AssertionError, TypeError)):
        losses.vanilla(Terms(row(0.0), row(0.0, 1.0), row(0.0), *one_row(row(0.0)), CLIP))
