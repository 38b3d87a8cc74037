"""The numpy twin against the real engine: every finish, park, count and dispatch at the same clock, in every way to use it."""

from __future__ import annotations

import dataclasses
import functools

import engine_lab as lab
import numpy as np
import pytest
from models import twin as twin_file
from models.twin import Known, RowTwin

from jaxrl_post.engine import compiled as programs
from jaxrl_post.engine.host.row_host import RowHost
from jaxrl_post.engine.speculation.interface import Drafter
from jaxrl_post.engine.speculation.speculation import Drafting
from jaxrl_post.engine.step_cost import StepCost
from jaxrl_post.parallel import mesh as meshes

pytestmark = pytest.mark.usefixtures("quick_compilation")

ASKED = lab.requests(60)
CHEAP_ROWS = StepCost((64, 96), (1.0, 1.1), "two sizes, each the better one at times")


class Watched:
    """An engine, real or twin, and all it reported and answered."""

    def __init__(self, engine):
        self.engine, self.dispatches, self.seen = engine, [], []
        engine.report = self.dispatches.append

    def turn(self) -> list:
        out = self.engine.step()
        self.seen.append(
            (
                self.engine.clock,
                self.engine.capacity,
                self.engine.pending,
                [(r.id, r.finish, r.start_clock, r.finish_clock, r.tokens.tolist(), r.clocks.tolist()) for r in out],
            )
        )
        return out

    def run(self, asked) -> dict:
        self.engine.submit(asked)
        out = {}
        while self.engine.pending:
            out.update((r.id, r) for r in self.turn())
        return out

    @property
    def told(self) -> tuple:
        return self.dispatches, self.seen, self.engine.metrics()


def twin_of(engine, answers, drafted=(), drafting=None) -> Watched:
    """Of the engine's own settings."""
    drafting = drafting or Drafting(
        engine.drafting.drafter,
        replicas=engine.sizes.replicas,
        slots=engine.sizes.slots,
        past=lambda id: (),
        clones=engine.drafting.clones,
    )
    sizes = dataclasses.replace(engine.sizes, row_sizes=engine.row_sizes)
    twin = RowTwin(answers, sizes, drafted=drafted, classes=drafting.drafter.classes)
    given = dict(cost=engine.cost, vocab_size=engine.vocab_size, drafting=drafting)
    return Watched(RowHost(twin, sizes, **given))


@functools.cache
def compiled(**changes):
    return lab.engine(**changes)


def real_engine(**changes) -> Watched:
    """Compiled once, begun anew."""
    engine = compiled(**changes)
    engine.reset()
    return Watched(engine)


@functools.cache
def plain() -> dict:
    return real_engine().run(ASKED)


FAULTY = dict(pages=13, row_sizes=(32,), head_rows=32, steps_per_dispatch=16)


@functools.cache
def before_faults() -> tuple[Watched, dict]:
    real = real_engine(**FAULTY)
    return real, real.run(ASKED)


def by_tokens(rollouts):
    """What the real engine answered, as known answers."""
    return lambda request, version: Known(rollouts[request.rollout_id].tokens)


def by_steps(rollouts):
    """The same with how many tokens each step settled."""

    def known(request, version):
        rollout = rollouts[request.rollout_id]
        return Known(rollout.tokens, np.append(np.flatnonzero(np.diff(rollout.clocks)) + 1, len(rollout)))

    return known


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pages": 13},
        *(
            pytest.param(more, marks=pytest.mark.shown("variants"))
            for more in (
                {"steps_per_dispatch": 1},
                {"pages": 13, "steps_per_dispatch": 3},
                {"head_rows": 24},
                {"prompt_rows": 128},
                {"prompt_rows": 192, "pages": 13, "steps_per_dispatch": 3},
            )
        ),
        pytest.param({"slots": 60, "pages": 400, "refill_slots": 5}, marks=pytest.mark.extended),
        pytest.param(
            {"row_sizes": (64, 96), "cost": CHEAP_ROWS, "slots": 40, "pages": 240, "steps_per_dispatch": 2},
            marks=pytest.mark.extended,
        ),
    ],
    ids=str,
)
def test_the_twin_does_what_the_engine_does(changes):
    real = real_engine(**changes)
    rollouts = real.run(ASKED)
    twin = twin_of(real.engine, by_tokens(rollouts))
    twin.run(ASKED)
    counts = real.engine.metrics()
    assert (twin.dispatches, twin.seen, twin.engine.metrics()) == (real.dispatches, real.seen, counts)
    assert ("sched/preemptions" in counts) == ("pages" in changes and changes["pages"] == 13)
    sizes = {*changes.get("row_sizes", (64,)), changes.get("prompt_rows", 64)}
    assert {d.rows for d in real.dispatches} == sizes


