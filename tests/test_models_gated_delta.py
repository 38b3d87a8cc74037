"""The gated delta rule by chunks, by the TPU's kernel and token by token, against a loop in numpy's float64.

Gradients are held to those of the rule token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.kernels import delta_rule_tpu
from jaxrl_post.models import gated_delta
from jaxrl_post.models.gated_delta import Tokens

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, T, H, K, V, CHUNK = 2, 41, 4, 6, 5, 8
SEGMENTS = np.repeat(
    np.array([[0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8, 9]], np.int32), [3, 1, 14, 8, 9, 6], axis=1
)  # one begins with a chunk, one has a token
BOUND = {np.float64: 1e-12, np.float32: 5e-6}


def made(dtype) -> Tokens:
    rng = np.random.default_rng(3)
    q, k = (rng.normal(size=(B, T, H, K)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    given = q, k, rng.normal(size=(B, T, H, V)), -rng.exponential(size=(B, T, H)), rng.uniform(size=(B, T, H))
    return Tokens(*(jnp.asarray(x, dtype) for x in given))


def loop(tokens: Tokens) -> np.ndarray:
    """The rule as the paper writes it, token by token, with zeros at the begin of a segment."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in tokens)
    out = np.zeros((B, T, H, V))
    for row in range(B):
        for head in range(H):
            for t in range(T):
                if t == 0 or SEGMENTS[row, t] != SEGMENTS[row, t - 1]:
                    state = np.zeros((K, V))
                state = np.exp(g[row, t, head]) * state
                wrong = v[row, t, head] - state.T @ k[row, t, head]
                state = state + beta[row, t, head] * np.outer(k[row, t, head], wrong)
                out[row, t, head] = state.T @ q[row, t, head]
    return out


def by_steps(tokens: Tokens) -> jax.Array:
    """The same by `steps`, each segment alone."""
    parts = []
    for row in range(B):
        cuts = np.flatnonzero(np.diff(SEGMENTS[row])) + 1
        for begin, end in zip([0, *cuts], [*cuts, T], strict=True):
            own = Tokens(*(x[row, begin:end] for x in tokens))
            start = jnp.zeros((H, K, V), tokens.v.dtype)
            parts.append(gated_delta.steps(start, own, jnp.ones(end - begin, bool))[1])
    return jnp.concatenate(parts).reshape(B, T, H, V)


def by_chunks(tokens: Tokens) -> jax.Array:
    return gated_delta.packed(tokens, jnp.asarray(SEGMENTS), CHUNK)


def by_kernel(tokens: Tokens) -> jax.Array:
    """The same by the kernel, interpreted, in whole chunks."""

    def whole(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, -T % CHUNK), *[(0, 0)] * (x.ndim - 2)], mode="edge")

    given = jax.tree.map(whole, (tokens, jnp.asarray(SEGMENTS)))
    return delta_rule_tpu.packed(*given, delta_rule_tpu.How(CHUNK, H // 2, interpret=True))[:, :T]


@pytest.mark.parametrize("dtype", BOUND, ids=lambda dtype: dtype.__name__)
def test_chunks_and_steps_are_the_rule(dtype):
    with jax.enable_x64(dtype == np.float64):
        tokens = made(dtype)
        expected = loop(tokens)
        for run in (by_chunks, by_steps, by_kernel):
            out = jax.jit(run)(tokens)
            assert (
                out.dtype == dtype and np.abs(np.asarray(out) - expected).max() <= BOUND[dtype] * np.abs(expected).max()
            )


@pytest.mark.parametrize("run", [by_chunks, by_kernel])
def test_the_gradient_is_that_of_steps(run):
    """Two value heads share the query and the key of one key head."""
    with jax.enable_x64(True):
        tokens, probe = made(np.float64), np.random.default_rng(4).normal(size=(B, T, H, V))
        tokens = tokens._replace(q=tokens.q[:, :, ::2], k=tokens.k[:, :, ::2])

        def slopes(run):
            return jax.jit(jax.grad(lambda tokens: jnp.sum(run(tokens) * probe)))(tokens)

        each = gated_delta.per_value_head
        found = slopes(run if run is by_kernel else lambda x: run(each(x)))
        expected = slopes(lambda x: by_steps(each(x)))
        for own, exact in zip(found, expected, strict=True):
            assert np.abs(own - exact).max() <= 1e-12 * np.abs(exact).max()


@pytest.mark.parametrize("run", [by_chunks, by_kernel])
def test_strong_decay_leaves_numbers_finite(run):
    """exp(G_i - G_j) of later tokens would overflow, and so would sums over a boundary."""
    tokens = made(np.float32)
    tokens = tokens._replace(g=tokens.g * 1e4)

    def total(tokens):
        return jnp.sum(run(tokens) ** 2)

    assert all(np.isfinite(x).all() for x in jax.jit(jax.grad(total))(tokens))


def test_a_token_that_is_not_live_changes_no_state():
    tokens = Tokens(*(jnp.moveaxis(x, 1, 0) for x in made(np.float32)))  # [T, B, ...]
    live = np.random.default_rng(5).uniform(size=(T, B)) < 0.6
    start = jnp.ones((B, H, K, V))
    state, out = gated_delta.steps(start, tokens, jnp.asarray(live))
    for row in range(B):
        own = Tokens(*(x[live[:, row], row] for x in tokens))
        alone, reads = gated_delta.steps(start[row], own, jnp.ones(live[:, row].sum(), bool))
        assert np.allclose(alone, state[row], rtol=0, atol=1e-6)
        assert np.allclose(reads, out[live[:, row], row], rtol=0, atol=1e-6)


def test_the_convolution_sees_its_own_segment():
    rng = np.random.default_rng(6)
    x, weights = rng.normal(size=(B, T, 3)).astype(np.float32), rng.normal(size=(4, 3)).astype(np.float32)
    expected = np.zeros((B, T, 3))
    for row in range(B):
        for t in range(T):
            for back in range(4):
                if t >= back and SEGMENTS[row, t - back] == SEGMENTS[row, t]:
                    expected[row, t] += x[row, t - back] * weights[3 - back]
    assert np.abs(gated_delta.convolved(*map(jnp.asarray, (x, weights, SEGMENTS))) - expected).max() < 1e-5
