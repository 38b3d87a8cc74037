"""The arguments of jax's ragged paged attention on TPU, against its reference and ours; it cannot be interpreted."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxrl_post.kernels import attention, attention_tpu
from jaxrl_post.kernels.pallas_tpu import ragged_paged_attention

pytestmark = pytest.mark.usefixtures("quick_compilation")

N, K, H, PAGE, BLOCKS, S = 6, 2, 128, 8, 5, 3
HOW = dict(scale=0.1, window=None, soft_cap=None)


def _case():
    noise = np.random.default_rng(1)
    pages = S * BLOCKS + 2
    table = noise.permutation(pages)[: S * BLOCKS].reshape(S, BLOCKS)
    table[1, 2:] = pages  # not mapped
    rows = attention.Rows(
        jnp.array([0, 0, 0, 1, 2, 2, 2], jnp.int32),
        jnp.array([17, 18, 19, 3, 30, 31, 0], jnp.int32),
        jnp.array([1, 1, 1, 1, 1, 1, 0], bool),
        jnp.asarray(table, jnp.int32),
    )
    cache = attention.Cache(jnp.asarray(noise.normal(size=(pages, PAGE, 2 * K, H)), jnp.bfloat16))
    return jnp.asarray(noise.normal(size=(7, N, H)), jnp.bfloat16), cache, rows


def _spelled_out(q, *arguments, num_kv_pages_per_block, num_queries_per_block, **how):
    """Returns jax's reference of the kernel, which leaves out rows behind the last sequence."""
    out = ragged_paged_attention.ref_ragged_paged_attention(q, *arguments, **how)
    return jnp.concatenate([out, jnp.full((q.shape[0] - out.shape[0], *out.shape[1:]), jnp.nan, out.dtype)])


@pytest.mark.parametrize("window, cap", [(None, None), (5, None), (12, 3.0)])
@pytest.mark.parametrize("entries", [attention_tpu.TABLE, 3 * BLOCKS], ids=["whole", "three rows a call"])
def test_its_arguments_mean_our_attention(window, cap, entries, monkeypatch):
    monkeypatch.setattr(attention_tpu, "TABLE", entries)
    q, cache, rows = _case()
    how = HOW | dict(window=window, soft_cap=cap)
    got = np.asarray(attention_tpu.attention(q, cache.pages, rows, kernel=_spelled_out, **how), np.float32)
    want = np.asarray(attention.reference(q, cache, rows, **how), np.float32)
    np.testing.assert_allclose(got, want, atol=0.02, rtol=0.01)  # weights and results are rounded to bfloat16
    assert not got[-1].any()


def test_nothing_real_is_still_a_sequence():
    q, cache, rows = _case()
    seen = {}

    def kernel(q, pages, lengths, table, starts, num, **_):
        seen.update(lengths=lengths, num=num, table=table)
        return q

    attention_tpu.attention(q, cache.pages, rows._replace(real=jnp.zeros(7, bool)), kernel=kernel, **HOW)
    assert int(seen["num"][0]) == 1 and int(seen["lengths"].min()) == 1
    assert int(seen["table"].max()) < cache.pages.shape[0], "no page outside the cache is ever read"


def test_it_is_lowered_for_tpu():
    q, cache, rows = _case()
    run = jax.jit(functools.partial(attention.attention, **HOW))
    chip = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    one = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=chip)
    with jax.sharding.use_abstract_mesh(one):
        text = run.trace(q, cache, rows).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text
    assert attention.serving(q, cache) == {"tpu": attention_tpu.attention}  # a page of 8 is not the GPU kernel's
