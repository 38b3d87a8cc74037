"""Engines whose attention is the TPU's kernel, interpreted: drafts in a tile change no bit, and planted faults do."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import engine_lab as lab
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_kernels_attention_tpu as kernel

from jaxrl_post.kernels import attention, attention_tpu, prompt_attention
from jaxrl_post.ring.types import Prompt

MODEL = dataclasses.replace(lab.TINY, head_dim=64, max_length=320)
SIZES = dict(slots=4, max_length=288, pages=4 * 18, dtype=jnp.bfloat16)
LONG = attention_tpu.BLOCK - 9  # answers cross the end of a turn


@pytest.fixture(autouse=True)
def kernel_on_cpu(monkeypatch):
    def interpreted(run):
        return lambda *given, **how: run(*given, interpret=True, **how)

    held = SimpleNamespace(serves=attention_tpu.serves, attention=interpreted(attention_tpu.attention))
    monkeypatch.setitem(attention.KERNELS, "cpu", held)
    monkeypatch.setitem(prompt_attention.KERNELS, "cpu", interpreted(attention_tpu.prompt_attention))
    jax.clear_caches()  # the choice of a kernel is traced once for each shape
    yield
    jax.clear_caches()


def asked():
    noise = np.random.default_rng(2)
    prompts = [Prompt(id=str(at), tokens=noise.integers(0, MODEL.vocab_size, LONG)) for at in range(2)]
    return [
        dataclasses.replace(one, prompt=prompts[int(one.prompt.id)])
        for one in lab.requests(4, samples=2, exact=20, seed=2)
    ]


def engine(**changes):
    return lab.engine(lab.weights(0, MODEL), MODEL, **SIZES | changes)


def drafted(plain):
    past = [group for epoch in (0, 1) for group in lab.groups_of(asked(), plain, epoch, vary=0.1)]
    one = engine(drafting=lab.drafting("ours", past, slots=SIZES["slots"]), cost=lab.FREE_ROWS)
    out = lab.run(one, asked())
    assert one.metrics()["spec/num_accepted"] > 10
    return out


@pytest.mark.shown("exact-scale")
def test_drafts_and_slots_change_no_bit():
    plain = lab.run(engine(), asked())
    assert lab.same_bits(plain, drafted(plain))
    assert lab.same_bits(plain, lab.run(engine(slots=1, pages=18), asked()))


@pytest.mark.extended
def test_wide_prompts_and_drafts_change_no_bit():
    plain = lab.run(engine(prompt_rows=128), asked())
    past = [group for epoch in (0, 1) for group in lab.groups_of(asked(), plain, epoch, vary=0.1)]
    one = engine(prompt_rows=128, drafting=lab.drafting("ours", past, slots=SIZES["slots"]), cost=lab.FREE_ROWS)
    assert lab.same_bits(plain, lab.run(one, asked()))


@pytest.mark.shown("exact-scale")
def test_a_planted_fault_is_caught(monkeypatch):
    """A row that sees the next position sees a draft's key, or nothing."""
    kernel.mask_off_by_one(monkeypatch)
    plain = lab.run(engine(), asked())
    assert not lab.same_bits(plain, drafted(plain))
