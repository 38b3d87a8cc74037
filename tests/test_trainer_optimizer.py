"""Schedules, clipping, AdamW and its mask against numbers and a numpy twin."""

import jax
import jax.numpy as jnp
import made_groups
import numpy as np
import optax
import pytest

from jaxrl_post.config import OptimizerConfig
from jaxrl_post.models import decoder
from jaxrl_post.trainer import optimizer as optimizers


def rates(steps, **given):
    at = optimizers.rate(OptimizerConfig(lr=1.0, **given), steps)
    return [float(at(jnp.int32(step))) for step in range(steps + 1)]


def test_constant_after_warm_up():
    np.testing.assert_allclose(rates(6, warmup_steps=4), [0.25, 0.5, 0.75, 1, 1, 1, 1])


def test_linear():
    np.testing.assert_allclose(
        rates(6, schedule="linear", warmup_steps=2, final_lr_ratio=0.2), [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2], rtol=1e-6
    )


def test_cosine():
    expected = [0.1 + 0.9 * (1 + np.cos(np.pi * step / 4)) / 2 for step in range(5)]
    np.testing.assert_allclose(rates(4, schedule="cosine"), expected, rtol=1e-6)
    assert rates(4, schedule="cosine")[2] == pytest.approx(0.55)


def test_no_warm_up_starts_at_lr():
    assert rates(3)[0] == 1.0


def test_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match="warmup_steps=7 is above the run's steps=5; the nearest valid value is 5"):
        optimizers.rate(OptimizerConfig(warmup_steps=7), 5)


def test_matrices_decay_and_vectors_do_not():
    model = decoder.ModelConfig(
        vocab_size=8,
        embed=4,
        layers=1,
        heads=2,
        kv_heads=2,
        head_dim=2,
        ffw=4,
        max_length=8,
        qkv_bias=True,
        qk_norm=True,
    )
    decayed = optimizers.matrices(decoder.axes(model))
    layer = decayed["layers"]["0"]
    assert {name for name, yes in layer.items() if yes} == {"q", "k", "v", "o", "gate", "up", "down"}
    assert decayed["embed"] and decayed["head"] and not decayed["final_norm"]


def adamw(param, grads, o: OptimizerConfig, decay: bool, scale: float):
    """Algorithm 2 of arXiv 1711.05101 with a constant rate, in float64."""
    m = v = np.zeros_like(param)
    for t, g in enumerate(grads, 1):
        g = g * scale[t - 1]
        m, v = o.b1 * m + (1 - o.b1) * g, o.b2 * v + (1 - o.b2) * g * g
        step = (m / (1 - o.b1**t)) / (np.sqrt(v / (1 - o.b2**t)) + o.eps)
        param = param - o.lr * (step + (o.weight_decay * param if decay else 0))
    return param


def test_three_steps_of_adamw_with_clipping_and_decay():
    o = OptimizerConfig(lr=0.1, weight_decay=0.3, max_grad_norm=1.0, b1=0.8, b2=0.9)
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 2)), "n": rng.normal(size=3)}
    grads = [{"w": s * rng.normal(size=(3, 2)), "n": s * rng.normal(size=3)} for s in (0.01, 3.0, 1.0)]
    norms = [np.sqrt(sum((g**2).sum() for g in each.values())) for each in grads]
    scale = [min(1, 1 / n) for n in norms]
    assert scale[0] == 1 and scale[1] < 0.5
    with jax.enable_x64(True):
        clip, transform = optimizers.clipping(o), optimizers.transform(o, {"w": True, "n": False})
        now = jax.tree.map(jnp.asarray, params)
        state = transform.init(now)
        for each in grads:
            each = jax.tree.map(jnp.asarray, each)
            updates, state = transform.update(clip(each, optax.tree.norm(each)), state, now)
            now = jax.tree.map(lambda p, u: p - o.lr * u, now, updates)
        for name, decay in (("w", True), ("n", False)):
            expected = adamw(params[name], [each[name] for each in grads], o, decay, scale)
            np.testing.assert_allclose(now[name], expected, rtol=1e-9)


def test_zero_turns_clipping_off():
    assert optimizers.clipping(OptimizerConfig(max_grad_norm=0.0))({"w": 9.0}, 9.0) == {"w": 9.0}


def test_mask_has_the_tree_of_the_params():
    assert jax.tree.structure(optimizers.matrices(decoder.axes(made_groups.MODEL))) == jax.tree.structure(
        made_groups.weights()
    )


def test_moments_in_bfloat16_are_float32_arithmetic_rounded_once_a_step():
    """Three steps against AdamW written out, whose moments are rounded after each. Rounding twice or computing in
    bfloat16 would be off by its 2**-8."""
    given = OptimizerConfig(max_grad_norm=0.0, b1=0.9, b2=0.98, moments_dtype="bfloat16")
    transform = optimizers.transform(given, None)
    rng = np.random.default_rng(0)
    state = transform.init({"w": jnp.zeros(64)})
    first, second = np.zeros((2, 64), np.float32)
    for step in range(1, 4):
        grads = rng.normal(size=64).astype(np.float32)
        moved, state = transform.update({"w": jnp.asarray(grads)}, state)
        first, second = (0.9 * first + 0.1 * grads).astype(np.float32), 0.98 * second + 0.02 * grads**2
        expected = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.98**step)) + 1e-8)
        np.testing.assert_allclose(moved["w"], expected, rtol=1e-5)
        first, second = (np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)) for x in (first, second))
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"int32", "bfloat16"}
