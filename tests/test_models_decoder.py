"""The decoder against an independent numpy forward pass, one variant of the architecture at a time."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from jaxrl_post.models import decoder, layer_loop
from jaxrl_post.models.model_config import Experts, FullAttention, ModelConfig, RopeScaling, frequencies, turn_scale
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.parallel import mesh as meshes
from tests import numpy_llama
from tests.dense_attend import dense

pytestmark = pytest.mark.usefixtures("quick_compilation")

PLAIN = ModelConfig(vocab_size=29, embed=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffw=20, max_length=64)
LONGROPE = RopeScaling(
    "longrope", 4.0, original_length=63, short_factors=(1.0, 1.2, 1.4, 2.0), long_factors=(1.5, 2.0, 3.0, 5.0)
)
VARIANTS = {
    "plain": {},
    "tied": dict(tied=True),
    "multi_query": dict(kv_heads=1),
    "windows": dict(windows=(None, 3)),
    "heads by kind of layer": dict(windows=(None, 3), full=FullAttention(1, 12)),
    "another layer's pages": dict(
        layers=5, windows=(3, None, 3, None, 3), shared_layers=3, shared_ffw=40, qk_norm=True, qkv_bias=True
    ),
    "values are keys": dict(
        windows=(None, 3), full=FullAttention(2, 8, values_are_keys=True, turned=0.25), qkv_bias=True
    ),
    "v_norm": dict(v_norm=True, norm_offset=1.0),
    "layer_scalars": dict(layer_scalars=True),
    "layer_embeds": dict(layer_embeds=6, embed_scale=4.0, norm_offset=1.0, layer_scalars=True),
    "attn_soft_cap": dict(attn_soft_cap=0.7),
    "final_soft_cap": dict(final_soft_cap=0.9),
    "qk_norm": dict(qk_norm=True),
    "qkv_bias": dict(qkv_bias=True),
    "o_bias": dict(o_bias=True),
    "sinks": dict(sinks=True),
    "query_scale": dict(query_scale=0.11),
    "rope_theta": dict(rope_theta=50.0),
    "rope_linear": dict(rope_scaling=RopeScaling("linear", 4.0)),
    # Wavelengths of the four pairs are 6.3, 63, 628 and 6283 positions: kept, kept, blended and divided.
    "rope_llama3": dict(rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 1000)),
    # Pairs 0 to 3: kept, two thirds kept, one third kept, divided.
    "rope_yarn": dict(rope_scaling=RopeScaling("yarn", 8.0, original_length=1000)),
    "rope_yarn_smooth": dict(
        rope_scaling=RopeScaling(
            "yarn", 8.0, original_length=900, attention_factor=0.7, beta_fast=9.0, beta_slow=0.5, truncate=False
        )
    ),
    "rope_longrope": dict(rope_scaling=LONGROPE),
    "rope_longrope_short": dict(rope_scaling=LONGROPE._replace(original_length=64)),
    "rope_yarn_local": dict(
        windows=(None, 5), local_rope_theta=30.0, rope_scaling=RopeScaling("yarn", 8.0, original_length=1000)
    ),
    "rope_local": dict(windows=(None, 5), local_rope_theta=30.0, rope_scaling=RopeScaling("linear", 4.0)),
    "norm_offset": dict(norm_offset=1.0),
    "post_norms": dict(post_norms=True),
    "embed_scale": dict(embed_scale=3.0),
    "norm_eps": dict(norm_eps=0.3),
    "gelu_tanh": dict(activation="gelu_tanh"),
    "gelu": dict(activation="gelu"),
    "experts": dict(experts=Experts(6, 2, 12)),
    "experts of all scores": dict(experts=Experts(6, 3, 12, renormalised=False, shared_ffw=9, dense_layers=(0,))),
    "experts beside": dict(experts=Experts(6, 2, 12, beside=True), norm_offset=1.0, post_norms=True),
    "clipped experts": dict(experts=Experts(5, 2, 12, biased=True, limit=0.4)),
    "all": dict(
        tied=True,
        windows=(2, None),
        attn_soft_cap=1.5,
        final_soft_cap=2.0,
        qk_norm=True,
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        query_scale=0.3,
        norm_offset=1.0,
        post_norms=True,
        embed_scale=4.0,
        activation="gelu_tanh",
        rope_scaling=RopeScaling("linear", 2.0),
        local_rope_theta=100.0,
    ),
}


def config_of(variant: str) -> ModelConfig:
    return dataclasses.replace(PLAIN, **VARIANTS[variant])


def shaken(config: ModelConfig, seed: int = 0) -> dict:
    """Random params in which no norm is 1 and no bias 0, so that forgetting one shows."""
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: leaf + generator.normal(0, 0.2, leaf.shape).astype(np.float32), decoder.init(config, seed)
    )


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def scores(params, config, tokens, positions, segments=None, **how):
    h, _ = decoder.hidden(params, config, tokens, positions, dense(positions, segments), (), **how)
    return decoder.logits(params, config, h)


def text(length: int = 12, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, PLAIN.vocab_size, length)


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_equal_the_numpy_twin(variant):
    config, tokens = config_of(variant), text()
    params = shaken(config)
    # Far from 0, so that long wavelengths turn too.
    positions = np.arange(12) * 7 + 20 if variant.startswith("rope") else np.arange(12)
    ours = scores(params, config, jnp.asarray(tokens)[None], jnp.asarray(positions)[None])
    exact = numpy_llama.forward(params, config, tokens, positions=positions, dtype=np.float64)
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours[0], exact, rtol=0, atol=2e-5 * max(1, np.abs(exact).max()))


@pytest.mark.parametrize(
    "variant", [v for v in VARIANTS if v not in ("plain", "tied", "multi_query") and "experts" not in v]
)
def test_every_variant_changes_the_scores(variant):
    """So that the comparison above could have failed."""
    config = config_of(variant)
    params = shaken(config)
    positions = np.arange(12) * 7 + 20 if variant.startswith("rope") else np.arange(12)
    plain = dataclasses.replace(PLAIN, tied=config.tied)
    with_it, without = (numpy_llama.forward(params, c, text(), positions=positions) for c in (config, plain))
    assert np.abs(with_it - without).max() > 1e-3


def test_in_float64_the_twin_is_met_to_the_last_digits():
    config, tokens = config_of("all"), text()
    params = shaken(config)
    with jax.enable_x64(True):
        ours = scores(params, config, jnp.asarray(tokens)[None], jnp.arange(12)[None], dtype=jnp.float64)
        assert ours.dtype == jnp.float64
    exact = numpy_llama.forward(params, config, tokens, dtype=np.float64)
    np.testing.assert_allclose(ours[0], exact, rtol=0, atol=1e-13)


def test_longrope_is_chosen_by_the_length_of_the_model_and_dynamic_is_plain():
    at, beyond = (dataclasses.replace(PLAIN, max_length=n, rope_scaling=LONGROPE) for n in (63, 64))
    plain = frequencies(PLAIN, 0)
    np.testing.assert_array_equal(plain / frequencies(at, 0), LONGROPE.short_factors)
    np.testing.assert_allclose(plain / frequencies(beyond, 0), LONGROPE.long_factors, rtol=1e-15)
    assert turn_scale(at, 0) == turn_scale(beyond, 0) == pytest.approx((np.log(4 * 63) / np.log(63)) ** 0.5, rel=1e-15)
    dynamic = dataclasses.replace(PLAIN, rope_scaling=RopeScaling("dynamic", 4.0))
    np.testing.assert_array_equal(frequencies(dynamic, 0), plain)
    assert turn_scale(dynamic, 0) == 1


def test_packed_texts_score_as_if_alone():
    config = config_of("windows")
    params = shaken(config)
    first, second = text(5, 2), text(7, 3)
    packed = jnp.asarray(np.concatenate([first, second]))[None]
    positions = jnp.asarray([*range(5), *range(7)])[None]
    segments = jnp.asarray([1] * 5 + [2] * 7)[None]
    ours = scores(params, config, packed, positions, segments)[0]
    np.testing.assert_allclose(ours[:5], numpy_llama.forward(params, config, first), rtol=0, atol=1e-5)
    np.testing.assert_allclose(ours[5:], numpy_llama.forward(params, config, second), rtol=0, atol=1e-5)


def test_rotation_uses_positions_and_not_places():
    config, params, tokens = PLAIN, shaken(PLAIN), text()
    stretched = np.arange(12) * 3
    ours = scores(params, config, jnp.asarray(tokens)[None], jnp.asarray(stretched)[None])[0]
    twin = numpy_llama.forward(params, config, tokens, positions=stretched)
    np.testing.assert_allclose(ours, twin, rtol=0, atol=1e-5)
    assert np.abs(ours - numpy_llama.forward(params, config, tokens)).max() > 1e-2


def itself(layer, q, k, v, cache, *, scale, window, soft_cap, sinks=None):
    """An attend of rank-free rows: each row sees itself alone; the cache collects what came by."""
    out = jnp.repeat(v, q.shape[-2] // v.shape[-2], axis=-2)
    return out, [*cache, (layer, q.shape, k.shape, scale, window, soft_cap)]


@pytest.mark.parametrize("shape", [(12,), (3, 4), (2, 3, 2)])
def test_any_leading_rank_gives_the_same_rows(shape):
    """In x64: float32 rounds by the shape and by the machine's vector units."""
    config = config_of("all")
    params, seen = shaken(config), []

    @jax.jit
    def both(tokens):
        h, cache = decoder.hidden(params, config, tokens, tokens, itself, [], dtype=jnp.float64)
        seen[:] = cache
        return h, decoder.logits(params, config, h)

    with jax.enable_x64(True):
        h, flat = both(text())
        shaped, ours = both(text().reshape(shape))
    assert shaped.dtype == ours.dtype == jnp.float64
    assert shaped.shape == (*shape, 16) and [entry[0] for entry in seen] == [0, 1]
    assert seen[1] == (1, (*shape, 4, 8), (*shape, 2, 8), 0.3, None, 1.5)
    np.testing.assert_allclose(shaped.reshape(12, 16), h, rtol=0, atol=1e-12)
    np.testing.assert_allclose(ours.reshape(12, -1), flat, rtol=0, atol=1e-12)


