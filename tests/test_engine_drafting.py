"""The host side of drafting: places against a map of used entries, values by hand, uploads against numpy, and
checkpoints.
"""

from __future__ import annotations

import dataclasses

import engine_lab as lab
import numpy as np
import plain_rollouts
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_post.engine.host.wire import ALL_SIZE, OFFERS, OFFSET, ROW, SIZE, UPLOAD
from jaxrl_post.engine.speculation import acceptance, corpus
from jaxrl_post.engine.speculation import speculation as host
from jaxrl_post.engine.speculation.registry import DRAFTERS
from jaxrl_post.engine.speculation.speculation import Drafting, Shared, TableCache
from jaxrl_post.engine.step_cost import StepCost, best_size
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.history import History
from jaxrl_post.ring.types import Group, Prompt, RolloutId
from jaxrl_post.runs.checkpoint.host_state import read_state, write_state

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPTS = {name: Prompt(id=name, tokens=[ord(name), 1, 2]) for name in "abcdef"}


def group(name, epoch, length=20, answers=2):
    noise = np.random.default_rng((ord(name), epoch))
    return Group(
        prompt=PROMPTS[name],
        rewards=np.zeros(answers),
        scored=np.ones(answers, bool),
        rollouts=tuple(
            plain_rollouts.rollout(
                RolloutId(0, "train", epoch, name, sample), PROMPTS[name], noise.integers(0, 9, length)
            )
            for sample in range(answers)
        ),
    )


def made(name="ours", *, entries=8 * UPLOAD, shared=0, clones=True, slots=4, replicas=1, width=4):
    """Returns a Drafting and its history."""
    history = History(epochs=2, max_bytes=1 << 20)
    drafter = DRAFTERS[name](vocab=200, width=width, entries=entries, live=64)
    return Drafting(drafter, replicas=replicas, slots=slots, past=history.of, shared=shared, clones=clones), history


def record(drafting, history, new):
    history.record(new)
    drafting.record(new)


# ---- weights


def test_drafts_of_the_answer_that_will_probably_finish_last_count_most():
    """The longest rollouts had 20, 12 and 8 tokens last time, so 10, 2 and 3 tokens are expected.

    Nothing is expected of a prompt without a past, nor of a rollout that is longer than last time."""
    drafting, history = made()
    for name, length in zip("abc", (20, 12, 8)):
        record(drafting, history, group(name, 3, length=length))
    running = {
        RolloutId(0, "train", 4, name, sample): length
        for name, sample, length in (("a", 0, 10), ("b", 0, 10), ("c", 0, 5), ("c", 1, 9), ("d", 0, 10))
    }
    assert list(drafting.weights(running).values()) == pytest.approx([1.0, 0.6, 0.65, 1.0, 1.0])
    assert set(made()[0].weights(running).values()) == {1.0}


# ---- places


