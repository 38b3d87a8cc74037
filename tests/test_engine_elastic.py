"""A relayout in mid-generation on eight forced devices: nothing lost, held twice or compiled, and the law kept."""

from __future__ import annotations

from collections import Counter

import engine_lab as lab
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_post.checkpoint.host_state import read_state, write_state
from jaxrl_post.engine.elastic import Elastic, moved
from jaxrl_post.launch.compile_guard import CompileGuard
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.types import Finish, Layout

MANY, FEW = Layout(8, 1), Layout(4, 2)
SIZES = {MANY: dict(slots=4, pages=30, max_length=112), FEW: dict(slots=8, pages=60, max_length=112)}


def learner(seed=0, mesh=None):
    mesh = mesh or meshes.make_mesh(8)
    return meshes.put(lab.weights(seed), meshes.param_shardings(mesh, decoder.axes(lab.TINY), "learner"))


def make(params, order=(MANY, FEW)):
    def builder(layout):
        mesh = meshes.make_mesh(layout.replicas, 1, layout.tensor)
        return lambda: lab.RowEngine(lab.TINY, params, mesh, **{**lab.BASE, **SIZES[layout]})

    return Elastic({layout: builder(layout) for layout in order}, params)


@pytest.fixture(scope="module")
def others():
    """Arrays that other tests of the process left on the devices, kept alive so that nothing takes their place."""
    return jax.live_arrays()


@pytest.fixture(scope="module")
def shared(others):
    """The learner's weights and an engine that begins with them."""
    params = learner()
    return params, make(params)


@pytest.fixture
def fresh(shared):
    """The same engine in its first layout, with the first weights again, under a higher version."""
    params, engine = shared
    engine.cancel([request.rollout_id for request in ASKED])
    engine.relayout(MANY)
    engine.engine.reset()
    engine.swap(params, engine.version + 1)
    engine.metrics()
    return engine


ASKED = lab.requests(32, samples=4, exact=64, longest_prompt=40, temperatures=(1.0, 0.7), seed=3, replicas=8)


def finish(engine):
    out = {}
    while engine.pending:
        out |= {rollout.id: rollout for rollout in engine.step()}
    return out


@pytest.mark.parametrize("path", [(FEW,), (FEW, MANY), (FEW, MANY, FEW)], ids=len)
def test_answers_that_moved_follow_the_law(fresh, path):
    """Against an engine on one device that never moved, and the independent sampler: equal but for near ties."""
    fresh.submit(ASKED)
    for layout in path:
        fresh.step()
        clock = fresh.clock
        fresh.relayout(layout)
        assert (fresh.layout, fresh.clock, fresh.pending) == (layout, clock, len(ASKED))
    out = finish(fresh)
    assert sorted(out) == sorted(request.rollout_id for request in ASKED)
    assert all(rollout.finish_clock >= rollout.start_clock + 63 for rollout in out.values())
    one = lab.run(
        lab.engine(slots=16, max_length=112, pages=112),
        lab.requests(32, samples=4, exact=64, longest_prompt=40, temperatures=(1.0, 0.7), seed=3),
    )
    gaps, worst = lab.first_differences(one, out, ASKED, lab.weights(0))
    assert worst <= 1e-5 and all(gap < 1e-4 for gap in gaps), gaps
    assert not lab.against_sampler(
        {id: out[id] for id in list(out)[:4]}, [r for r in ASKED if r.rollout_id in list(out)[:4]], lab.weights(0)
    )


def test_tokens_that_were_there_stay_bit_for_bit(fresh):
    fresh.submit(ASKED)
    fresh.step(), fresh.step()
    before = {rollout.id: rollout for rollout in fresh.park([request.rollout_id for request in ASKED])}
    fresh.submit([lab.dataclasses.replace(r, prefix=before[r.rollout_id]) for r in ASKED])
    fresh.step()
    fresh.relayout(FEW)
    after = finish(fresh)
    assert any(len(rollout) >= 8 for rollout in before.values())
    for id, rollout in before.items():
        size = len(rollout)
        for name in ("tokens", "logprobs", "entropies", "versions"):
            assert getattr(after[id], name)[:size].tobytes() == getattr(rollout, name).tobytes(), (id, name)


