"""The wide prompt program: prompts computed many rows at once change no token, whatever else a pass computes."""

from __future__ import annotations

import dataclasses
import functools

import engine_lab as lab
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.engine import bit_probe, compiled, prompt_program, row_program
from jaxrl_post.engine.host import packing
from jaxrl_post.engine.host import wire as c
from jaxrl_post.engine.host.sequence import begin
from jaxrl_post.engine.row_state import Program, RowProgram
from jaxrl_post.engine.speculation.interface import Drafter
from jaxrl_post.kernels import attention
from jaxrl_post.models import decoder, experts
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.types import Prompt, Request, RolloutId, Sampling

pytestmark = pytest.mark.usefixtures("quick_compilation")

SIZES = dict(max_length=200, pages=16 * 13, prompt_rows=128)
SHORT = lab.requests(16, longest_prompt=80, longest=16, seed=3)
ASKED = lab.requests(32, longest_prompt=160, longest=32, seed=3)


def engine(**changes):
    return lab.engine(**SIZES | changes)


def fresh(engine):
    engine.reset()
    engine.metrics()
    return engine


@pytest.fixture(scope="module")
def small():
    """The engine of the first tier: prompts of up to two tiles, and the row program of the other equality suites."""
    return lab.engine(prompt_rows=128)


@pytest.fixture(scope="module")
def shared():
    return engine()


@pytest.fixture(scope="module")
def plain(shared):
    return lab.run(fresh(shared), ASKED)


# ---- the law and its equalities


def test_agrees_with_the_independent_sampler_in_any_order(small):
    out = lab.run(fresh(small), SHORT)
    counts = small.metrics()
    assert counts["rows/size_128"] >= 2 and max(r.prompt.tokens.size for r in SHORT) > c.PROMPT_TILE
    assert lab.against_sampler(out, SHORT[::2], lab.weights(0)) == []
    assert lab.same_bits(out, lab.run(fresh(small), SHORT[::-1], submit_at=[0, 3] * 8))


@pytest.mark.extended
def test_every_rollout_agrees_with_the_independent_sampler(plain):
    assert lab.against_sampler(plain, ASKED, lab.weights(0)) == []


@pytest.mark.shown("exact-scale")
@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 1},
        {"slots": 60, "pages": 800},
        {"pages": 15},
        {"steps_per_dispatch": 1},
        {"steps_per_dispatch": 1, "pages": 15, "refill_slots": 1},
    ],
    ids=str,
)
def test_slots_pages_and_dispatches_change_nothing(plain, changes):
    one = engine(**changes)
    assert lab.same_bits(plain, lab.run(one, ASKED))
    counts = one.metrics()
    assert (counts.get("sched/preemptions", 0) > 0) == (changes.get("pages") == 15)


@pytest.mark.shown("exact-scale")
@pytest.mark.parametrize("rows", [192, 512])
def test_within_one_number_of_rows_the_order_changes_nothing(rows):
    one = engine(prompt_rows=rows)
    out = lab.run(one, ASKED)
    assert lab.against_sampler(out, ASKED[::3], lab.weights(0)) == []
    for seed in (1, 2):
        noise = np.random.default_rng(seed)
        order = [ASKED[i] for i in noise.permutation(len(ASKED))]
        assert lab.same_bits(out, lab.run(fresh(one), order, submit_at=noise.integers(0, 12, len(ASKED)).tolist()))


@pytest.mark.shown("exact-scale")
@pytest.mark.parametrize("mode", ["recompute", "verify", "restart"])
def test_parking_changes_nothing(shared, plain, mode):
    out, parks = lab.park_and_resume(fresh(shared), ASKED, mode=mode)
    assert parks >= 10 and lab.same_bits(plain, out)


@pytest.mark.shown("exact-scale")
def test_drafts_and_clones_change_nothing(plain):
    past = [g for epoch in (0, 1) for g in lab.groups_of(ASKED, plain, epoch, vary=0.1)]
    for clones in (False, True):
        one = engine(drafting=lab.drafting("ours", past, clones=clones), cost=lab.FREE_ROWS)
        assert lab.same_bits(plain, lab.run(one, ASKED))
        assert one.metrics()["spec/num_accepted"] > 30


@pytest.mark.extended
def test_a_saved_engine_resumes_with_the_same_bits(shared, plain):
    one = fresh(shared)
    one.submit(ASKED)
    out = {r.id: r for _ in range(3) for r in one.step()}
    state = one.state_dict()
    one.reset()
    one.load_state_dict(state, {r.prompt.id: r.prompt for r in ASKED})
    while one.pending:
        out.update((r.id, r) for r in one.step())
    assert lab.same_bits(plain, out)