def test_a_row_does_not_depend_on_its_company():
    config, params = PLAIN, shaken(PLAIN)
    rows = jax.jit(lambda t, at: decoder.logits(params, config, decoder.hidden(params, config, t, at, itself, [])[0]))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 29, 64))
    positions = jnp.arange(64)
    order = np.random.default_rng(1).permutation(64)
    others = tokens.at[jnp.arange(0, 64, 2)].set(3)
    whole = np.asarray(rows(tokens, positions))
    assert np.array_equal(np.asarray(rows(tokens[order], positions[order])), whole[order])
    assert np.array_equal(np.asarray(rows(others, positions))[1::2], whole[1::2])


@pytest.mark.parametrize("variant", ["plain", pytest.param("all", marks=pytest.mark.extended)])
def test_remat_keeps_gradients_and_the_cache(variant):
    config = config_of(variant)
    params, tokens, positions = shaken(config), jnp.asarray(text())[None], jnp.arange(12)[None]

    def loss(params, policy):
        counting = dense(positions)

        def attend(layer, q, k, v, cache, **how):
            return counting(layer, q, k, v, cache, **how)[0], cache + (layer + 1) * k.sum()

        h, cache = decoder.hidden(
            params, config, tokens, positions, attend, jnp.zeros(()), loop=layer_loop.LayerLoop(policy=policy)
        )
        return jnp.sin(decoder.logits(params, config, h)).sum() + cache

    kept, again = (jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, policy) for policy in (None, "full"))
    np.testing.assert_allclose(kept[0], again[0], rtol=1e-6)
    for path, one in jax.tree_util.tree_leaves_with_path(kept[1]):
        two = again[1]
        for key in path:
            two = two[key.key]
        gap = np.linalg.norm(one - two) / np.linalg.norm(one)
        assert gap <= 5e-6, (path, gap)