@given(st.lists(st.tuples(st.sampled_from("abcdefg"), st.integers(1, 3 * UPLOAD), st.booleans()), max_size=40))
def test_regions_never_overlap_and_the_oldest_unused_go_first(visits):
    first, entries = 1000, 1000 + 6 * UPLOAD
    table_cache, held = TableCache(first, entries), {}
    for name, size, used in visits:
        if name in held:
            table_cache.drop(name)
            del held[name]
        room, found = -(-size // UPLOAD) * UPLOAD, table_cache.take(name, size, (0,))
        while (offset := gap(held, first, entries, room)) is None:
            unused = next((other for other, (_, _, is_used) in held.items() if not is_used), None)
            if unused is None:
                break
            del held[unused]
        if offset is None:
            assert found is None
        else:
            assert (found.offset, found.room, found.size) == (offset, room, size)
            found.users = int(used)
            held[name] = offset, room, used
        assert list(table_cache.regions) == list(held)


def gap(held, first, entries, room):
    """Returns the lowest place for this many entries between the used ones."""
    taken = sorted((offset, offset + size) for offset, size, _ in held.values())
    for start in [first, *(end for _, end in taken)]:
        if start + room <= entries and all(start + room <= begin or start >= end for begin, end in taken):
            return start
    return None


def test_rows_of_the_live_table_go_to_the_prompt_that_was_here_longest_ago():
    rows = Shared(3)
    assert [rows.enter(name) for name in "abc"] == [(0, True), (1, True), (2, True)]
    assert rows.enter("a") == (0, False), "a sibling shares its row"
    rows.leave("a")
    rows.leave("b")
    rows.leave("c")
    assert rows.enter("c") == (2, False), "what it wrote is still there"
    assert rows.enter("d") == (1, True), "b was here before, and a still runs"
    rows.leave("a")
    rows.leave("c")
    assert rows.enter("b") == (0, True) and rows.enter("e") == (2, True)


def test_a_prompt_gets_its_table_and_keeps_it_until_it_changes_and_nobody_reads_it():
    drafting, history = made(shared=3 * 100)
    none, fresh = drafting.open(0, PROMPTS["a"])
    assert none[[OFFSET, SIZE, ALL_SIZE, ROW]].tolist() == [0, 0, 300, 0] and fresh
    assert [(offset, arrays[0].size) for _, offset, arrays in drafting.uploads()] == [(0, 300)], (
        "the empty table of all"
    )
    record(drafting, history, group("a", 0))
    one, fresh = drafting.open(0, PROMPTS["a"])
    assert one[[OFFSET, SIZE]].tolist() == [UPLOAD, 3 * 40] and not fresh
    pieces = drafting.uploads()
    assert [(replica, offset) for replica, offset, _ in pieces] == [(0, UPLOAD), (0, 0)]
    assert np.array_equal(pieces[0][2][0], corpus.grams(history.of("a"), PROMPTS["a"]))
    assert np.array_equal(pieces[1][2][0], drafting.corpus.entries) and pieces[1][2][0].any()
    assert drafting.uploads() == []
    record(drafting, history, group("a", 1))
    two, _ = drafting.open(0, PROMPTS["a"])
    assert np.array_equal(one, two), "somebody reads the old one"
    for place in (none, one, two):
        drafting.leave(0, PROMPTS["a"], place)
    three, _ = drafting.open(0, PROMPTS["a"])
    assert three[[OFFSET, SIZE]].tolist() == [UPLOAD, 3 * 80]
    assert np.array_equal(drafting.uploads()[0][2][0], corpus.grams(history.of("a"), PROMPTS["a"]))


def test_short_of_room_the_prompt_that_was_here_longest_ago_goes():
    drafting, history = made(entries=2 * UPLOAD)
    for name in "abc":
        record(drafting, history, group(name, 0))
    places = {name: drafting.open(0, PROMPTS[name])[0] for name in "abc"}
    assert [places[name][SIZE] > 0 for name in "abc"] == [True, True, False], "both are in use"
    for name in "abc":
        drafting.leave(0, PROMPTS[name], places[name])
    again = drafting.open(0, PROMPTS["a"])[0]
    assert again[OFFSET] == places["a"][OFFSET] and drafting.open(0, PROMPTS["c"])[0][OFFSET] == places["b"][OFFSET]
    assert drafting.metrics()["spec/num_prompts_indexed"] == 2.0


def test_replicas_have_their_own_tables():
    drafting, history = made(replicas=2)
    for name in "ab":
        record(drafting, history, group(name, 0))
    places = [drafting.open(replica, PROMPTS[name])[0] for replica, name in ((0, "a"), (1, "b"))]
    assert [place[OFFSET] for place in places] == [0, 0]
    assert [(replica, offset) for replica, offset, _ in drafting.uploads()] == [(0, 0), (1, 0)]


# ---- values


def test_what_rows_are_worth_by_hand():
    """Before any count: one draft a slot and step, with a chance in the middle of its bin, 8.5 / 16."""
    drafting, _ = made()
    assert drafting.worth(10, 4) == pytest.approx(4 * 8.5 / 16) and drafting.worth(2, 4) == pytest.approx(2 * 8.5 / 16)
    assert drafting.worth(0, 4) == 0.0 and made("off")[0].worth(10, 4) == 0.0
    assert drafting.clones_of(10, 4, free=9) == 3, "6 rows are left, a clone takes one and drafts one"
    assert drafting.clones_of(10, 4, free=2) == 2 and drafting.clones_of(4, 4, free=9) == 0
    assert drafting.clones_of(1000, 1, free=99) == host.MOST_BRANCHES and made(clones=False)[0].clones_of(10, 4, 9) == 0
    assert drafting.worth(10, 4, free=9) == pytest.approx(4 * 8.5 / 16 + 3 * acceptance.FIRST_GAIN)


def test_what_was_counted_weighs_and_older_counts_fade():
    drafting, _ = made()
    offers = np.zeros(OFFERS)
    offers[15], offers[4] = 200, 100
    counts = np.zeros((2, drafting.drafter.classes), int)
    counts[:, 7] = 64, 48
    drafting.record_outcome(counts, offers, slot_steps=100, clone_steps=1024, won=512)
    keep, steps = acceptance.SPAN / (acceptance.SPAN + 100), acceptance.FIRST_STEPS
    all_steps = keep * steps + 100
    first, second, third = (200 / all_steps, keep * steps / all_steps, 100 / all_steps)
    assert drafting.worth(1000, 2) == pytest.approx(2 * (first * 15.5 + second * 8.5 + third * 4.5) / 16)
    assert drafting.worth(2 * first, 2) == pytest.approx(2 * first * 15.5 / 16), "the most promising ones first"
    gain = (acceptance.SPAN * acceptance.FIRST_GAIN + 512) / (acceptance.SPAN + 1024)
    offered = 2 * (first + second + third)
    number = int((20 - offered) / (1 + offered / 2))
    assert drafting.worth(20, 2, free=50) == pytest.approx(drafting.worth(20, 2) + number * gain)
    prior = drafting.drafter.priors[7]
    assert drafting.estimates.rates()[7] == pytest.approx((48 + 16 * prior) / (64 + 16))


@pytest.mark.parametrize(("share", "goes_on"), [(0.0, False), (0.021, False), (0.05, False), (0.3, True), (0.9, True)])
def test_drafts_that_turn_out_wrong_end_with_the_dispatch_that_shows_it(share, goes_on):
    """32 slots of 16 steps, three drafts each, of an estimated chance of 10.5 / 16: as many are right as `share` says.

    A table on which rows are free, as an analytic one of a CPU, would have gone on with any."""
    drafting, _ = made(slots=32)
    free = StepCost((32, 128), (0.001, 0.001), "free")
    chosen = []
    for _ in range(4):
        drafts = best_size(free, (32, 128), 32, 0.0, lambda rows: drafting.worth(rows, 32))[1]
        chosen.append(drafts)
        if not drafts:
            drafting.quiet(16)
            continue
        offers = np.zeros(OFFERS)
        offers[10] = 3 * 32 * 16
        zeros = np.zeros((2, drafting.drafter.classes), int)
        drafting.record_outcome(zeros, offers, 512, 0, 0, given=1536, right=round(1536 * share))
    assert chosen == [True, *[goes_on] * 3]
    if goes_on:
        prior, hoped = acceptance.SURMISED, 1536 * 10.5 / 16
        right, expected = (sum(value * (2 / 3) ** n for n in range(4)) for value in (round(1536 * share), hoped))
        assert drafting.value.calibration == pytest.approx(min(1.0, (right + prior) / (expected + prior)))


def told_nothing(drafting):
    drafting.record_outcome(np.zeros((2, drafting.drafter.classes), int), np.zeros(OFFERS), 1, 0, 0)


def test_drafting_is_tried_again_after_a_while_and_ever_more_rarely():
    drafting, _ = made()
    for wait in (256, 512, 1024, 2048, 4096, 4096):
        for _ in range(wait // 16):
            assert not drafting.due(0)
            drafting.quiet(16)
        assert drafting.due(0) and not drafting.active
        told_nothing(drafting)
        assert not drafting.due(0) and drafting.active
    drafting.quiet(4100)
    assert not drafting.due(4101), "the wait is over at 4096, but tries must lie 4101 apart"
    drafting.quiet(1)
    assert drafting.due(4101)
    told_nothing(drafting)
    drafting.quiet(4096)
    assert not drafting.due(5000)
    told_nothing(drafting)  # not a trial: drafting seemed to pay
    for _ in range(16):
        assert not drafting.due(0)
        drafting.quiet(16)
    assert drafting.due(0)
    idle, _ = made("off")
    for _ in range(500):
        idle.quiet(16)
        assert not idle.due(0)


# ---- checkpoints


def visit(drafting, history):
    """Returns the results of several calls as plain values."""
    out = []
    for epoch in (2, 3):
        for name in "abcdef"[:4]:
            place, fresh = drafting.open(0, PROMPTS[name])
            out.append((place.tolist(), fresh))
            out += [(r, o, [a.tobytes() for a in arrays]) for r, o, arrays in drafting.uploads()]
            drafting.leave(0, PROMPTS[name], place)
            record(drafting, history, group(name, epoch))
        offers = np.arange(OFFERS) * epoch
        drafting.record_outcome(np.full((2, drafting.drafter.classes), epoch), offers, 10, 3, 2)
        out += [drafting.worth(9, 3, 4), drafting.estimates.rates().tobytes(), sorted(drafting.metrics().items())]
    return out


@pytest.mark.parametrize("name", ["ours", "histospec", "ngram"])
def test_after_a_rest_it_goes_on_like_one_that_took_up_its_state(name, tmp_path):
    shared = 900 if name == "ours" else 0
    one, past = made(name, shared=shared)
    visit(one, past)
    one.quiet(16)
    one.rest()
    write_state(tmp_path / "state", {"drafting": one.state_dict(), "history": past.state_dict()})
    state = read_state(tmp_path / "state")
    two, other = made(name, shared=shared)
    other.load_state_dict(state["history"])
    two.load_state_dict(state["drafting"])
    assert visit(one, past) == visit(two, other)


def test_without_the_rest_it_would_not():
    one, past = made(shared=900)
    visit(one, past)
    two, other = made(shared=900)
    other.load_state_dict(past.state_dict())
    two.load_state_dict(one.state_dict())
    assert visit(one, past) != visit(two, other)


def test_counts_of_another_drafter_are_refused():
    with pytest.raises(ValueError, match="resume with the drafter of the saved run"):
        made("ours")[0].load_state_dict(made("histospec")[0].state_dict() | {"corpus": {}})


# ---- the device's tables


@pytest.mark.extended
@pytest.mark.parametrize("name", ["ours", "histospec"])
def test_uploads_land_where_they_should(name):
    """Uploads three texts on two replicas, one of them over older entries. Neighbouring entries stay."""
    mesh = meshes.make_mesh(2, 1, 1)
    drafting = lab.drafting(name, [], replicas=2)
    drafting.drafter = dataclasses.replace(drafting.drafter, entries=8 * UPLOAD)
    engine = lab.engine(mesh=mesh, drafting=drafting)
    fields = 1 if name == "ours" else 3
    want = [np.array(x) for x in list(engine.device.tables)[:fields]]
    noise = np.random.default_rng(0)
    for replica, offset, size in ((1, 2, 1500), (0, 0, 3000), (1, 4, 1024), (1, 2, 10)):
        arrays = tuple(noise.integers(1, 99, size).astype(x.dtype) for x in want)
        engine.device.tables = engine.device.programs.upload(engine.device.tables, replica, offset * UPLOAD, arrays)
        for whole, array in zip(want, arrays):
            end = offset * UPLOAD + -(-size // UPLOAD) * UPLOAD
            whole[replica, offset * UPLOAD : end] = 0
            whole[replica, offset * UPLOAD : offset * UPLOAD + size] = array
    rates = np.linspace(0.1, 0.9, drafting.drafter.classes).astype(np.float32)
    engine.device.tables = engine.device.programs.rated(engine.device.tables, rates)
    for whole, found in zip(want, engine.device.tables):
        assert np.array_equal(whole, np.asarray(found))
    assert np.array_equal(np.asarray(engine.device.tables.rates), np.stack([rates, rates]))