@pytest.mark.shown("exact-scale")
def test_after_a_swap_prompts_are_computed_with_the_new_weights():
    asked = lab.requests(24, samples=4, seed=10, longest=40, longest_prompt=150)
    new = meshes.put(lab.weights(1), meshes.param_shardings(meshes.make_mesh(), decoder.axes(lab.TINY), "engine"))
    out = lab.swap_in_mid_generation(engine(), asked, new, steps=3, mode="recompute")
    mixed = [r for r in asked if set(out[r.rollout_id].versions.tolist()) == {0, 1}]
    assert len(mixed) >= 4
    assert [o for o in (lab.recomputed_after_swap(out[r.rollout_id], r, lab.weights(1), 1) for r in mixed) if o] == []


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((2, 1, 1), marks=pytest.mark.shown("exact-scale")),
        pytest.param((2, 1, 2), marks=pytest.mark.extended),
    ],
    ids=["data2", "data2xtensor2"],
)
def test_replicas_and_shards(shape):
    mesh = meshes.make_mesh(*shape)
    asked = lab.requests(32, longest_prompt=160, longest=32, seed=3, replicas=meshes.replicas(mesh))
    one = engine(mesh=mesh)
    out = lab.run(one, asked)
    assert lab.against_sampler(out, asked[::2], lab.weights(0)) == []
    assert lab.same_bits(out, lab.run(fresh(one), asked[::-1]))


def test_evaluation_and_training_share_a_wide_program(small):
    some = SHORT[:6]
    want = lab.run(fresh(small), some)
    one = fresh(small)
    one.submit(some)
    one.step()
    clock = one.clock
    asked = [dataclasses.replace(r, rollout_id=r.rollout_id._replace(purpose="eval")) for r in some]
    seen = lab.run(one, asked)
    seen = {name: r for name, r in seen.items() if name.purpose == "eval"}
    assert one.metrics()["eval/rows/size_128"] > 0 and clock > 0
    for r in some:
        assert seen[r.rollout_id._replace(purpose="eval")].tokens.tobytes() == want[r.rollout_id].tokens.tobytes()
    one.park([r.rollout_id for r in some])


# ---- tiles and passes


def sequence(length: int, slot: int, pages=()) -> object:
    name = RolloutId(0, "train", 0, str(slot), 0)
    prompt = Prompt(id=str(slot), tokens=np.zeros(length, np.int32))
    one = begin(Request(rollout_id=name, prompt=prompt, seed=name.seed(), max_tokens=4, sampling=Sampling()), age=slot)
    one.slot, one.pages = slot, list(pages)
    return one


def test_passes_hold_each_shared_position_once_and_in_order():
    sizes = c.EngineSettings(
        slots=4,
        max_length=400,
        page_size=16,
        pages=100,
        row_sizes=(ROWS,),
        head_rows=4,
        steps_per_dispatch=8,
        prompt_rows=192,
    )
    lengths = (1, 2, 64, 65, 66, 300)
    ones = [sequence(length, slot, range(10 * slot, 10 * slot + 3)) for slot, length in enumerate(lengths)]
    passes = list(packing.passes(sizes, ones))
    assert [p.shape for p in passes] == [(1, 3, c.TILE_TABLE + 25)] * 4
    seen = {slot: [] for slot in range(6)}
    for tile in np.concatenate(passes, axis=1)[0]:
        slot, first, count = tile[: c.TILE_TABLE].tolist()
        if count:
            assert first % c.PROMPT_TILE == 0 and tile[c.TILE_TABLE :].tolist() == [*ones[slot].pages] + [100] * 22
            seen[slot] += range(first, first + count)
    assert seen == {slot: list(range(length - 1)) for slot, length in enumerate(lengths)}


def test_rows_that_are_no_whole_tiles_are_refused():
    with pytest.raises(
        ValueError, match="engine.prompt_rows=100 must be a multiple of 64; the nearest valid value is 128"
    ):
        lab.engine(prompt_rows=100)


# ---- what a prompt reads


LENGTH, PAGE, ROWS = 4096, 16, 512


def entries_of_a_turn(cache, function, *arguments) -> int:
    """KV entries of one layer that a turn of the program's page loop reads: the gathers from an array of pages."""
    found, pages = [], cache[0].pages

    def walk(jaxpr, inside: bool) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "gather" and eqn.invars[0].aval.size == pages.size:
                assert inside, "pages are read outside of the loop"
                found.append(eqn.outvars[0].aval.size)
            for part in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(part, "eqns"):
                    walk(part, inside or eqn.primitive.name == "while")

    walk(jax.make_jaxpr(function)(*arguments), False)
    return sum(found) // (len(cache) * pages.shape[-2] * pages.shape[-1])


