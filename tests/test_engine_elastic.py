"""A relayout during generation on eight forced devices: nothing is lost, held twice or compiled; the law is kept."""

from __future__ import annotations

from collections import Counter

import engine_lab as lab
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_post.engine.elastic import Elastic, moved
from jaxrl_post.launch.compile_guard import CompileGuard
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.types import Finish, Layout
from jaxrl_post.runs.checkpoint.host_state import read_state, write_state

pytestmark = pytest.mark.usefixtures("quick_compilation")

MANY, FEW = Layout(8, 1), Layout(4, 2)
SIZES = {MANY: dict(slots=4, pages=30, max_length=112), FEW: dict(slots=8, pages=60, max_length=112)}


def learner(seed=0, mesh=None):
    mesh = mesh or meshes.make_mesh(8)
    return meshes.put(lab.weights(seed), meshes.param_shardings(mesh, decoder.axes(lab.TINY), "learner"))


def make(params, order=(MANY, FEW)):
    def builder(layout):
        mesh = meshes.make_mesh(layout.replicas, 1, layout.tensor)
        return lambda: lab.made(lab.TINY, params, mesh, **SIZES[layout])

    return Elastic({layout: builder(layout) for layout in order}, params)


@pytest.fixture(scope="module")
def others():
    """Returns arrays that other tests left on the devices, alive, so that their ids are not used again."""
    return jax.live_arrays()


@pytest.fixture(scope="module")
def shared(others):
    """Returns the learner's weights and an engine that begins with them."""
    params = learner()
    return params, make(params)


@pytest.fixture
def fresh(shared):
    """Returns the same engine in its first layout, with the first weights under a higher version."""
    params, engine = shared
    engine.park([request.rollout_id for request in ASKED])
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


@pytest.mark.extended
@pytest.mark.parametrize("path", [(FEW,), (FEW, MANY), (FEW, MANY, FEW)], ids=len)
def test_answers_that_moved_follow_the_law(fresh, path):
    """Compares with an engine on one device that never moved, and with the independent sampler: equal but for near
    ties."""
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
    """Returns bytes on the devices: of pages (5 dimensions), and of everything else without `others`."""
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
    assert start[True] == pages  # the active engine's alone: the other layout has no pages
    fresh.relayout(FEW)
    there = _held(others)
    assert there[True] == pages  # twice the pages a replica, half the heads a device
    assert (
        0 < there[False] - start[False] <= 8 * weights
    )  # a copy beside the learner's weights, which `shared` did not need
    fresh.relayout(MANY)
    back = _held(others)
    assert back[True] == pages and back[False] > start[False]
    fresh.swap(learner(1), fresh.version + 1)  # uses the learner's buffers again
    assert _held(others)[True] == pages


def test_the_learners_buffers_are_never_given_up(shared, fresh):
    params, _ = shared
    fresh.relayout(FEW)
    fresh.relayout(MANY)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    for got, want in zip(jax.tree.leaves(fresh.engine.device.params), jax.tree.leaves(params), strict=True):
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
    """Saves in layout FEW. An engine that begins as MANY resumes, and ends bit for bit like the one that continued."""
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
        ValueError, match=r"Layout\(replicas=2, tensor=4\) was requested.*the nearest is Layout\(replicas=4"
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
    """By hand: three of `a` on 0, `b` and `c` on 1, one of `a` on 1, moved to two replicas."""
    lives = [
        ((0, "train", 0, prompt, sample, 0), replica)
        for prompt, sample, replica in (("a", 0, 0), ("a", 1, 0), ("a", 2, 0), ("b", 0, 1), ("c", 0, 1), ("a", 3, 1))
    ]
    assert moved(lives, 2) == [0, 0, 0, 1, 1, 1]


class Borrower:
    """Records its calls, and the number of devices that hold pages at each."""

    def __init__(self, others):
        self.told, self.others = [], others

    def _devices(self):
        theirs = {
            id(array) for array in self.others
        }  # ids of arrays that are kept alive, because the id of a freed array can return
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


@pytest.mark.extended
@pytest.mark.parametrize("shared", [True, False])
def test_fewer_replicas_of_the_same_kind_give_the_same_bits(others, shared):
    """Half of the replicas leave during generation and come back. Every token and log-prob is that of an engine that
    stays.

    The learner's weights survive the move, although the remaining replicas use their buffers. So do new weights."""
    mesh = meshes.make_mesh(4)
    params = learner(mesh=mesh)
    if not shared:
        params = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)  # the engine has its own copy, in float32
    ways, asked = (
        {Layout(4, 1): mesh, Layout(2, 1): meshes.divided(mesh, 2, mesh)[0]},
        [lab.dataclasses.replace(request, replica=request.replica % 4) for request in ASKED],
    )
    borrower = Borrower(jax.live_arrays())
    engine = Elastic(
        {
            layout: (lambda mesh: lambda: lab.made(lab.TINY, params, mesh, **SIZES[FEW]))(way)
            for layout, way in ways.items()
        },
        params,
        borrower,
    )
    assert (engine.engine.device.case == "shared") is shared
    want = lab.run(engine, asked)
    engine.engine.reset()
    engine.submit(asked)
    engine.step(), engine.step()
    engine.relayout(Layout(2, 1))
    engine.step(), engine.step()
    engine.relayout(Layout(4, 1))
    assert borrower.told == [("borrow", 2), ("give back", 0)]  # devices with pages: the two that stay; none
    own = [
        leaf is other for leaf, other in zip(*map(jax.tree.leaves, (engine.engine.device.params, params)), strict=True)
    ]
    assert all(own) if shared else not any(own)  # nothing was copied back
    assert lab.same_bits(want, finish(engine))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    new = learner(1, mesh=mesh)
    engine.swap(new, engine.version + 1)
    first = jax.tree.leaves(new)[0]
    assert engine.engine.device.owned is False and jax.tree.leaves(engine.engine.device.params)[0] is first
    engine.relayout(Layout(2, 1))
    engine.swap(learner(2, mesh=mesh), engine.version + 1)  # the engine's own copy there
    assert engine.engine.device.owned and not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))
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
    """The table over all prompts and the estimates move along. Rollouts with a right past are drafted in the new layout
    too."""
    asked = lab.requests(16, samples=2, exact=40, longest_prompt=20, temperatures=(1.0,), seed=5, replicas=2)
    plain = lab.run(lab.engine(max_length=112, pages=112), [lab.dataclasses.replace(r, replica=0) for r in asked])
    groups, params = lab.groups_of(asked, plain, epoch=1), learner(mesh=meshes.make_mesh(2))
    sizes = {Layout(2, 1): dict(slots=4, pages=32), Layout(1, 2): dict(slots=8, pages=64)}

    def builder(layout):
        drafting = lab.drafting("ours", groups, replicas=layout.replicas, slots=sizes[layout]["slots"])
        drafting.corpus = type(drafting.corpus)(3 << 12) if layout.tensor == 2 else drafting.corpus  # an empty corpus
        return lambda: lab.made(
            lab.TINY,
            params,
            meshes.make_mesh(layout.replicas, 1, layout.tensor),
            drafting=drafting,
            cost=lab.FREE_ROWS,
            **{**sizes[layout], "max_length": 112},
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
