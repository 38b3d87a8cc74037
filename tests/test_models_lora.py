"""Low-rank additions: how they begin, how they are merged, and which base they belong to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import lora_arms
import made_groups
import numpy as np
import pytest
from refusals import refused

from jaxrl_post import config
from jaxrl_post.models import decoder, lora
from jaxrl_post.models.model_config import Lora
from jaxrl_post.parallel import mesh as meshes

MODEL = made_groups.MODEL


def policy(given: Lora, dtype=np.float32, mesh=None) -> lora.Adapted:
    found = lora.Adapted(made_groups.weights(0, dtype), lora_arms.adapter(given, 0, dtype), given)
    axes = lora.axes(lora.adapting(MODEL, given))
    homes = [meshes.param_shardings(mesh or meshes.make_mesh(), one, "engine") for one in (axes.base, axes.adapter)]
    return lora.Adapted(meshes.put(found.base, homes[0]), meshes.put(found.adapter, homes[1]), given)


def gap(found, wanted) -> float:
    return max(made_groups.distances(jax.device_get(found), wanted).values())


@pytest.mark.parametrize("given", [lora_arms.PLAIN, lora_arms.ROOTED, Lora(3, 5.0, ("v", "o"))])
def test_a_merge_is_that_of_numpy(given):
    wanted = lora_arms.merged(made_groups.weights(0, np.float64), lora_arms.adapter(given, 0, np.float64), given)
    assert gap(lora.merge(policy(given)), wanted) < 1e-6
    twice = Lora(given.rank, 2 * given.alpha, given.targets, given.rslora)
    other = lora_arms.merged(made_groups.weights(0), lora_arms.adapter(given, 0), twice)
    assert gap(lora.merge(policy(given)), other) > 1e-3


def test_a_leaf_alone_has_the_bits_of_a_merge_of_all():
    given = lora_arms.ROOTED
    whole = jax.device_get(lora.merge(policy(given)))
    alone = lora.exported(policy(given))
    for path, leaf in jax.tree_util.tree_leaves_with_path(whole):
        one = alone
        for key in path:
            one = one[key.key]
        assert np.array_equal(leaf, one), path
    split = lora.merge(policy(given, mesh=meshes.make_mesh(1, 1, 2)))
    assert gap(split, whole) < 1e-7  # in another layout only rounding differs


def test_a_base_in_bfloat16_is_merged_in_float32():
    given = lora_arms.PLAIN
    half = policy(given)
    half = lora.Adapted(jax.tree.map(lambda x: x.astype(jnp.bfloat16), half.base), half.adapter, given)
    base = jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(half.base))
    wanted = lora_arms.merged(base, lora_arms.adapter(given, 0, np.float64), given)
    assert gap(lora.merge(half), wanted) < 1e-6


def test_additions_begin_as_in_peft():
    """kaiming_uniform_(a=sqrt(5)) of lora_A [r, inputs] is uniform in +-1/sqrt(inputs); lora_B is 0."""
    given = Lora(64, 16.0, ("q", "o", "down"))
    first, again, other = (lora.init(lora.adapting(MODEL, given), seed) for seed in (0, 0, 1))
    for own in first["layers"].values():
        for name, inputs in (("q", MODEL.embed), ("o", MODEL.heads * MODEL.head_dim), ("down", MODEL.ffw)):
            a = own[f"{name}_a"]
            assert np.abs(a).max() <= inputs**-0.5 < 1.05 * np.abs(a).max()
            assert a.std() == pytest.approx((3 * inputs) ** -0.5, rel=0.1) and abs(a.mean()) < 0.1 * a.std() * 3
            assert not own[f"{name}_b"].any()
    pairs = list(zip(jax.tree.leaves(first), jax.tree.leaves(again), jax.tree.leaves(other), strict=True))
    assert all(np.array_equal(a, b) for a, b, _ in pairs) and any(not np.array_equal(a, c) for a, _, c in pairs)


def test_a_digest_sees_every_bit_and_no_sharding():
    base = made_groups.weights(0)
    which = np.asarray(lora.digest(base))
    axes = decoder.axes(MODEL)
    split = meshes.put(base, meshes.param_shardings(meshes.make_mesh(1, 2, 2), axes, "learner"))
    assert np.array_equal(which, jax.jit(lora.digest)(split))
    for change in ("a bit", "two numbers change places", "two matrices change places"):
        other = jax.tree.map(np.array, base)
        own = other["layers"]["0"]
        if change == "a bit":
            own["q"].view(np.uint32)[3, 1, 2] ^= 1
        elif change == "two numbers change places":
            own["q"][0, 0, 0], own["q"][0, 0, 1] = own["q"][0, 0, 1], own["q"][0, 0, 0]
        else:
            own["gate"], own["up"] = own["up"], own["gate"]
        assert not np.array_equal(which, np.asarray(lora.digest(other))), change


def test_targets_by_the_names_of_peft():
    assert lora.targets(("down_proj", "q_proj"), MODEL) == ("q", "down")
    assert lora.targets(("all-linear",), MODEL) == lora_arms.EVERY
    refused("in_proj_z is no module of this model; .* of q_proj, k_proj", lora.targets, ("q_proj", "in_proj_z"), MODEL)


def test_a_config_takes_the_same_names():
    for names in [*((name,) for name in lora.MODULES), (lora.ALL,)]:
        given = config.resolve({"model": {"preset": "tiny"}, "lora": {"rank": 2, "targets": names}})
        assert given.lora.targets == names
    with pytest.raises(ValueError, match="'q' is not one of q_proj"):
        config.resolve({"model": {"preset": "tiny"}, "lora": {"rank": 2, "targets": ("q",)}})