def entries_read(length: int, page: int, tile: int) -> int:
    """Returns how many KV entries of a layer are read to compute a prompt of `length` positions, in whole pages.

    Each group of `tile` positions reads its prefix once. The row program reads it for each row: `tile` is 1."""
    ends = (min(first + tile, length) for first in range(0, length, tile))
    return sum(-(-end // page) * page for end in ends)


def test_a_prompt_of_four_thousand_tokens_reads_an_eighth_at_most():
    """Both programs as an engine compiles them. A turn reads a stretch of every row's or every tile's prefix."""
    by_rows, by_tiles = (entries_read(LENGTH, PAGE, tile) for tile in (1, c.PROMPT_TILE))
    assert by_rows == sum(-(-(p + 1) // 16) * 16 for p in range(LENGTH)) and by_tiles * 8 <= by_rows
    sizes = c.EngineSettings(
        slots=4,
        max_length=LENGTH,
        page_size=PAGE,
        pages=1024,
        row_sizes=(ROWS,),
        head_rows=4,
        steps_per_dispatch=1,
        prompt_rows=ROWS,
    )
    model = dataclasses.replace(lab.TINY, max_length=LENGTH)
    state, _ = jax.eval_shape(lambda: compiled.Programs(model, meshes.make_mesh(), sizes).blanks(Drafter()))
    params = decoder.abstract(model)
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    routing = experts.Routing(experts.highest, functools.partial(meshes.by_experts, meshes.make_mesh()))
    same = dict(
        config=model, dtype="float32", spread=lambda attend: attend, spread_states=lambda read: read, routing=routing
    )
    wide = entries_of_a_turn(
        state.cache,
        functools.partial(prompt_program.prefill, Program(**same)),
        params,
        state.tokens,
        state.cache,
        ints((1, ROWS // c.PROMPT_TILE, c.TILE_TABLE + sizes.blocks)),
    )
    row = entries_of_a_turn(
        state.cache,
        functools.partial(row_program.dispatch, RowProgram(rows=ROWS, sizes=sizes, drafter=Drafter(), **same)),
        params,
        (),
        state,
        ints((1, sizes.slots, c.TABLE + sizes.blocks)),
        ints((3,)),
    )
    assert row == ROWS * attention.TURN and wide % (ROWS // c.PROMPT_TILE) == 0
    turn, stretch = row // ROWS, wide // (ROWS // c.PROMPT_TILE)
    ends = range(ROWS, LENGTH + 1, ROWS)  # the longest prefix of each step, and of each pass
    read = {"rows": sum(row * -(-end // turn) for end in ends), "wide": sum(wide * -(-end // stretch) for end in ends)}
    assert by_rows <= read["rows"] <= 1.2 * by_rows and by_tiles <= read["wide"] <= 1.2 * by_tiles
    assert 8 * read["wide"] <= read["rows"]


# ---- the probe, and planted faults


@pytest.mark.shown("exact-scale")
def test_the_probe_accepts_the_wide_program(shared):
    assert bit_probe.keep_equal_sizes(fresh(shared)) == {64: True}
    assert shared.row_sizes == (64,) and shared.clock == 0 and shared.metrics() == {}


def test_the_probe_refuses_bits_that_depend_on_the_place(shared, monkeypatch):
    one, real = fresh(shared), shared.device.prefill

    def prefill(tiles):
        tiles = tiles.copy()
        tiles[:, 1:, c.TILE_COUNT] -= tiles[:, 1:, c.TILE_COUNT] > 0
        real(tiles)

    monkeypatch.setattr(one.device, "prefill", prefill)
    monkeypatch.setattr(bit_probe, "_requests", lambda engine: SHORT[:8])
    with pytest.raises(ValueError, match="engine.prompt_rows=128: here the bits of a prompt depend on its place"):
        bit_probe.keep_equal_sizes(one)


def test_planted_last_shared_position_left_out(small, monkeypatch):
    real = packing.tiles

    def tiles(sequence):
        for slot, first, count in real(sequence):
            yield slot, first, count - (first + count == sequence.shared)

    monkeypatch.setattr(packing, "tiles", tiles)
    assert lab.against_sampler(lab.run(fresh(small), SHORT[:8]), SHORT[:8], lab.weights(0)) != []


@pytest.mark.shown("exact-scale")
def test_planted_second_writer_of_a_prompt(plain, monkeypatch):
    """Prompts of preempted rollouts are left to the row program: right values, and other bits."""
    real = packing.compute

    def compute(device, sizes, sequences):
        done = real(device, sizes, sequences)
        for one in sequences:
            one.num_computed = 0 if one.num_answered else one.num_computed
        return done

    monkeypatch.setattr(packing, "compute", compute)
    out = lab.run(engine(pages=15), ASKED)
    assert lab.against_sampler(out, ASKED[::4], lab.weights(0)) == []
    assert not lab.same_bits(plain, out)


@pytest.mark.shown("exact-scale")
@pytest.mark.parametrize(
    "old, new",
    [
        ("tokens[tiles[rows.slot, TILE_SLOT], rows.position]", "tokens[rows.slot, rows.position]"),
        ("tiles[:, TILE_FIRST], tiles", "tiles[:, TILE_FIRST] * 0, tiles"),
        ("tiles[:, TILE_TABLE:], PROMPT_TILE", "tiles[:, TILE_TABLE:][::-1], PROMPT_TILE"),
    ],
)
def test_planted_faults_of_the_program(plain, monkeypatch, old, new):
    import inspect

    source = inspect.getsource(prompt_program._pass)
    assert source.count(old) == 1
    exec(compile(source.replace(old, new), "planted", "exec"), vars(prompt_program), made := {})
    monkeypatch.setattr(prompt_program, "_pass", made["_pass"])
    assert not lab.same_bits(plain, lab.run(engine(), ASKED))
