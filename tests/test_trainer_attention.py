"""The packed `attend` against dense attention over whole rows, in values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_attend import dense

from jaxrl_post.kernels import flash_gpu
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.trainer import attention

pytestmark = pytest.mark.usefixtures("quick_compilation")


def case(T, seed=0, B=2, N=4, K=2, H=4):
    rng = np.random.default_rng(seed)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, heads, H)), jnp.float32) for heads in (N, K, K))
    ends = np.sort(rng.integers(0, T, (B, 4)), axis=1)
    segments = jnp.asarray((np.arange(T)[None, :, None] >= ends[:, None, :]).sum(-1), jnp.int32)
    return q, k, v, segments


def flat(x):
    return x.reshape(-1, *x.shape[2:])


@pytest.mark.parametrize(
    "T, window, soft_cap",
    [
        (20, None, None),
        (20, 3, None),
        (20, None, 2.0),
        *(
            pytest.param(*given, marks=pytest.mark.extended)
            for given in ((150, None, None), (150, 70, 5.0), (128, 1, None))
        ),
    ],
)
def test_values_and_gradients(T, window, soft_cap):
    q, k, v, segments = case(T)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=q.shape), jnp.float32)
    how = dict(scale=0.4, window=window, soft_cap=soft_cap)
    positions = jnp.broadcast_to(jnp.arange(T), segments.shape)

    def ours(q, k, v):
        return attention.packed(segments)(0, flat(q), flat(k), flat(v), None, **how)[0].reshape(q.shape)

    def theirs(q, k, v):
        return dense(positions, segments)(0, q, k, v, None, **how)[0]

    np.testing.assert_allclose(ours(q, k, v), theirs(q, k, v), rtol=2e-5, atol=2e-6)
    got, expected = (
        jax.grad(lambda *a, f=f: jnp.sum(weight * f(*a)), argnums=(0, 1, 2))(q, k, v) for f in (ours, theirs)
    )
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


SINKS = np.array([-2.0, 0.5, 3.0, 60.0], np.float32)


@pytest.mark.parametrize("written_out", [64, 8], ids=["written out", "looped"])
@pytest.mark.parametrize("window", [None, 3])
def test_sinks_against_a_plain_softmax(monkeypatch, window, written_out):
    monkeypatch.setattr(attention, "WRITTEN_OUT", written_out)
    q, k, v, segments = case(20)
    how = dict(scale=0.4, window=window, soft_cap=None)
    attend = attention.packed(segments)
    out = attend(0, flat(q), flat(k), flat(v), None, sinks=jnp.asarray(SINKS), **how)[0].reshape(q.shape)
    np.testing.assert_allclose(out, softmax_with_sinks(q, k, v, segments, window), atol=2e-6)


def softmax_with_sinks(q, k, v, segments, window):
    """A softmax over [scores, sink] in float64, token by token, whose last weight is dropped."""
    q, k, v, segments = (np.asarray(x, np.float64) for x in (q, k, v, segments))
    out, group = np.zeros(q.shape), q.shape[2] // k.shape[2]
    for b, t, n in np.ndindex(q.shape[:3]):
        near = np.arange(0 if window is None else max(0, t - window + 1), t + 1)
        seen = near[segments[b, near] == segments[b, t]]
        scores = np.append(0.4 * k[b, seen, n // group] @ q[b, t, n], SINKS[n])
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights[:-1] @ v[b, seen, n // group] / weights.sum()
    return out


@pytest.mark.parametrize("form", [flash_gpu, None], ids=["gpu", "blocks"])
def test_sinks_and_their_gradient_when_devices_split_rows_and_heads(form):
    q, k, v, segments = case(16)
    sharding = meshes.heads_sharding(meshes.make_mesh(fsdp=2, tensor=2))
    if form is not None:
        form = functools.partial(flash_gpu.attention, tiles=flash_gpu.square(16), interpret=True)
    how = dict(scale=0.4, window=5, soft_cap=None)
    positions = jnp.broadcast_to(jnp.arange(16), segments.shape)

    def ours(q, k, v, sinks):
        out, _ = attention.packed(segments, sharding, form)(0, flat(q), flat(k), flat(v), None, sinks=sinks, **how)
        return jnp.sin(out).sum()

    def theirs(q, k, v, sinks):
        return jnp.sin(dense(positions, segments)(0, q, k, v, None, sinks=sinks, **how)[0]).sum()

    given = q, k, v, jnp.asarray(SINKS[[0, 1, 2, 1]])
    got, expected = (jax.jit(jax.grad(run, argnums=(0, 1, 2, 3)))(*given) for run in (ours, theirs))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_other_segments_change_no_bit():
    q, k, v, segments = case(96)
    segments = jnp.broadcast_to(jnp.where(jnp.arange(96) < 40, 1, 2), segments.shape)
    other = jnp.arange(96)[None, :, None, None] < 40
    attend = attention.packed(segments)
    how = dict(scale=0.4, window=None, soft_cap=None)
    out = attend(0, flat(q), flat(k), flat(v), None, **how)[0].reshape(q.shape)
    spoiled = attend(0, flat(q), flat(jnp.where(other, 1e6, k)), flat(jnp.where(other, 1e6, v)), None, **how)[0]
    np.testing.assert_array_equal(out[:, 40:], spoiled.reshape(q.shape)[:, 40:])


def test_bfloat16_sums_in_float32():
    q, k, v, segments = case(64)
    half = [flat(x.astype(jnp.bfloat16)) for x in (q, k, v)]
    how = dict(scale=0.4, window=None, soft_cap=None)
    out = attention.packed(segments)(0, *half, None, **how)[0]
    assert out.dtype == jnp.bfloat16
    full = attention.packed(segments)(0, *(x.astype(jnp.float32) for x in half), None, **how)[0]
    np.testing.assert_allclose(out.astype(jnp.float32), full, rtol=0.02, atol=0.02)