@pytest.mark.extended
def test_of_several_replicas():
    asked = lab.requests(60, replicas=2)
    real = Watched(lab.engine(mesh=meshes.make_mesh(2), slots=8, pages=14))
    twin = twin_of(real.engine, by_tokens(real.run(asked)))
    twin.run(asked)
    assert twin.told == real.told


@pytest.mark.parametrize("right", [1.0, 0.8])
def test_candidates_that_are_right_and_wrong(right):
    """A prefix to be verified, of which so many tokens are right; fewer heads than candidates want."""
    noise = np.random.default_rng(1)
    asked = [
        lab.with_guesses(
            request,
            np.where(noise.random(len(plain()[request.rollout_id])) < right, plain()[request.rollout_id].tokens, 5),
        )
        for request in ASKED
    ]
    real = real_engine(head_rows=24)
    twin = twin_of(real.engine, by_tokens(real.run(asked)))
    twin.run(asked)
    assert twin.told == real.told
    assert sum(dict(zip(("p", "d", "accepted"), d.uses))["accepted"] for d in real.dispatches) > 100


@pytest.mark.parametrize("mode", ["recompute", "verify"])
def test_requests_parked_at_random_and_handed_in_again(mode):
    real = real_engine(pages=13)
    twin = twin_of(real.engine, by_tokens(plain()))
    for each in (real, twin):
        out, parks = lab.park_and_resume(each.engine, ASKED, mode=mode, seed=3)
        each.seen = sorted((id, r.finish, r.start_clock, r.finish_clock, r.clocks.tolist()) for id, r in out.items())
        assert parks > 50
    assert twin.told == real.told


def test_a_swap_in_mid_generation_and_parked_rollouts():
    real = Watched(lab.engine())
    new = {**lab.weights(0), "final_norm": np.asarray(lab.weights(0)["final_norm"]) * np.float32(1.1)}
    placed = meshes.put(new, meshes.param_shardings(meshes.make_mesh(), lab.decoder.axes(lab.TINY), "engine"))
    gone = [request.rollout_id for request in ASKED[::7]]

    def script(each, params) -> dict:
        each.engine.submit(ASKED)
        out = [r for _ in range(3) for r in each.turn()]
        each.engine.swap(params, 1)
        each.engine.park(gone)
        while each.engine.pending:
            out += each.turn()
        return {r.id: r for r in out}

    rollouts = script(real, placed)
    assert len(rollouts) < len(ASKED) and {int(v) for r in rollouts.values() for v in r.versions} == {0, 1}

    def answers(request, version):
        known = rollouts.get(request.rollout_id, plain()[request.rollout_id])
        return Known(known.tokens)

    twin = twin_of(real.engine, answers)
    script(twin, None)
    assert twin.told == real.told


@pytest.mark.parametrize(
    "name, clones, changes",
    [
        pytest.param("ours", True, {}, marks=pytest.mark.shown("variants")),
        pytest.param("ngram", True, {"steps_per_dispatch": 3}, marks=pytest.mark.extended),
        pytest.param("ours", False, {"pages": 13, "steps_per_dispatch": 5}, marks=pytest.mark.shown("variants")),
        pytest.param(
            "ours", False, {"row_sizes": (64, 96), "slots": 40, "pages": 240}, marks=pytest.mark.shown("variants")
        ),
    ],
    ids=str,
)
def test_with_drafts_it_follows_the_accept_lengths(name, clones, changes):
    groups = [g for epoch in (0, 1) for g in lab.groups_of(ASKED, plain(), epoch, vary=0.1)]
    slots = changes.get("slots", lab.BASE["slots"])
    real = Watched(
        lab.engine(
            drafting=lab.drafting(name, groups, clones=clones, slots=slots),
            cost=StepCost((64, 96), (1.0, 1.2), "sizes that both pay", 0.1),
            **changes,
        )
    )
    rollouts = real.run(ASKED)
    assert sum(d.drafts for d in real.dispatches) > 5
    assert max(int(np.bincount(r.clocks - r.clocks[0]).max()) for r in rollouts.values()) > 3
    twin = twin_of(real.engine, by_steps(rollouts), [d for d in real.dispatches if d.drafts])
    twin.run(ASKED)
    assert twin.told == real.told


