"""The scanned form of the layers and every remat policy against layers written out: values, gradients, what is kept."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import made_groups
import numpy as np
import pytest
from dense_attend import dense, in_order
from test_models_decoder import config_of, shaken, text

from jaxrl_post.models import decoder, layer_loop
from jaxrl_post.models.model_config import Experts, FullAttention, LinearAttention, Lora

pytestmark = pytest.mark.usefixtures("quick_compilation")
EXACT, SINGLE = 1e-12, 5e-6
FORMS = {
    "written_out": {},
    "scanned": {"scan": True},
    "paired": {"scan": True, "paired": True},
    "placed": {"scan": True, "paired": True, "placed": True},
}
MIXED = dataclasses.replace(config_of("all"), layers=5, windows=(3, None, 5, 3, None))
EXPERTS = dataclasses.replace(
    config_of("qk_norm"),
    layers=4,
    windows=(None, 3, None, 3),
    experts=Experts(5, 2, 7, shared_ffw=6, dense_layers=(0,)),
)
# Layers 2 and 3 lend their keys and values: a body that lends two, and one that reads two.
LENT = dataclasses.replace(config_of("qk_norm"), layers=7, windows=(5, 5, None, 5, None, 5, 5), shared_layers=3)
# As in Gemma 4 E4B: periods of two kinds of layers, each with a lender of its own shapes, and embeddings of each layer.
GIVEN = dataclasses.replace(
    LENT, layers=9, windows=(5, 5, None) * 3, full=FullAttention(1, 12), shared_layers=3, layer_embeds=6
)
BESIDE = dataclasses.replace(config_of("all"), layers=3, windows=(4, 4, None), experts=Experts(5, 2, 7, beside=True))
# Twice two layers with states and dense feed-forwards, then one with attention and experts.
STATES = dataclasses.replace(
    config_of("qk_norm"), layers=6, windows=(), linear=LinearAttention(2, 4, 3, 5, 4, layers=(0, 1, 3, 4)),
    experts=Experts(5, 2, 7, dense_layers=(0, 1, 3, 4)),
)  # fmt: skip
# Keys and gates have no additions, so that their pairs have none of A and B.
LOW = dataclasses.replace(MIXED, lora=Lora(2, 3.0, ("q", "v", "o", "up", "down")))
# One A for all four matrices of the first two pairs, and one for both of the third.
LOW_NEXT = dataclasses.replace(
    STATES,
    layers=3,
    windows=(),
    linear=STATES.linear._replace(layers=(0, 1)),
    experts=None,
    lora=Lora(2, 3.0, ("linear_qkvz", "linear_ba", "linear_o")),
)
# One A for three matrices of the states' layers, and for the feed-forwards of both kinds their own.
LOW_STATES = dataclasses.replace(
    STATES,
    experts=STATES.experts._replace(shared_ffw=6),
    lora=Lora(2, 3.0, ("k", "v", "gate", "up", "linear_qkv", "linear_z", "linear_rate", "linear_decay", "linear_o")),
)
ALIKE = dataclasses.replace(config_of("qkv_bias"), layers=3, windows=(4, 4, 4))


def loss(params, config, tokens, dtype, **how):
    positions = jnp.arange(tokens.size)[None]
    plain = dense(positions)

    def attend(layer, q, k, v, cache, **more):
        out, _ = plain(layer, q, k, v, None, **more)
        out = layer_loop.named(out, layer_loop.ATTENDED)
        return out, cache + (layer + 1) * jnp.sum(k, dtype=cache.dtype)

    start = jnp.zeros((), jnp.promote_types(dtype, jnp.float32))
    loop = layer_loop.LayerLoop(**how)
    h, cache = decoder.hidden(
        params, config, tokens[None], positions, attend, start, dtype=dtype, loop=loop, recur=in_order
    )
    return jnp.sin(decoder.logits(params, config, h)).sum() + cache


def gradient(config, dtype=np.float64, **how):
    with jax.enable_x64(True) if dtype == np.float64 else contextlib.nullcontext():
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), shaken(config))
        return jax.device_get(jax.jit(jax.grad(lambda p: loss(p, config, jnp.asarray(text()), dtype, **how)))(params))


def worst(a, b):
    return max(made_groups.distances(a, b).values())


@pytest.mark.parametrize(
    "config, how",
    [
        (MIXED, {"policy": "full"}),
        (MIXED, {"policy": "full", "paired": True}),
        (MIXED, {"policy": "full", "paired": True, "placed": True}),
        (EXPERTS, {"policy": "full", "paired": True}),
        (BESIDE, {"policy": "projections", "paired": True}),
        (LENT, {"policy": "full", "paired": True}),
        (GIVEN, {"policy": "projections", "paired": True, "placed": True}),
        (LOW, {"policy": "projections", "paired": True}),
        (LOW_NEXT, {"policy": "full", "paired": True}),
        (LOW_STATES, {"policy": "full", "paired": True, "placed": True}),
        *(
            pytest.param(*one, marks=pytest.mark.shown("exact-scale"))
            for one in ((MIXED, {}), (ALIKE, {"policy": "full"}), (ALIKE, {"paired": True, "row_major": True}))
        ),
    ],
    ids=[
        "mixed",
        "mixed_paired",
        "mixed_placed",
        "experts",
        "beside",
        "lent",
        "given",
        "low",
        "low_next",
        "low_states",
        "mixed_kept",
        "alike",
        "alike_paired",
    ],
)
def test_scanned_gradients_are_those_of_layers_written_out_in_x64(config, how):
    assert worst(gradient(config, scan=True, **how), gradient(config)) <= EXACT


def test_the_order_of_axes_in_memory_changes_no_bit_of_a_gradient():
    found, plain = (gradient(ALIKE, scan=True, policy="full", row_major=row_major) for row_major in (True, False))
    assert jax.tree.all(jax.tree.map(np.array_equal, found, plain))


@pytest.mark.shown("exact-scale")
@pytest.mark.parametrize("policy", layer_loop.POLICIES)
@pytest.mark.parametrize("how", FORMS.values(), ids=FORMS)
def test_policies_change_no_gradient(policy, how):
    assert worst(gradient(MIXED, policy=policy, **how), gradient(MIXED)) <= EXACT


@pytest.mark.shown("exact-scale")
@pytest.mark.parametrize("config", [MIXED, ALIKE], ids=["mixed", "alike"])
def test_float32(config):
    assert worst(gradient(config, np.float32, scan=True, policy="full"), gradient(config, np.float32)) <= SINGLE


def jaxpr(config, *, dtype=jnp.float32, **how):
    shapes = decoder.abstract(config)
    tokens = jax.ShapeDtypeStruct((12,), jnp.int32)
    return jax.make_jaxpr(jax.grad(lambda p, t: loss(p, config, t, dtype, **how)))(shapes, tokens)


def products(config, **how):
    return len(re.findall(r"\bdot_general\[", str(jaxpr(config, **how))))


def test_a_scanned_program_holds_one_layer():
    deeper = dataclasses.replace(ALIKE, layers=6, windows=(4,) * 6)
    assert (
        products(deeper, scan=True, policy="full")
        == products(ALIKE, scan=True, policy="full")
        < products(ALIKE, policy="full")
    )


def test_a_scanned_program_holds_one_of_alike_layers_in_a_period():
    """Of a layer with a state, attention and experts, and not of each of the two with states."""
    alone = dataclasses.replace(
        STATES,
        layers=4,
        windows=(),
        linear=STATES.linear._replace(layers=(0, 2)),
        experts=STATES.experts._replace(dense_layers=(0, 2)),
    )
    assert products(STATES, scan=True, policy="full") == products(alone, scan=True, policy="full")


@pytest.mark.parametrize("how", FORMS.values(), ids=FORMS)
def test_a_policy_keeps_what_it_says(how):
    """Products that backward repeats of a layer: full q, k, v, scores, values, o, gate, up; attention not the last of
    attention; projections the scores alone. None repeats down, which nothing needs. Paired, k and v are one product,
    and gate and up too."""
    layers = 1 if how else ALIKE.layers
    plain = products(ALIKE, **how)
    repeated = {policy: (products(ALIKE, policy=policy, **how) - plain) / layers for policy in layer_loop.POLICIES}
    pairs = 2 if "paired" in how else 0
    assert repeated == {"full": 8 - pairs, "attention": 7 - pairs, "projections": 1, "offload": 8 - pairs}


@pytest.mark.parametrize("placed", [True, False])
def test_norms_are_stacked_as_they_are_and_matrices_in_the_dtype_of_the_computation(placed):
    found = str(jaxpr(ALIKE, dtype=jnp.bfloat16, scan=True, policy="full", paired=True, placed=placed))
    assert "f32[3,16]" in found and "bf16[3,2,16,20]" in found and "bf16[3,16]" not in found


@pytest.mark.parametrize("paired", [True, False])
def test_placed_weights_change_no_bit_of_values_and_gradients(paired):
    for dtype in (np.float32, np.float64):
        found, plain = (gradient(ALIKE, dtype, scan=True, paired=paired, placed=placed) for placed in (True, False))
        assert jax.tree.all(jax.tree.map(np.array_equal, found, plain))


def test_the_places_of_layers_are_read_when_the_program_runs():
    """So the compilers see equal writes. A place that is a constant of the program makes each of them another."""
    found = str(jaxpr(ALIKE, scan=True, placed=True))
    places = re.findall(r"= dynamic_update_slice \S+ \S+ (\S+)", found)
    assert len(places) == ALIKE.layers * len(decoder.abstract(ALIKE)["layers"]["0"])
    assert not any(":" in place for place in places)  # a constant is written with its type


def test_the_loop_takes_cosines_and_sines_from_behind_a_barrier():
    """So XLA:TPU cannot move them into the loop, where each layer would compute them again."""
    written, scanned = (str(jaxpr(ALIKE, scan=scan)) for scan in (False, True))
    assert "optimization_barrier" not in written and scanned.count("optimization_barrier") == 1
    assert scanned.index("= cos") < scanned.index("optimization_barrier") < scanned.index("= scan[")


def every_layer_has_the_first_window(monkeypatch):
    right = layer_loop.run
    monkeypatch.setattr(
        layer_loop,
        "run",
        lambda layers, h, turns, windows, *rest: right(layers, h, turns, (windows[0],) * len(windows), *rest),
    )


def every_layer_has_the_first_rotation(monkeypatch):
    monkeypatch.setattr(layer_loop, "_chosen", lambda tables, kind: tables[0])


def layers_in_reverse(monkeypatch):
    right = layer_loop._scanned
    monkeypatch.setattr(layer_loop, "_scanned", lambda layers, *rest: right(layers[::-1], *rest))


FAULTS = (every_layer_has_the_first_window, every_layer_has_the_first_rotation, layers_in_reverse)


@pytest.mark.shown("exact-scale")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_are_seen(monkeypatch, fault):
    plain = gradient(MIXED)
    fault(monkeypatch)
    assert worst(gradient(MIXED, scan=True, policy="full"), plain) > 1e-3


@pytest.mark.parametrize(
    "shapes, expected",
    [
        ("AAAA", [(0, 4, 1)]),
        ("LLLFLLLFLLLF", [(0, 12, 4)]),
        ("LLLFLLLFLL", [(0, 8, 4), (8, 10, 1)]),
        ("DMMMM", [(0, 1, 1), (1, 5, 1)]),
        ("LLLF", [(0, 3, 1), (3, 4, 1)]),  # what comes once is no period
    ],
)
def test_layers_are_scanned_by_the_period_of_their_shapes(shapes, expected):
    assert [(part.start, part.stop, period) for part, period in layer_loop.stretches(shapes)] == expected


@pytest.mark.parametrize("shapes, expected", [("LLLFLLLF", [(0, 1, 2, 4, 5, 6), (3, 7)]), ("LLLF", [(0, 1, 2), (3,)])])
def test_layers_are_stacked_that_one_body_computes(shapes, expected):
    assert layer_loop.groups(shapes) == expected
