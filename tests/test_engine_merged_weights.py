"""An engine whose weights are merged at a swap: its bits are those of an engine with the merged weights."""

from __future__ import annotations

import engine_lab as lab
import jax
import jax.numpy as jnp
import lora_arms
import numpy as np
import pytest

from jaxrl_post.engine.eight_bit_weights import coded
from jaxrl_post.models import decoder, lora
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel import relayout

GIVEN = lora_arms.PLAIN._replace(targets=("q", "o", "up"))
MODEL = lora.adapting(lab.TINY, GIVEN)


def adapter(seed: int) -> dict:
    noise = np.random.default_rng(seed)
    shapes = lora.abstract(MODEL).adapter
    return jax.tree.map(lambda leaf: (0.1 * noise.standard_normal(leaf.shape)).astype(np.float32), shapes)


def policies(mesh, room="learner", dtype=np.float32):
    """Returns two policies of one base, as a learner has them."""
    axes = lora.axes(MODEL)
    base = meshes.put(lab.weights(0), meshes.param_shardings(mesh, axes.base, room))
    base = jax.tree.map(lambda x: x.astype(dtype), base)
    homes = meshes.param_shardings(mesh, axes.adapter, room)
    return [lora.Adapted(base, meshes.put(adapter(seed), homes), GIVEN) for seed in (1, 2)]


def plain(policy):
    """Returns the merged weights in numpy's sum, rounded once, as plain params."""
    return jax.tree.map(
        np.asarray, jax.device_get(lora.merge(lora.Adapted(jax.tree.map(jnp.copy, policy.base), policy.adapter, GIVEN)))
    )


def bits(engine, asked):
    engine.reset()
    return lab.run(engine, asked)


def test_tokens_and_bits_are_those_of_merged_weights():
    mesh, asked = meshes.make_mesh(), lab.requests(8)
    first, second = policies(mesh)
    engine = lab.made(lab.TINY, first, mesh)
    assert engine.device.case == "merge" and not any(engine.device.links.values())
    assert lab.same_bits(bits(engine, asked), lab.run(lab.engine(plain(first)), asked))
    engine.swap(second, 1)
    assert lab.same_bits(bits(engine, asked), lab.run(lab.engine(plain(second)), asked))
    assert not lab.same_bits(bits(engine, asked), lab.run(lab.engine(lab.weights(0)), asked))


def test_what_has_no_additions_is_the_learners_own_buffer_and_merged_buffers_are_used_again():
    mesh = meshes.make_mesh()
    first, second = policies(mesh)
    engine = lab.made(lab.TINY, first, mesh)
    held = engine.device.params

    def where(leaf):
        return leaf.addressable_shards[0].data.unsafe_buffer_pointer()

    before = sorted(where(held["layers"][at][name]) for at in held["layers"] for name in GIVEN.targets)
    engine.swap(second, 1)
    held = engine.device.params
    for path, leaf in jax.tree_util.tree_leaves_with_path(held):
        own = first.base
        for key in path:
            own = own[key.key]
        assert (leaf is own) == (path[-1].key not in GIVEN.targets), path
    assert before == sorted(where(held["layers"][at][name]) for at in held["layers"] for name in GIVEN.targets)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_swap_to_another_layout_moves_additions_alone(dtype):
    learner, mesh = meshes.make_mesh(1, 2, 2), meshes.make_mesh(2, 1, 2)
    first, second = policies(learner, dtype=jnp.dtype(dtype))
    engine = lab.made(lab.TINY, first, mesh, dtype=jnp.dtype(dtype))
    assert engine.device.case == "relayout and merge"
    homes = meshes.param_shardings(mesh, lora.axes(MODEL).adapter, "engine")
    sizes = [
        4 * int(np.prod(home.shard_shape(leaf.shape))) * mesh.size
        for leaf, home in zip(jax.tree.leaves(first.adapter), jax.tree.leaves(homes), strict=True)
    ]
    assert sum(engine.device.links.values()) == sum(sizes)
    whole = relayout.links(
        jax.tree.leaves(first.base),
        jax.tree.leaves(meshes.param_shardings(mesh, decoder.axes(lab.TINY), "engine")),
        dtype,
    )
    assert sum(engine.device.links.values()) < sum(whole.values()) / 2
    engine.swap(second, 1)
    placed = policies(mesh, "engine", jnp.dtype(dtype))[1]
    wanted = jax.tree.map(lambda x: np.asarray(jnp.asarray(x).astype(dtype)), plain(placed))
    for got, want in zip(jax.tree.leaves(jax.device_get(engine.device.params)), jax.tree.leaves(wanted), strict=True):
        assert np.array_equal(got, want)