# ---- what it refuses


def test_a_log_of_another_engine_is_refused():
    groups = lab.groups_of(ASKED, plain())
    real = Watched(lab.engine(drafting=lab.drafting("ours", groups), cost=lab.FREE_ROWS))
    rollouts = real.run(ASKED)
    drafted = [d for d in real.dispatches if d.drafts]
    with pytest.raises(
        ValueError, match="log of dispatches is of another engine: here the next that drafts is .*there None"
    ):
        twin_of(real.engine, by_steps(rollouts), drafted[:-1]).run(ASKED)
    with pytest.raises(ValueError, match="the log of dispatches is of another engine"):
        twin_of(real.engine, by_steps(rollouts), [dataclasses.replace(drafted[0], clock=7), *drafted[1:]]).run(ASKED)
    off = Drafting(Drafter(), replicas=1, slots=lab.BASE["slots"], past=lambda id: ())
    with pytest.raises(ValueError, match="by the log a step settles . tokens from position .* does not draft"):
        twin_of(real.engine, by_steps(rollouts), drafting=off).run(ASKED)


def test_an_answer_that_does_not_begin_with_what_is_there_is_refused():
    real = real_engine().engine
    prefix = lab.with_guesses(ASKED[0], [1, 2, 4]).prefix
    asked = dataclasses.replace(ASKED[0], prefix=prefix, prefix_mode="recompute", max_tokens=20)
    twin = twin_of(real, lambda request, version: Known(np.array([1, 2, 5, 6], np.int32)))
    with pytest.raises(ValueError, match="its 3 tokens are not the beginning of the known rollout, of 4 tokens"):
        twin.run([asked])


# ---- planted faults: each must break the equality


def a_watched_prompt_does_not_end_a_dispatch(monkeypatch):
    real = twin_file._goes_on

    def goes_on(blocks, emit, freed):
        for block in blocks:
            block.packed[:, twin_file.c.WATCH] = 0
        return real(blocks, emit, freed)

    monkeypatch.setattr(twin_file, "_goes_on", goes_on)


def one_slot_more_is_refilled_late(monkeypatch):
    real = twin_file._goes_on
    monkeypatch.setattr(twin_file, "_goes_on", lambda blocks, emit, freed: real(blocks, emit, freed + 1))


def the_youngest_is_served_first(monkeypatch):
    real = twin_file.row_plan.plan
    monkeypatch.setattr(
        twin_file.row_plan,
        "plan",
        lambda xp, forced, candidates, values, order, **sizes: real(
            xp, forced, candidates, values, order[::-1], **sizes
        ),
    )


def a_stall_does_not_end_a_dispatch(monkeypatch):
    monkeypatch.setattr(twin_file.Block, "bound", lambda self, emit: self.packed[:, twin_file.c.LIMIT] - 1)


@pytest.mark.parametrize(
    "fault",
    [
        a_watched_prompt_does_not_end_a_dispatch,
        one_slot_more_is_refilled_late,
        the_youngest_is_served_first,
        a_stall_does_not_end_a_dispatch,
    ],
)
def test_planted_faults(monkeypatch, fault):
    real, rollouts = before_faults()
    fault(monkeypatch)
    twin = twin_of(real.engine, by_tokens(rollouts))
    twin.run(ASKED)
    assert twin.seen != real.seen


def test_the_host_has_one_turn_in_every_dispatch_and_changes_nothing_by_it(monkeypatch):
    """After the device has begun and before it is waited for."""
    engine = compiled()
    plain = lab.run(engine, ASKED)
    engine.reset()
    events, dispatches = [], []
    begin, read = engine.device.programs.dispatch, programs.read
    monkeypatch.setattr(
        engine.device.programs, "dispatch", lambda *given, **more: events.append("begins") or begin(*given, **more)
    )
    monkeypatch.setattr(programs, "read", lambda told: events.append("is waited for") or read(told))
    monkeypatch.setattr(engine, "report", dispatches.append)
    monkeypatch.setattr(engine, "meanwhile", lambda: events.append("the host's turn"))
    assert lab.same_bits(plain, lab.run(engine, ASKED))
    assert len(dispatches) > 5 and events == ["begins", "the host's turn", "is waited for"] * len(dispatches)