def _held(others):
    """Bytes on the devices, of pages (5 dimensions) and of everything else, but for those of `others`."""
    theirs = {id(array) for array in others}
    buffers = {
        (shard.device, shard.data.unsafe_buffer_pointer()): (array.ndim == 5, shard.data.nbytes)
        for array in jax.live_arrays()
        if id(array) not in theirs
        for shard in array.addressable_shards
    }
    out = Counter()
    for paged, size in buffers.values():
        out[paged] += size
    return out


def test_one_layout_alone_holds_pages_and_weights(fresh, others):
    weights = sum(x.nbytes for x in jax.tree.leaves(lab.weights(0)))
    pages = 2 * lab.TINY.layers * 30 * lab.BASE["page_size"] * lab.TINY.kv_heads * lab.TINY.head_dim * 4 * MANY.replicas
    start = _held(others)
    assert start[True] == pages  # the engine's alone: the other layout has none
    fresh.relayout(FEW)
    there = _held(others)
    assert there[True] == pages  # twice the pages a replica, half the heads a device
    assert 0 < there[False] - start[False] <= 8 * weights  # beside the learner's: what `shared` did not need
    fresh.relayout(MANY)
    back = _held(others)
    assert back[True] == pages and back[False] > start[False]
    fresh.swap(learner(1), fresh.version + 1)  # and takes the learner's buffers again
    assert _held(others)[True] == pages


def test_the_learners_buffers_are_never_given_up(shared, fresh):
    params, _ = shared
    fresh.relayout(FEW)
    fresh.relayout(MANY)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    for got, want in zip(jax.tree.leaves(fresh.engine._params), jax.tree.leaves(params), strict=True):
        assert np.array_equal(np.asarray(got), np.asarray(want))


def test_swaps_and_relayouts_compile_nothing_and_new_weights_count(fresh):
    new = {seed: learner(seed) for seed in (1, 2)}
    asked = ASKED[:8]
    with CompileGuard() as guard:
        guard.arm()
        fresh.relayout(FEW)
        fresh.swap(new[1], fresh.version + 1)
        few = lab.run(fresh, asked)
        fresh.relayout(MANY)
        fresh.swap(new[2], fresh.version + 1)
        many = lab.run(fresh, asked)
    assert not lab.against_sampler(few, asked, lab.weights(1))
    assert not lab.against_sampler(many, asked, lab.weights(2))


def test_counters_and_prompts_go_on(fresh):
    told = []
    fresh.report = told.append
    fresh.submit(ASKED)
    fresh.step()
    fresh.relayout(FEW)
    finish(fresh)
    fresh.report = None
    counted = fresh.metrics()
    assert len(told) == counted["rows/dispatches"] and told[-1].clock + told[-1].steps == fresh.clock
    assert counted["engine/num_relayouts"] == 1 and counted["engine/num_moved_rollouts"] == 32
    assert counted["rows/decode"] == 32 * 64 and counted["rows/steps"] == fresh.clock
    assert fresh._prompts == {}


def test_a_run_saved_in_another_layout_goes_on_alike(fresh, tmp_path):
    """Saved as FEW; an engine that begins as MANY takes it up and ends bit for bit as the one that went on."""
    fresh.relayout(FEW)
    fresh.submit([lab.dataclasses.replace(r, replica=r.replica % 4) for r in ASKED])
    fresh.step()
    write_state(tmp_path / "state", fresh.state_dict())
    other = make(learner())
    other.swap(learner(), fresh.version)
    prompts = {request.prompt.id: request.prompt for request in ASKED}
    other.load_state_dict(read_state(tmp_path / "state"), prompts)
    assert (other.layout, other.clock, other.pending) == (FEW, fresh.clock, fresh.pending)
    assert lab.same_bits(finish(fresh), finish(other)) and fresh.metrics() == other.metrics()
    with pytest.raises(ValueError, match=r"was saved in Layout\(replicas=2, tensor=4\), compiled are.*engine.layouts"):
        other.load_state_dict({"layout": [2, 4]}, prompts)