@pytest.mark.parametrize("variant", ["all", "layer_embeds", "experts beside"])
def test_gradient_agrees_with_finite_differences(variant):
    config = dataclasses.replace(config_of(variant), layer_scalars=False)  # which is not trained
    tokens, positions = text(), np.arange(12)
    params = shaken(config)
    direction = jax.tree.map(lambda leaf: np.random.default_rng(leaf.size).normal(size=leaf.shape), params)

    def twin(step: float) -> float:
        moved = jax.tree.map(lambda leaf, d: leaf.astype(np.float64) + step * d, params, direction)
        return float(np.sin(numpy_llama.forward(moved, config, tokens, dtype=np.float64)).sum())

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
        gradient = jax.jit(
            jax.grad(
                lambda p: jnp.sin(
                    scores(p, config, jnp.asarray(tokens)[None], jnp.asarray(positions)[None], dtype=jnp.float64)
                ).sum()
            )
        )(wide)
    gradient = jax.tree.map(np.asarray, gradient)
    slope = sum(float((g * d).sum()) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction)))
    measured = (twin(1e-6) - twin(-1e-6)) / 2e-6
    assert abs(slope - measured) < 1e-6 * abs(measured)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))


def test_bfloat16_stays_near_and_scores_in_float32():
    config, tokens = config_of("all"), text()
    params = shaken(config)
    half = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    exact = numpy_llama.forward(params, config, tokens, dtype=np.float64)
    for given in (params, half):
        ours = scores(given, config, jnp.asarray(tokens)[None], jnp.arange(12)[None], dtype=jnp.bfloat16)
        assert ours.dtype == jnp.float32
        # 8 bits of mantissa over two layers.
        assert np.abs(np.asarray(ours[0]) - exact).max() < 0.1