def test_an_engine_that_sleeps_frees_its_own_and_nothing_of_the_learners():
    mesh, asked = meshes.make_mesh(), lab.requests(8)
    first, second = policies(mesh)
    engine = lab.made(lab.TINY, first, mesh)
    own = [engine.device.params["layers"][at][name] for at in ("0", "1") for name in GIVEN.targets]
    engine.sleep()
    assert all(leaf.is_deleted() for leaf in own)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    engine.swap(second, 1)
    assert lab.same_bits(bits(engine, asked), lab.run(lab.engine(plain(second)), asked))


@pytest.mark.parametrize("axes", [None, ((1, 2, 2), (2, 1, 2))], ids=["in_place", "to_another_layout"])
def test_codes_are_those_of_merged_weights_and_a_swap_makes_those_with_additions_alone(axes):
    """Also behind a sleep. What the learner holds is never freed."""
    learner, mesh = (meshes.make_mesh(*one) for one in axes or ((), ()))
    first, second = policies(learner)
    engine = lab.made(lab.TINY, first, mesh, weights="int8")

    def same(policy):
        wanted = coded(plain(policy), "int8", np.float32)
        alike = jax.tree.map(np.array_equal, jax.device_get(engine.device.params), jax.device_get(wanted))
        return all(jax.tree.leaves(alike))

    assert same(first)
    frozen = engine.device.params["layers"]["0"]["down"]
    engine.swap(second, 1)
    assert same(second) and engine.device.params["layers"]["0"]["down"] is frozen
    engine.sleep()
    assert frozen.is_deleted()
    engine.swap(first, 2)
    assert same(first) and not any(leaf.is_deleted() for leaf in jax.tree.leaves((first, second)))
    if axes is None:
        assert engine.device.case == "merge and code" and not any(engine.device.links.values())
        return
    assert engine.device.case == "merge, code and relayout"
    parts = [engine.device.params["layers"][at] for at in ("0", "1")]
    moved = [part[f"{name}{more}"] for part in parts for name in GIVEN.targets for more in ("", "_scale")]
    assert sum(engine.device.links.values()) == sum(
        mesh.size * int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in moved
    )


def test_refusals_leave_the_old_version_running():
    mesh, asked = meshes.make_mesh(), lab.requests(8)
    first, second = policies(mesh)
    engine = lab.made(lab.TINY, first, mesh)
    before = bits(engine, asked)
    layer = second.adapter["layers"]["0"]
    cut = {"layers": {**second.adapter["layers"], "0": {**layer, "q_a": layer["q_a"][:, :3]}}}
    bad = {"layers": {**second.adapter["layers"], "0": {**layer, "q_a": layer["q_a"].at[0, 0].set(jnp.nan)}}}
    other = jax.tree.map(jnp.copy, first.base)
    for policy, sentence in [
        (lora.Adapted(other, second.adapter, GIVEN), "another base than the one in use"),
        (plain(first), "another base than the one in use"),
        (lora.Adapted(first.base, cut, GIVEN), r"\['q_a'\] has shape"),
        (lora.Adapted(first.base, bad, GIVEN), "not finite"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            engine.swap(policy, 1)
    with pytest.raises(ValueError, match="not finite"):
        engine.swap(second, 1, jnp.bool_(False))  # what is said of the additions decides
    assert engine.version == 0 and lab.same_bits(before, bits(engine, asked))