def test_a_layout_that_was_not_compiled_is_refused(fresh):
    fresh.submit(ASKED)
    with pytest.raises(
        ValueError, match=r"Layout\(replicas=2, tensor=4\) was asked for.*the nearest is Layout\(replicas=4"
    ):
        fresh.relayout(Layout(2, 4))
    assert fresh.layout == MANY and len(finish(fresh)) == len(ASKED)
    with pytest.raises(ValueError, match="name others in engine.layouts"):
        fresh.engine.relayout(FEW)
    fresh.engine.relayout(MANY)


@given(before=st.integers(1, 8), after=st.integers(1, 8), prompts=st.lists(st.integers(0, 7), max_size=24))
def test_siblings_stay_together_and_replicas_are_filled_evenly(before, after, prompts):
    lives = [
        ((0, "train", 0, str(i), sample, 0), home % before) for i, home in enumerate(prompts) for sample in range(3)
    ]
    to = moved(lives, after)
    assert all(0 <= replica < after for replica in to)
    home = {}
    for (id, replica), target in zip(lives, to):
        assert home.setdefault((id[3], replica), target) == target
    loads = [to.count(replica) for replica in range(after)]
    assert max(loads) - min(loads) <= 3  # a group is not divided


def test_a_group_of_two_replicas_stays_two_and_loads_are_counted_in_answers():
    """By hand: three of `a` on 0, `b` and `c` on 1, one of `a` on 1: to two replicas."""
    lives = [
        ((0, "train", 0, prompt, sample, 0), replica)
        for prompt, sample, replica in (("a", 0, 0), ("a", 1, 0), ("a", 2, 0), ("b", 0, 1), ("c", 0, 1), ("a", 3, 1))
    ]
    assert moved(lives, 2) == [0, 0, 0, 1, 1, 1]


class Borrower:
    """Writes down what it is told, and how many devices hold pages then."""

    def __init__(self, others):
        self.told, self.others = [], others

    def _devices(self):
        theirs = {id(array) for array in self.others}  # of arrays that are kept: an id alone may come again
        return len(
            {
                shard.device
                for array in jax.live_arrays()
                if array.ndim == 5 and id(array) not in theirs
                for shard in array.addressable_shards
            }
        )

    def borrow(self):
        self.told.append(("borrow", self._devices()))

    def give_back(self):
        self.told.append(("give back", self._devices()))