def test_init_is_a_function_of_seed_path_and_shape():
    config = PRESETS["tiny"]
    params, again, other = decoder.init(config, 3), decoder.init(config, 3), decoder.init(config, 4)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(again)))
    assert not np.array_equal(params["embed"], other["embed"])
    assert not np.array_equal(params["layers"]["0"]["q"], params["layers"]["1"]["q"])
    deeper = decoder.init(dataclasses.replace(config, layers=3, windows=()), 3)
    assert np.array_equal(params["layers"]["1"]["q"], deeper["layers"]["1"]["q"])
    assert abs(params["layers"]["0"]["q"].std() * 32**0.5 - 1) < 0.1
    assert params["final_norm"].tolist() == [1.0] * 32
    assert decoder.init(dataclasses.replace(config, norm_offset=1.0), 3)["final_norm"].tolist() == [0.0] * 32


@pytest.mark.parametrize("sizes", [(1, 4, 1), (1, 2, 2), (2, 1, 2)])
def test_init_by_pieces_has_the_bits_of_init(sizes, monkeypatch):
    """However the noise is cut into blocks; `init` itself draws a leaf at once here."""
    config = PRESETS["tiny"]
    wanted = decoder.init(config, 3)
    monkeypatch.setattr(decoder, "_DRAWN", 100)
    there = meshes.make_mesh(*sizes)
    homes = meshes.param_shardings(there, decoder.axes(config), "learner")
    placed = decoder.placed(config, 3, homes)
    for leaf, home, want in zip(*map(jax.tree.leaves, (placed, homes, wanted)), strict=True):
        assert leaf.sharding == home and leaf.dtype == np.float32
        for shard in leaf.addressable_shards:
            assert np.array_equal(shard.data, want[shard.index])


