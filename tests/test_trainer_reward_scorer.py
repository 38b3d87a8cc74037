"""The scorer of texts by a reward model: plain code's numbers, and bits that depend on no other text."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import made_groups
import numpy as np
import parity_arms
import pytest
import reward_model_arms as pairs

from jaxrl_post.models import hf
from jaxrl_post.parallel import mesh
from jaxrl_post.trainer import reward_scorer
from jaxrl_post.trainer.reward_scorer import RewardScorer

pytestmark = pytest.mark.usefixtures("quick_compilation")

MESH = mesh.make_mesh(1, 1, 1)


def scorer(model=pairs.MODEL, params=None, longest: int = 40, dtype=np.float32) -> RewardScorer:
    params = pairs.weights() if params is None else params

    def load(homes, to):
        return mesh.put(jax.tree.map(lambda leaf: leaf.astype(to), params), homes)

    return RewardScorer(model, load, MESH, longest=longest, dtype=dtype)


def texts(count: int, longest: int = 40, vocab: int = 32) -> list:
    rng = np.random.default_rng(count)
    lengths = [longest, 1, *rng.integers(1, longest + 1, count - 2)]
    return [rng.integers(0, vocab, n).astype(np.int32) for n in lengths]


@pytest.fixture(scope="module")
def small() -> RewardScorer:
    return scorer()


@pytest.mark.parametrize("family", ["llama2", "gemma2", "qwen3", "qwen3_5"])
def test_scores_are_those_of_plain_code(family):
    policy, params = hf.load(parity_arms.GOLDENS / family)
    head = np.random.default_rng(1).standard_normal((policy.embed, 1)).astype(np.float32)
    model = dataclasses.replace(policy, scalar=True)
    params = {name: leaf for name, leaf in params.items() if name != "head"} | {"score": head}
    given = texts(20, 70, policy.vocab_size)
    found = scorer(model, params, 70)(given)
    want = np.concatenate([pairs.plain_rewards(params, model, given[at : at + 5]) for at in range(0, 20, 5)])
    np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


def test_sinks_join_each_softmax():
    model = dataclasses.replace(pairs.MODEL, sinks=True, windows=(None, 7, *pairs.MODEL.windows[2:]))
    noise, params = np.random.default_rng(2), pairs.weights()
    sinks = [noise.normal(size=model.heads).astype(np.float32) for _ in params["layers"]]
    layers = {name: leaf | dict(sinks=own) for (name, leaf), own in zip(params["layers"].items(), sinks, strict=True)}
    params, given = params | dict(layers=layers), texts(5)
    found, want = scorer(model, params)(given), pairs.plain_rewards(params, model, given)
    np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())
    without = pairs.plain_rewards(pairs.weights(), dataclasses.replace(model, sinks=False), given)
    assert np.abs(found - without).max() > 1e-3


def test_a_score_has_the_same_bits_alone_among_others_and_elsewhere(small):
    given = texts(45)
    among = small(given)
    assert among.dtype == np.float32 and len(set(among.tolist())) == 45
    np.testing.assert_array_equal(among, np.concatenate([small([text]) for text in given]))
    order = np.random.default_rng(0).permutation(45)
    np.testing.assert_array_equal(among[order], small([given[at] for at in order]))
    assert small.keeps_bits() and small([]).size == 0


def test_a_text_that_sees_the_one_before_it_is_found(monkeypatch):
    true = reward_scorer._laid_out

    def shifted(some, tokens):
        ids, positions, owners, starts, ends = true(some, tokens)
        return ids, positions + np.where(owners > 0, 1, 0).astype(np.int32), owners, np.maximum(starts - 1, 0), ends

    monkeypatch.setattr(reward_scorer, "_laid_out", shifted)
    assert not scorer().keeps_bits()


def test_the_dtype_is_the_engines():
    half = scorer(dtype=jnp.bfloat16, params=made_groups.moved(pairs.weights(), 1))
    assert half.keeps_bits()
