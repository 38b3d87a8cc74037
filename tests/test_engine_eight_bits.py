"""Rollouts of 8 bits: codes of a hand-computed matrix, engines against the numpy twin, and the learner's rounding.

The suites of the engine run with both formats in the show quantised.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import engine_lab as lab
import gradient_arms as arms
import jax
import jax.numpy as jnp
import made_groups
import numpy as np
import numpy_llama
import pytest

from jaxrl_post import config
from jaxrl_post.engine.eight_bit_weights import coded, stored
from jaxrl_post.kernels import attention, attention_gpu, attention_tpu, eight_bits
from jaxrl_post.launch.parts import saved_policy
from jaxrl_post.models import decoder, layer
from jaxrl_post.models.model_config import EightBits, Experts
from jaxrl_post.parallel import mesh as meshes

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
BOTH = dict(weights="int8", kv="int8")
ASKED = lab.requests(12)


def test_codes_are_whole_multiples_of_the_scale_of_their_output():
    matrix = np.array([[1.0, -0.5, 0.0], [-2.54, 0.25, 0.0]], np.float32)  # two inputs, three outputs
    codes, scale = jax.tree.map(np.asarray, eight_bits.codes(matrix, 0, "int8"))
    assert codes.dtype == np.int8 and codes.tolist() == [[50, -127, 0], [-127, 64, 0]]  # 63.5 goes to the even 64
    np.testing.assert_allclose(scale, [0.02, 0.5 / 127, 1.0], rtol=1e-6)
    codes, scale = jax.tree.map(np.asarray, eight_bits.codes(matrix, 0, "fp8"))
    assert codes.astype(np.float32)[1, 0] == -448 and scale[1] == np.float32(0.5 / 448)
    np.testing.assert_allclose(codes.astype(np.float32) * scale, matrix, rtol=2**-4)


def dequantised(params, name):
    """The plain weights that the codes stand for."""

    def of(plain, made):
        out = {}
        for key, leaf in plain.items():
            if isinstance(leaf, dict):
                out[key] = of(leaf, made[key])
            elif scale := f"{key}_scale" if f"{key}_scale" in made else "":
                out[key] = made[key].astype(np.float32) * np.expand_dims(made[scale], layer.input_axes(key))
            else:
                out[key] = leaf
        return out

    return of(params, jax.tree.map(np.asarray, coded(params, name, np.float32)))


def test_an_engine_in_int8_samples_as_the_twin_does_from_rounded_weights():
    out = lab.run(lab.engine(weights="int8"), ASKED)
    assert lab.against_sampler(out, ASKED, dequantised(lab.weights(0), "int8")) == []
    assert lab.against_sampler(out, ASKED, lab.weights(0))


def test_an_engine_with_keys_and_values_in_int8_samples_as_the_twin_does(monkeypatch):
    """The twin rounds them too. One that lies between two codes may go to either, so log-probs agree to 0.05."""
    out = lab.run(lab.engine(kv="int8"), ASKED)
    assert lab.against_sampler(out, ASKED, lab.weights(0))
    monkeypatch.setattr(numpy_llama, "ROUNDS", "kv")
    objections = [
        lab.sampler.disagreement(
            lab.reference(one, lab.weights(0)),
            out[one.rollout_id].tokens,
            out[one.rollout_id].logprobs,
            out[one.rollout_id].entropies,
            near=0.05,
            close=0.05,
        )
        for one in ASKED
    ]
    assert not any(objections), objections


def test_other_slots_candidates_and_layouts_change_no_token_in_8_bits():
    plain = lab.run(lab.engine(**BOTH), ASKED)
    assert lab.same_bits(plain, lab.run(lab.engine(**BOTH, slots=3, pages=24), ASKED))
    parked, parks = lab.park_and_resume(lab.engine(**BOTH), ASKED, mode="verify", chance=0.5)
    assert parks and lab.same_bits(plain, parked)
    mesh = meshes.make_mesh(1, 2, 2)
    asked = lab.requests(12, replicas=2)
    learner = {
        seed: meshes.put(lab.weights(seed), meshes.param_shardings(mesh, decoder.axes(lab.TINY), "learner"))
        for seed in (0, 1)
    }
    engine = lab.made(lab.TINY, learner[0], mesh, **BOTH)
    assert engine.device.case == "code and relayout"
    first = lab.run(engine, asked)
    engine.swap(learner[1], 1)
    swapped = lab.run(engine, asked)
    fresh = lab.run(lab.engine(lab.weights(1), **BOTH), ASKED)
    for mine, theirs in ((first, plain), (swapped, fresh)):  # sums over two devices round otherwise
        equal = [mine[name].tokens.tolist() == theirs[name].tokens.tolist() for name in theirs]
        assert sum(equal) >= len(equal) - 1


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("extra", [{}, {"experts": Experts(4, 2, 16, shared_ffw=8)}], ids=["dense", "experts"])
def test_the_learner_s_rounding_is_the_engine_s_and_its_gradient_passes_it(name, extra):
    model = dataclasses.replace(lab.TINY, **extra)
    params = decoder.init(model, 0)
    rounded = dataclasses.replace(model, eight_bits=EightBits(name, stored=False))
    tokens, codes = jnp.arange(9) % model.vocab_size, coded(params, name, np.float32)

    def scores(weights, own):
        def attend(_, q, k, v, cache, **how):
            return q * 0.5 + jnp.repeat(k + v, q.shape[1] // k.shape[1], axis=1) * 0.1, cache

        return decoder.logits(weights, own, decoder.hidden(weights, own, tokens, tokens, attend, ())[0])

    def loss(weights, own):
        return jnp.sum(jnp.sin(scores(weights, own)))

    np.testing.assert_allclose(scores(params, rounded), scores(codes, stored(model, name)), rtol=0, atol=1e-5)
    exact = scores(dequantised(params, name), model)
    np.testing.assert_allclose(scores(params, rounded), exact, rtol=0, atol=1e-5)
    assert np.abs(scores(params, model) - exact).max() > 1e-3
    gradient = jax.grad(loss)(params, rounded)
    wanted = jax.grad(loss)(dequantised(params, name), model)
    assert arms.worst(gradient, wanted) < 1e-5


def test_a_scanned_learner_with_pairs_rounds_the_same():
    how = dict(mode="token-mean", model=dataclasses.replace(lab.TINY, eight_bits=EightBits("int8", stored=False)))
    groups = made_groups.groups()
    written = arms.gradient(groups, np.float64, **how)
    scanned = arms.gradient(groups, np.float64, sizes=(2, 2, 2), scan_layers="yes", remat=True, **how)
    assert arms.worst(scanned, written) < 1e-10


KERNELS = {"tpu": attention_tpu.attention, "gpu": attention_gpu.attention}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name,K,H,window,cap", [("int8", 2, 128, None, None), ("fp8", 4, 64, 100, 20.0)])
def test_kernels_read_codes_as_the_reference_does(kernel, name, K, H, window, cap):
    """Of pages that nobody wrote scales are not finite, and codes of 8-bit floats are no numbers. With a cap there are sinks."""
    noise = np.random.default_rng(0)
    cache = attention.empty(11, 64, K, H, jnp.bfloat16, name)
    codes = jnp.full_like(cache.pages, jnp.nan) if name == "fp8" else cache.pages
    cache = attention.Cache(codes, jnp.full_like(cache.scales, jnp.nan))
    table = jnp.asarray(noise.permutation(11)[:9].reshape(3, 3))
    for slot, count in enumerate((150, 70, 129)):
        rows = attention.Rows(jnp.full(count, slot), jnp.arange(count), jnp.ones(count, bool), table)
        k, v = (jnp.asarray(noise.normal(size=(count, K, H)), jnp.bfloat16) for _ in "kv")
        cache = attention.write(cache, k, v, rows)
    rows = attention.Rows(
        jnp.array([0, 0, 0, 1, 2, 2]), jnp.array([147, 148, 149, 69, 127, 128]), jnp.arange(6) < 5, table
    )
    q = jnp.asarray(noise.normal(size=(6, 3 * K, H)), jnp.bfloat16)
    how = dict(scale=H**-0.5, window=window, soft_cap=cap)
    sinks = () if cap is None else (jnp.asarray(noise.normal(size=3 * K), jnp.float32),)
    got = KERNELS[kernel](q, cache.pages, rows, *sinks, scales=cache.scales, interpret=True, **how)
    wanted = attention.reference(q, cache, rows, *sinks, **how)
    np.testing.assert_allclose(got.astype(np.float32), wanted.astype(np.float32), rtol=0, atol=0.01)


def test_a_policy_in_int8_shares_its_codes_between_engines():
    """The first engine draws, the second one scores what it drew."""
    options = (
        "engine.weights=int8",
        "engine.kv=int8",
        "engine.slots=8",
        "engine.row_sizes=(64,)",
        "sampling.max_tokens=16",
    )
    policy = saved_policy.load(CONFIGS / "demo_policy", options)
    (drawn,) = policy.generate(["1+2="], 1, seeds=3)
    scored = policy.logprobs(["1+2="], [drawn[0].tokens])
    np.testing.assert_allclose(scored[0], drawn[0].logprobs, atol=1e-4)
    assert policy.config.engine.weights == "int8"


@pytest.mark.parametrize(
    "given,said",
    [
        (["engine.weights=int8"], "nothing corrects it"),
        (["engine.kv=int8", "model.weights=int8"], "nothing corrects it"),
        (["engine.weights=fp8", "model.weights=int8"], "nothing corrects it"),
        (["model.weights=int8"], "nothing corrects it"),
        (["engine.weights=int8", "model.weights=int8", "engine.dtype=bfloat16"], "nothing corrects it"),
        (["engine.kv=int8", "algorithm.rollout_is=token", "engine.uncorrected=true"], "asks for no correction"),
        (["model.weights=int8", "lora.rank=4"], "they are frozen"),
    ],
)
def test_what_nothing_corrects_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        config.resolve(config.default(), [*given, "model.preset=x"])


def test_each_way_of_correcting_is_enough():
    for given in (
        ["engine.weights=int8", "model.weights=int8"],
        ["engine.weights=int8", "engine.kv=int8", "algorithm.rollout_is=token"],
        ["engine.kv=int8", "algorithm.rollout_rs=token_k1"],
        ["engine.kv=int8", "engine.uncorrected=true"],
        ["engine.weights=int8", "lora.rank=4", "algorithm.rollout_is=token"],
        ["engine.kv=int8", "algorithm.prox_logp_method=rollout"],
    ):
        config.resolve(config.default(), [*given, "model.preset=x"])
