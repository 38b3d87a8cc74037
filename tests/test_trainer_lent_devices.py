"""Devices lent to a learner for a part of a round: the same sum, whoever made a term of it; and nothing stays when they go."""

import gc

import gradient_arms as arms
import jax
import made_groups
import numpy as np
import pytest
from refusals import refused

from jaxrl_post import config
from jaxrl_post.launch.compile_guard import CompileGuard
from jaxrl_post.parallel import mesh
from jaxrl_post.trainer import lent_devices

pytestmark = pytest.mark.usefixtures("quick_compilation")
EXACT = 1e-12
GROUPS = made_groups.groups()
FIRST, SECOND = [GROUPS[g] for g in (2, 0)], [GROUPS[g] for g in (4, 1, 3)]


def meshes_of(fsdp, shared=False):
    """A learner's sizes, and the mesh of two lent devices, the last ones of four that generate: two of its own beside those, or,
    where all devices are shared, these four."""
    if shared:
        sizes = (1, 4, 1) if fsdp else (4, 1, 1)
        own = engine = mesh.make_mesh(*sizes)
    else:
        sizes = (1, 2, 1) if fsdp else (2, 1, 1)
        own, engine = mesh.make_split(*sizes, 4)
    return sizes, mesh.divided(engine, 2, own)[1]


def learner(dtype=np.float64, fsdp=False, shared=False, **more):
    sizes, lent = meshes_of(fsdp, shared)
    return arms.learner(dtype, sizes=sizes, lent=lent, tokens=40, **more)


def alone(**more):
    return arms.learner(np.float64, tokens=40, **more)


def streamed(one, lend, back=False):
    """A round in two pieces, for the second of which devices are lent, and which they may leave before the commit."""
    one.prepare(FIRST)
    one.accumulate(FIRST)
    if lend:
        one.borrow()
    one.prepare(SECOND)
    one.accumulate(SECOND)
    if back:
        one.give_back()