@pytest.mark.parametrize("shared", [True, False])
def test_fewer_replicas_of_the_same_kind_give_the_same_bits(others, shared):
    """Half of the replicas leave in mid-generation, and come back: every token and log-prob is that of an engine that stays, whose
    programs are the same. The learner's weights, of which those that stay use the very buffers, survive it, and so do new ones."""
    mesh = meshes.make_mesh(4)
    params = learner(mesh=mesh)
    if not shared:
        params = jax.tree.map(
            lambda leaf: leaf.astype("bfloat16"), params
        )  # the engine has a copy of its own, in float32
    ways, asked = (
        {Layout(4, 1): mesh, Layout(2, 1): meshes.divided(mesh, 2, mesh)[0]},
        [lab.dataclasses.replace(request, replica=request.replica % 4) for request in ASKED],
    )
    borrower = Borrower(jax.live_arrays())
    engine = Elastic(
        {
            layout: (lambda mesh: lambda: lab.RowEngine(lab.TINY, params, mesh, **{**lab.BASE, **SIZES[FEW]}))(way)
            for layout, way in ways.items()
        },
        params,
        borrower,
    )
    assert (engine.engine.case == "shared") is shared
    want = lab.run(engine, asked)
    engine.engine.reset()
    engine.submit(asked)
    engine.step(), engine.step()
    engine.relayout(Layout(2, 1))
    engine.step(), engine.step()
    engine.relayout(Layout(4, 1))
    assert borrower.told == [("borrow", 2), ("give back", 0)]  # those that stay; nobody
    own = [leaf is other for leaf, other in zip(*map(jax.tree.leaves, (engine.engine._params, params)), strict=True)]
    assert all(own) if shared else not any(own)  # nothing was copied back
    assert lab.same_bits(want, finish(engine))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    new = learner(1, mesh=mesh)
    engine.swap(new, engine.version + 1)
    first = jax.tree.leaves(new)[0]
    assert engine.engine._owned is False and jax.tree.leaves(engine.engine._params)[0] is first
    engine.relayout(Layout(2, 1))
    engine.swap(learner(2, mesh=mesh), engine.version + 1)  # a copy of its own there
    assert engine.engine._owned and not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))
    some = [lab.dataclasses.replace(request, replica=0) for request in asked[:4]]
    assert not lab.against_sampler(lab.run(engine, some), some, lab.weights(2))


def test_parked_answers_may_be_handed_to_another_layout(fresh):
    fresh.submit(ASKED[:4])
    fresh.step()
    parked = fresh.park([request.rollout_id for request in ASKED[:4]])
    assert fresh.pending == 0 and all(rollout.finish == Finish.PARKED for rollout in parked)
    fresh.relayout(FEW)
    by_id = {request.rollout_id: request for request in ASKED}
    fresh.submit([lab.dataclasses.replace(by_id[p.id], prefix=p, replica=3) for p in parked])
    out = finish(fresh)
    assert not lab.against_sampler(out, ASKED[:4], lab.weights(0))


@pytest.mark.extended
def test_drafts_go_on_in_another_layout():
    """The table over all prompts and the estimates move along; answers of a past that is right are drafted there too."""
    asked = lab.requests(16, samples=2, exact=40, longest_prompt=20, temperatures=(1.0,), seed=5, replicas=2)
    plain = lab.run(lab.engine(max_length=112, pages=112), [lab.dataclasses.replace(r, replica=0) for r in asked])
    groups, params = lab.groups_of(asked, plain, epoch=1), learner(mesh=meshes.make_mesh(2))
    sizes = {Layout(2, 1): dict(slots=4, pages=32), Layout(1, 2): dict(slots=8, pages=64)}

    def builder(layout):
        drafting = lab.drafting("ours", groups, replicas=layout.replicas, slots=sizes[layout]["slots"])
        drafting.corpus = (
            type(drafting.corpus)(3 << 12) if layout.tensor == 2 else drafting.corpus
        )  # it knows nothing yet
        return lambda: lab.RowEngine(
            lab.TINY,
            params,
            meshes.make_mesh(layout.replicas, 1, layout.tensor),
            drafting=drafting,
            cost=lab.FREE_ROWS,
            **{**lab.BASE, **sizes[layout], "max_length": 112},
        )

    engine = Elastic({layout: builder(layout) for layout in sizes}, params)
    knows = engine.engine.drafting.corpus.entries.size
    engine.submit(asked)
    engine.step()
    first = engine.metrics()
    engine.relayout(Layout(1, 2))
    assert engine.engine.drafting.corpus.entries.size == knows > 0
    out = finish(engine)
    counted = engine.metrics()
    assert first["spec/num_accepted"] > 0 and counted["spec/num_accepted"] > first["spec/num_accepted"]
    gaps, worst = lab.first_differences(plain, out, asked, lab.weights(0))
    assert worst <= 1e-5 and all(gap < 1e-4 for gap in gaps), gaps
    version = engine.engine.drafting.corpus.version
    engine.drafting.record(groups[0])
    assert engine.engine.drafting.corpus.version > version
