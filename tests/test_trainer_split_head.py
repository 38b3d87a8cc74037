"""The head split over the vocabulary against the whole head on one device: values, gradients, and what travels."""

import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import made_groups
import numpy as np
import pytest

from jaxrl_post.algorithms import logprobs
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.trainer import split_head

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import collectives

pytestmark = pytest.mark.usefixtures("quick_compilation")
EXACT, SINGLE = 1e-12, 5e-6
TIED = dataclasses.replace(
    made_groups.MODEL, vocab_size=30, used_vocab=27, final_soft_cap=2.0
)  # 30 is no multiple of 4 or 8
OWN = dataclasses.replace(made_groups.MODEL, vocab_size=32, tied=False)
B, T, CHUNK, HEAT = 4, 10, 12, 0.7


def case(model, dtype, rows=B):
    rng = np.random.default_rng(0)
    shape = (model.vocab_size, model.embed) if model.tied else (model.embed, model.vocab_size)
    policy = {"embed" if model.tied else "head": jnp.asarray(rng.normal(size=shape), dtype)}
    hidden = jnp.asarray(rng.normal(size=(rows, T, model.embed)), dtype)
    targets = jnp.asarray(rng.integers(0, model.used_vocab or model.vocab_size, (rows, T)), jnp.int32)
    slopes = tuple(jnp.asarray(rng.normal(size=(rows, T)), dtype) for _ in range(2))
    return policy, hidden, targets, slopes


def records(model, targets):
    """Up to 5 ids of each token, the target among them; every third token has none."""
    noise, used = np.random.default_rng(1), model.used_vocab or model.vocab_size
    ids = noise.integers(0, used, (*targets.shape, 5))
    ids = np.where(noise.random(ids.shape) < 0.6, ids, -1)
    ids[..., 0] = targets
    ids.reshape(-1, 5)[::3] = -1
    return jnp.asarray(-np.sort(-ids, axis=-1), jnp.int32)  # -1 behind the others


def whole(model, kept, policy, hidden, targets):
    def head(piece):
        return written_out(policy, model, piece)

    among = records(model, targets) if kept else None
    return logprobs.chosen(head, hidden, targets, temperature=HEAT, chunk=10_000, kept=among)


def written_out(policy, model, h):
    """The decoder's logits, by one product."""
    out = h @ (policy["embed"].T if model.tied else policy["head"])
    out = out if model.final_soft_cap is None else model.final_soft_cap * jnp.tanh(out / model.final_soft_cap)
    used = model.used_vocab or model.vocab_size
    return jnp.where(jnp.arange(out.shape[-1]) < used, out, decoder.NOT_ALLOWED)


def split(model, mesh, kept, policy, hidden, targets):
    how = dict(temperature=HEAT, chunk=CHUNK, mesh=mesh, kept=records(model, targets) if kept else None)
    return split_head.chosen(policy, model, hidden, targets, **how)


def results(run, given):
    """Log-probs, entropies, and the gradients of both by hidden states and matrix."""
    policy, hidden, targets, slopes = given

    def total(policy, hidden):
        found = run(policy, hidden, targets)
        return sum(jnp.sum(weight * x) for weight, x in zip(slopes, found, strict=True)), found

    grads, found = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(policy, hidden)
    return jax.device_get({"laws": list(found), "policy": grads[0], "hidden": grads[1]})


def both(model, sizes, dtype, rows=B, kept=False):
    with jax.enable_x64(dtype == np.float64):
        given, mesh = case(model, dtype, rows), meshes.make_mesh(*sizes)
        return results(functools.partial(split, model, mesh, kept), given), results(
            functools.partial(whole, model, kept), given
        )


MESHES = [(2, 2, 2), *(pytest.param(sizes, marks=pytest.mark.extended) for sizes in ((1, 4, 1), (1, 1, 8), (1, 2, 4)))]


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize(
    "model", [TIED, pytest.param(OWN, marks=pytest.mark.shown("exact-scale"))], ids=["tied", "own"]
)
def test_values_and_gradients_are_those_of_the_whole_head_in_x64(model, sizes):
    split, whole = both(model, sizes, np.float64)
    assert max(made_groups.distances(split, whole).values()) <= EXACT


