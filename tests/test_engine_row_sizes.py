"""Engines whose products have one shape for every number of rows: small sizes stay, and tokens are those of the numpy twin."""

from __future__ import annotations

import dataclasses
import functools

import engine_lab as lab
import jax.numpy as jnp
import pytest

from jaxrl_post.engine import bit_probe
from jaxrl_post.kernels import product_gpu, row_blocks

ASKED = lab.requests(14, longest=12)


def test_no_row_size_is_dropped_and_each_has_the_bits_of_the_others():
    engine = lab.engine(row_sizes=(16, 64), head_rows=16, products="fixed")
    assert bit_probe.keep_equal_sizes(engine) == {16: True, 64: True}
    outs = []
    for engine.row_sizes in ((64,), (16,)):
        outs.append(lab.run(engine, ASKED))
        engine.reset()
    assert lab.same_bits(*outs)
    assert lab.against_sampler(outs[0], ASKED, lab.weights(0)) == []

    state = engine.state_dict()
    engine.load_state_dict(state, {})
    for saved in ({"products": "fixed 0"}, {}):  # another version, and the library's products
        old = {name: value for name, value in state.items() if name != "products"} | saved
        said = f"saved under engine.products '{saved.get('products', 'library')}' and would resume under 'fixed 1'"
        with pytest.raises(ValueError, match=said):
            engine.load_state_dict(old, {})


def test_the_kernels_of_gpus_serve_an_engine(monkeypatch):
    """In interpret mode."""
    model = dataclasses.replace(lab.TINY, vocab_size=48, layers=1, windows=())
    calls = []

    def placed(kernels, run, *given):
        calls.append(kernels)
        return kernels["cuda"](*given)

    for name in ("product", "norm"):
        monkeypatch.setattr(product_gpu, name, functools.partial(getattr(product_gpu, name), interpret=True))
    monkeypatch.setattr(row_blocks, "_placed", placed)
    fixed = dict(row_sizes=(16, 64), head_rows=16, products="fixed", dtype=jnp.bfloat16)
    engine = lab.engine(lab.weights(0, model), model, lab.meshes.make_mesh(data=1), **fixed)
    assert calls and all("cuda" in kernels for kernels in calls)
    assert bit_probe.keep_equal_sizes(engine) == {16: True, 64: True}