def bytes_on(devices):
    """Of buffers, each counted once, however many arrays share it."""
    return sum(
        {
            (shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
            for array in jax.live_arrays()
            if not array.is_deleted()
            for shard in array.addressable_shards
            if shard.device in devices
        }.values()
    )


@pytest.mark.parametrize(
    "shared, fsdp, mode, back",
    [
        *(
            pytest.param(*one, marks=pytest.mark.extended)
            for one in ((False, True, "token-mean", False), (True, False, "prompt-mean", False))
        ),
        *(
            pytest.param(*one, marks=pytest.mark.shown("variants"))
            for one in (
                (False, False, "token-mean", True),
                (True, True, "seq-mean-token-sum-norm", True),
                (True, False, "token-mean", True),
                (True, True, "token-mean", False),
                (False, False, "prompt-mean", False),
                (False, True, "seq-mean-token-sum-norm", True),
            )
        ),
    ],
)
def test_the_sum_is_that_of_the_learner_alone(shared, fsdp, mode, back):
    with arms.precision(np.float64):
        one, two = learner(fsdp=fsdp, shared=shared, mode=mode), alone(mode=mode)
        streamed(one, lend=True, back=back), streamed(two, lend=False)
        assert 0 < one._lent_batches <= len(one._packed(SECOND)[0]) - (not shared)
        assert arms.worst(jax.device_get(one.gradient()), jax.device_get(two.gradient())) <= EXACT
        told, whole = ({name: float(value) for name, value in each.commit().items()} for each in (one, two))
        assert told.pop("training/lent_micro_batches") > 0 and told.keys() == whole.keys()
        for name, value in whole.items():
            assert told[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize(
    "shared, scan",
    [
        pytest.param(False, "no", marks=pytest.mark.shown("variants")),
        pytest.param(True, "no", marks=pytest.mark.extended),
        pytest.param(False, "yes", marks=pytest.mark.shown("variants")),
    ],
)
def test_the_weights_after_steps_are_those_of_the_learner_alone(shared, scan):
    """Lent over a commit: what is accumulated then is at the new weights. SGD-like: no step of Adam hides a difference."""
    with arms.precision(np.float64):
        given = config.OptimizerConfig(lr=0.05, eps=1.0)
        one, two = learner(optimizer=given, shared=shared, scan_layers=scan), alone(optimizer=given)
        before = jax.device_get(two.params)
        for each, lend in ((one, True), (two, False)):
            streamed(each, lend)
            each.commit()
            each.prepare(GROUPS)
            each.accumulate(GROUPS)
        assert one._lent_batches > 0
        assert arms.worst(jax.device_get(one.gradient()), jax.device_get(two.gradient())) <= EXACT
        one.commit(), two.commit()
        after = jax.device_get(two.params)
        assert arms.worst(jax.device_get(one.params), after) <= EXACT < arms.worst(before, after)


@pytest.mark.extended
def test_a_planted_stale_copy_is_found(monkeypatch):
    """A guest that keeps the weights which it got first."""
    real = lent_devices.LentDevices.joined

    def keeps(self, sums):
        kept, out = self._policy, real(self, sums)
        self._policy, self._sums = kept, self._programs["zeros"]() if kept else None
        return out

    monkeypatch.setattr(lent_devices.LentDevices, "joined", keeps)
    with arms.precision(np.float64):
        one, two = learner(), alone()
        for each, lend in ((one, True), (two, False)):
            streamed(each, lend)
            each.commit()
            each.prepare(GROUPS)
            each.accumulate(GROUPS)
        assert arms.worst(jax.device_get(one.gradient()), jax.device_get(two.gradient())) > EXACT


def test_micro_batches_go_where_they_make_the_lesser_share():
    """Two devices of its own and four lent: by hand, of seven the second and the fifth stay, ties being the learner's."""
    own, lent = mesh.make_split(2, 1, 1, 4)
    lent = lent_devices.LentDevices(lent, made_groups.MODEL, host=own)
    assert [lent.takes() for _ in range(3)] == [False] * 3  # nothing is here
    lent.borrow()
    assert [lent.takes() for _ in range(7)] == [True, False, True, True, False, True, True]


@pytest.mark.parametrize(
    "fsdp, shared, more",
    [
        (True, False, 2),
        *(
            pytest.param(*given, marks=pytest.mark.shown("variants"))
            for given in ((False, False, 4), (True, True, 2), (False, True, 2))
        ),
    ],
)
def test_devices_that_are_given_back_hold_nothing_and_the_learner_all(fsdp, shared, more):
    """`more`: copies of the weights that lie on the two while they are lent: policy and sums, whole on each, or in halves; where
    each had the whole policy before, sums alone."""
    _, lent = meshes_of(fsdp, shared)
    one = learner(np.float32, fsdp=fsdp, shared=shared)
    one.compile()
    devices = set(lent.devices.flat)
    gc.collect()  # what other tests left in cycles must not go in the midst of this one
    before = bytes_on(devices)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(made_groups.weights(0, np.float32)))
    streamed(one, lend=True)
    rest = (
        sum(x.nbytes for _, results, _ in one._old._unread for x in results) * 2
    )  # log-probs that the commit will read
    assert more * weights <= bytes_on(devices) - before <= more * weights + rest + 1000
    one.give_back()
    assert before <= bytes_on(devices) <= before + rest + 1000
    one._old._unread, one._lent_devices.newest, one._newest = [], None, None  # those log-probs
    assert bytes_on(devices) == before
    jax.block_until_ready(
        jax.tree.map(lambda leaf: leaf + 0, (one.params, one._sums))
    )  # nothing of the learner's went with them
    went = one._lent_batches
    one.accumulate(GROUPS)
    assert one._lent_batches == went > 0 and one._lent_devices.newest is None  # nothing goes there any more


@pytest.mark.extended
def test_nothing_is_compiled_while_they_come_and_go():
    one = learner(np.float32)
    streamed(one, lend=True, back=True)
    one.commit()
    with CompileGuard() as guard:
        guard.arm()
        for _ in range(2):
            streamed(one, lend=True, back=True)
            one.commit()


def test_rows_that_the_lent_devices_cannot_divide_are_refused():
    _, lent = meshes_of(False)
    refused(
        "batch.rows=3 must be a multiple of mesh.data.mesh.fsdp.mesh.expert=2",
        arms.learner,
        np.float32,
        rows=3,
        lent=lent,
    )