def test_of_kept_ids_alone():
    split, whole = both(TIED, (2, 2, 2), np.float64, kept=True)
    assert max(made_groups.distances(split, whole).values()) <= EXACT
    assert max(made_groups.distances(split, both(TIED, (2, 2, 2), np.float64)[1]).values()) > 0.1


@pytest.mark.shown("exact-scale")
@pytest.mark.parametrize("model", [TIED, OWN], ids=["tied", "own"])
def test_float32(model):
    split, whole = both(model, (2, 2, 2), np.float32)
    assert max(made_groups.distances(split, whole).values()) <= SINGLE


def lowered(model, sizes):
    """The program of values and gradients, compiled for `sizes`, with the learner's shardings."""
    mesh = meshes.make_mesh(*sizes)
    rows = meshes.batch_sharding(mesh)
    policy, hidden, targets, slopes = case(model, np.float32)
    homes = meshes.param_shardings(mesh, {name: decoder.axes(model)[name] for name in policy}, "learner")

    def total(policy, hidden, targets, slopes):
        found = split(model, mesh, False, policy, hidden, targets)
        return sum(jnp.sum(weight * x) for weight, x in zip(slopes, found, strict=True))

    placed = jax.tree.map(lambda x, home: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home), policy, homes)
    others = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), (hidden, targets, slopes))
    program = jax.jit(jax.grad(total, argnums=(0, 1)), out_shardings=(homes, rows))
    return program.lower(placed, *others).compile().as_text()


def test_nothing_of_the_vocabularys_size_crosses_chips_in_the_loop():
    """Sizes are chosen so that only the vocabulary has 88, or a part of it 44, 22 or 11."""
    model = dataclasses.replace(OWN, vocab_size=88)
    found, unknown = collectives.count(lowered(model, (2, 2, 2)))
    looped = [one for one in found if one.loops]
    assert {"all-gather", "all-reduce"} <= {one.kind for one in looped} and not unknown
    assert not [one for one in looped if one.has_size(88, 44, 22, 11)]
    assert [one for one in found if one.has_size(88, 44, 22, 11)]  # outside of the loop the matrix moves


@pytest.mark.parametrize("exchange", [split_head._at_once, split_head._by_parts])
@pytest.mark.parametrize("axis", [0, 1])
def test_an_exchange_changes_places_alone(exchange, axis):
    """All chips together hold the same matrix as before, in both directions. A part is 3 ids by 20 weights."""
    mesh, matrix = (
        meshes.make_mesh(2, 2, 2),
        np.arange(12 * 20, dtype=np.float32).reshape((12, 20) if axis == 0 else (20, 12)),
    )

    def moved(given, made, cut):
        run = meshes.by_vocab_shards(mesh, lambda part: (exchange(part, cut),), axis, given, made)
        return np.asarray(jax.jit(run)(matrix)[0])

    np.testing.assert_array_equal(moved("h", "m", axis), matrix)
    np.testing.assert_array_equal(moved("m", "h", 1 - axis), matrix)


def test_one_device_has_nothing_to_split():
    assert [split_head.serves(meshes.make_mesh(*sizes)) for sizes in ((1, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2))] == [
        False,
        False,
        True,
        True,
    ]


# ---- planted faults


def no_common_maximum(monkeypatch):
    monkeypatch.setattr(jax.lax, "pmax", lambda x, axes: x)


def no_sum_over(axis):
    def fault(monkeypatch):
        right = jax.lax.psum
        monkeypatch.setattr(jax.lax, "psum", lambda x, axes: x if axes == axis else right(x, axes))

    fault.__name__ = f"no_sum_over_{axis if isinstance(axis, str) else '_'.join(axis)}"
    return fault


def ids_of_the_first_part(monkeypatch):
    monkeypatch.setattr(split_head._Head, "ids", lambda self, matrix: jnp.arange(matrix.shape[self.axis]))


def rows_of_another_chip(monkeypatch):
    monkeypatch.setattr(split_head, "_own", lambda x, rows: x[:rows])


FAULTS = (
    no_common_maximum,
    no_sum_over(meshes.COPIES),
    no_sum_over(meshes.TENSOR),
    ids_of_the_first_part,
    rows_of_another_chip,
)


@pytest.mark.shown("exact-scale")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_are_seen(monkeypatch, fault):
    fault(monkeypatch)
    split, whole = both(TIED, (2, 2, 2), np.float64)
    assert max(made_groups.distances(split, whole).values()) > 1e-3
