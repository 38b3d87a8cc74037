"""Rows over several devices: the gradient is that of one device, for every form of attention and every split."""

import dataclasses
import functools
from types import SimpleNamespace

import critic_arms
import gradient_arms as arms
import jax
import made_groups
import numpy as np
import pytest
import shared_arms
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from jaxrl_post import config
from jaxrl_post.kernels import branches_tpu, flash_gpu
from jaxrl_post.models.model_config import LinearAttention
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel import row_pieces

pytestmark = pytest.mark.usefixtures("quick_compilation")
EXACT, SINGLE, SEEN = 1e-12, 5e-6, 1e-3
GROUPS = [*made_groups.groups(3), *shared_arms.conversations(2)]
MODE = dict(mode="seq-mean-token-mean")
LONG = dict(tokens=64, rows=2)  # rows of several segments, which end inside parts
GPU = functools.partial(flash_gpu.attention, tiles=flash_gpu.square(8), interpret=True)
TPU = functools.partial(branches_tpu.attention, interpret=True)
WAYS = {
    "two": dict(sizes=(1, 2, 1), context=2),
    "four": dict(sizes=(1, 4, 1), context=4),
    "two_of_eight": dict(sizes=(1, 4, 2), context=2, scan_layers="yes", remat=True),
    "eight": dict(sizes=(1, 8, 1), context=8, scan_layers="yes", split_head="yes"),
    "beside_data": dict(sizes=(2, 4, 1), context=2, rows=4),
}


@pytest.fixture(scope="module")
def expected():
    return arms.plain_gradient(GROUPS, np.float64, **MODE)


@pytest.mark.parametrize(
    "way", ["two_of_eight", *(pytest.param(n, marks=pytest.mark.shown("context")) for n in WAYS if n != "two_of_eight")]
)
def test_the_gradient_of_one_device(expected, way):
    assert arms.worst(arms.gradient(GROUPS, np.float64, **MODE, **(LONG | WAYS[way])), expected) <= EXACT


@pytest.mark.parametrize("form", ["gpu", pytest.param("tpu", marks=pytest.mark.shown("context"))])
def test_by_kernels(expected, form):
    dtype, bound, own = {"gpu": (np.float64, EXACT, GPU), "tpu": (np.float32, SINGLE, TPU)}[form]
    found = arms.gradient(GROUPS, dtype, **MODE, **LONG, **WAYS["four"], attention=own)
    assert arms.worst(found, expected) <= bound


@pytest.mark.shown("context")
@pytest.mark.parametrize("shared", [{}, shared_arms.SHARED], ids=["flat", "shared"])
@pytest.mark.parametrize("name", ["windows", "sinks", "experts"])
def test_models_of_other_kinds(name, shared):
    model = dict(model=shared_arms.MODELS[name])
    one = arms.gradient(GROUPS, np.float64, **MODE, **model)
    assert (
        arms.worst(arms.gradient(GROUPS, np.float64, **MODE, **LONG, **WAYS["four"], **model, **shared), one) <= EXACT
    )


RECURRENT = dataclasses.replace(made_groups.MODEL, linear=LinearAttention(4, 8, 4, 4, 4, (0,)))


@pytest.mark.parametrize("way", ["two_of_eight", pytest.param("four", marks=pytest.mark.shown("context"))])
def test_layers_with_a_state(way):
    one = arms.gradient(GROUPS, np.float64, **MODE, model=RECURRENT)
    found = arms.gradient(GROUPS, np.float64, **MODE, **(LONG | WAYS[way]), model=RECURRENT)
    assert arms.worst(found, one) <= EXACT


def test_heads_of_a_state_that_cannot_be_divided_are_refused():
    model = dataclasses.replace(RECURRENT, linear=RECURRENT.linear._replace(key_heads=2))
    words = "mesh.context=4 must divide .* 2 key heads .*; the nearest valid value is 2"
    refused(words, arms.learner, model=model, **(LONG | WAYS["four"]))


@given(st.sampled_from([(1, 1, 1), (2, 4, 2), (1, 8, 4)]), st.integers(1, 2), st.integers(1, 2))
def test_pieces_are_put_together_again(sizes, rows, length):
    data, fsdp, context = sizes
    pieces = row_pieces.RowPieces(meshes.make_mesh(data, fsdp), context)
    shape = (rows * data * fsdp // context, 2 * context * length, 3)
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert np.array_equal(pieces.joined(pieces.cut(jax.numpy.asarray(x))), x)


def test_parts_by_hand():
    """Two devices: the first has the ends of each row, the second its middle."""
    pieces = row_pieces.RowPieces(meshes.make_mesh(1, 2), 2)
    cut = pieces.cut(jax.numpy.arange(16).reshape(2, 8))
    assert cut.tolist() == [[0, 1, 6, 7], [8, 9, 14, 15], [2, 3, 4, 5], [10, 11, 12, 13]]


@pytest.mark.parametrize(
    "given, words",
    {
        "mesh.context=3 mesh.fsdp=4": "mesh.fsdp=4 must be a multiple of mesh.context=3",
        "mesh.context=2": "mesh.fsdp=1 must be a multiple of mesh.context=2",
        "mesh.context=2 mesh.fsdp=4 batch.rows=3": "must be a multiple of .*/mesh.context=2; the nearest valid batch.rows is 4",
    }.items(),
)
def test_what_does_not_divide_is_refused(given, words):
    refused(words, config.resolve, config.default(), ["model.preset=tiny", *given.split()])


def test_a_run_that_lends_devices_refuses_shared_rows():
    given = ["model.preset=tiny", "scheduler.name=tail_batching", "scheduler.lend=1", "mesh.data=2", "mesh.fsdp=2"]
    refused("mesh.context divides rows", config.resolve, config.default(), [*given, "mesh.context=2"])


def test_a_teacher_with_a_state_is_checked(monkeypatch):
    teacher = SimpleNamespace(model=RECURRENT)
    refused(
        "layer 0 of the teacher hands on a recurrent state; the nearest valid value is False",
        arms.learner,
        teacher=teacher,
        **shared_arms.SHARED,
    )


def test_a_critic_over_shared_rows():
    """Values and the critic's gradient are those of one device."""
    found = []
    with arms.precision(np.float64):
        for how in ({}, LONG | WAYS["four"], LONG | WAYS["four"] | shared_arms.SHARED):
            one = critic_arms.learner(np.float64, **how)
            one.prepare(GROUPS)
            one.accumulate(GROUPS)
            found.append((jax.device_get(one.gradient()), jax.device_get(one._critic.gradient())))
    assert all(arms.worst(some, found[0]) <= EXACT for some in found[1:])


def test_rows_that_cannot_be_cut_are_refused():
    refused("batch.tokens=46 must be a multiple of 2.mesh.context=8", arms.learner, tokens=46, **WAYS["four"])
