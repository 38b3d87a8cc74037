"""The head split over the vocabulary against the whole head on one device: values, gradients, and what travels."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import made_groups
import numpy as np
import pytest

from jaxrl_post.algorithms import logprobs
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.trainer import split_head

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


def whole(model, policy, hidden, targets):
    def head(piece):
        return written_out(policy, model, piece)

    return logprobs.chosen(head, hidden, targets, temperature=HEAT, chunk=10_000)


def written_out(policy, model, h):
    """The decoder's logits, by one product."""
    out = h @ (policy["embed"].T if model.tied else policy["head"])
    out = out if model.final_soft_cap is None else model.final_soft_cap * jnp.tanh(out / model.final_soft_cap)
    used = model.used_vocab or model.vocab_size
    return jnp.where(jnp.arange(out.shape[-1]) < used, out, decoder.NOT_ALLOWED)


def split(model, mesh, policy, hidden, targets):
    return split_head.chosen(policy, model, hidden, targets, temperature=HEAT, chunk=CHUNK, mesh=mesh)


def results(run, given):
    """Log-probs, entropies, and the gradients of both by hidden states and matrix."""
    policy, hidden, targets, slopes = given

    def total(policy, hidden):
        found = run(policy, hidden, targets)
        return sum(jnp.sum(weight * x) for weight, x in zip(slopes, found, strict=True)), found

    grads, found = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(policy, hidden)
    return jax.device_get({"laws": list(found), "policy": grads[0], "hidden": grads[1]})


def both(model, sizes, dtype, rows=B):
    with jax.enable_x64(dtype == np.float64):
        given, mesh = case(model, dtype, rows), meshes.make_mesh(*sizes)
        return results(functools.partial(split, model, mesh), given), results(functools.partial(whole, model), given)


MESHES = [(2, 2, 2), *(pytest.param(sizes, marks=pytest.mark.extended) for sizes in ((1, 4, 1), (1, 1, 8), (1, 2, 4)))]


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("model", [TIED, pytest.param(OWN, marks=pytest.mark.extended)], ids=["tied", "own"])
def test_values_and_gradients_are_those_of_the_whole_head_in_x64(model, sizes):
    split, whole = both(model, sizes, np.float64)
    assert max(made_groups.distances(split, whole).values()) <= EXACT


@pytest.mark.extended
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
        found = split(model, mesh, policy, hidden, targets)
        return sum(jnp.sum(weight * x) for weight, x in zip(slopes, found, strict=True))

    placed = jax.tree.map(lambda x, home: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home), policy, homes)
    others = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), (hidden, targets, slopes))
    program = jax.jit(jax.grad(total, argnums=(0, 1)), out_shardings=(homes, rows))
    return program.lower(placed, *others).compile().as_text()


COLLECTIVE = re.compile(
    r"= (\(?[\w\[\]{},: /*=]*?\)?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def collectives_in_loops(text: str) -> list[tuple[str, str]]:
    """Returns (kind, shapes) of every collective in a computation that a while loop runs."""
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    found, inside = [], False
    for line in text.splitlines():
        start = re.match(r"%?([\w.\-]+) \(", line)
        if start:
            inside = start[1] in bodies
        elif inside and (hit := COLLECTIVE.search(line)):
            found.append((hit[2], hit[1]))
    return found


def has_a_size(shapes: str, sizes: set[int]) -> bool:
    return any(int(size) in sizes for dims in re.findall(r"\[([\d,]+)\]", shapes) for size in dims.split(","))


def test_nothing_of_the_vocabularys_size_crosses_chips_in_the_loop():
    """Sizes are chosen so that only the vocabulary has 88, or 11, 22, 44 of it."""
    model = dataclasses.replace(OWN, vocab_size=88)
    found = collectives_in_loops(lowered(model, (2, 2, 2)))
    kinds = {kind for kind, _ in found}
    assert {"all-gather", "all-reduce"} <= kinds, found
    assert not [one for one in found if has_a_size(one[1], {88, 44, 22, 11})]


def test_the_counter_sees_a_matrix_in_a_loop():
    """The same text with the vocabulary in a collective of the loop must be found: the check can fail."""
    line = "  %x = f32[16,22]{1,0} all-reduce(%y), replica_groups={}"
    text = "%b.1 (p: f32[]) -> f32[] {\n" + line + "\n}\nENTRY %main (p: f32[]) -> f32[] {\n  while(%p), body=%b.1\n}"
    assert collectives_in_loops(text) == [("all-reduce", "f32[16,22]{1,0}")] and has_a_size("f32[16,22]{1,0}", {22})


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

    fault.__name__ = f"no_sum_over_{axis}"
    return fault


def ids_of_the_first_part(monkeypatch):
    monkeypatch.setattr(split_head._Head, "ids", lambda self, matrix: jnp.arange(matrix.shape[self.axis]))


def rows_of_another_chip(monkeypatch):
    monkeypatch.setattr(split_head, "_own", lambda x, rows: x[:rows])


FAULTS = (
    no_common_maximum,
    no_sum_over(meshes.DATA),
    no_sum_over(meshes.TENSOR),
    ids_of_the_first_part,
    rows_of_another_chip,
)


@pytest.mark.extended
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_are_seen(monkeypatch, fault):
    fault(monkeypatch)
    split, whole = both(TIED, (2, 2, 2), np.float64)
    assert max(made_groups.distances(split, whole).values()) > 1e-3