def test_axes_name_every_axis_once():
    config = config_of("all")
    sizes = dict(vocab=29, embed=16, heads=4, kv_heads=2, head_dim=8, ffw=20)
    shapes, names = decoder.abstract(config), decoder.axes(config)
    assert jax.tree.map(lambda leaf: leaf.shape, shapes) == jax.tree.map(np.shape, decoder.init(config, 0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        about = names
        for key in path:
            about = about[key.key]
        assert len(about) == len(leaf.shape)
        assert all(name is None or sizes[name] == size for name, size in zip(about, leaf.shape)), (path, about)
    assert names["layers"]["1"]["o"] == ("heads", "head_dim", "embed") and names["embed"] == ("vocab", "embed")
    assert (names["layers"]["1"]["sinks"], names["layers"]["1"]["o_bias"]) == (("heads",), (None,))
    assert "head" not in names and "head" in decoder.axes(PLAIN)


@pytest.mark.parametrize(
    "name, count",
    [  # as their publishers count them
        ("stories260k", 260_032),
        ("llama3_2_1b", 1_235_814_400),
        ("llama3_1_8b", 8_030_261_248),
        ("qwen2_5_0_5b", 494_032_768),
        ("qwen2_5_1_5b", 1_543_714_304),
        ("qwen3_0_6b", 596_049_920),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, count):
    assert sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(decoder.abstract(PRESETS[name]))) == count


@pytest.mark.parametrize(
    "change, sentence",
    [
        (dict(kv_heads=3), "heads=4 must be a multiple of kv_heads=3"),
        (dict(head_dim=7), "head_dim=7 must be even.* nearest valid value is 8"),
        (dict(windows=(None,)), "windows has 1 entries, expected one for each of 2 layers"),
        (dict(windows=(None, 0)), "at least 1"),
        (dict(shared_layers=1, windows=(None, 3)), "shared_layers=1 must leave a layer of each window before them"),
        (dict(full=FullAttention(3, 8)), "heads=4 must be a multiple of kv_heads=3"),
        (dict(full=FullAttention(0, 8)), "full needs kv_heads and head_dim of at least 1"),
        (dict(activation="relu"), "not one of silu, gelu_tanh, gelu"),
        (dict(rope_scaling=RopeScaling("ntk", 2.0)), "'ntk' is not one of linear, llama3, yarn, dynamic, longrope"),
        (dict(rope_scaling=RopeScaling("yarn", 2.0), rope_theta=1.0), "rope_theta=1 must be above 1, because yarn"),
        (dict(rope_scaling=LONGROPE._replace(original_length=1)), "original length 1 of longrope must be at least 2"),
        (
            dict(rope_scaling=LONGROPE._replace(long_factors=(1.0,))),
            "longrope has 1 long factors, expected 4, one for each pair of head_dim=8",
        ),
        (dict(layer_embeds=-1), "layer_embeds=-1 must be at least 0"),
        (dict(ffw=0), "ffw must be at least 1, got 0"),
    ],
)
def test_impossible_shapes_are_refused_in_one_sentence(change, sentence):
    refused(sentence, dataclasses.replace, PLAIN, **change)


def test_ids_without_meaning_are_never_scored():
    """used_vocab: the law over the used ids alone, by plain renormalisation; and entropies stay finite."""
    from jaxrl_post.algorithms import logprobs

    config = dataclasses.replace(PRESETS["tiny"], used_vocab=50)
    params = jax.tree.map(jnp.asarray, decoder.init(config, 0))
    h = jnp.asarray(np.random.default_rng(0).normal(size=(5, config.embed)), jnp.float32)
    masked, plain = decoder.logits(params, config, h), decoder.logits(params, PRESETS["tiny"], h)
    targets = jnp.array([0, 7, 49, 3, 12])
    got, entropy = logprobs.of_logits(masked, targets)
    want = numpy_llama.log_softmax(np.asarray(plain, np.float64)[:, :50])
    np.testing.assert_allclose(got, want[np.arange(5), targets], atol=1e-5)
    np.testing.assert_allclose(entropy, -(np.exp(want) * want).sum(-1), atol=1e-5)
    assert np.exp(np.asarray(logprobs.of_logits(masked, jnp.full(5, 55))[0])).max() == 0
