"""The number of rows that may sample in a step changes no sample. It differs between runs with a drafter and without."""

from __future__ import annotations

import dataclasses
import functools

import engine_lab as lab
import pytest

from jaxrl_post.engine.host import wire

UNTIED = dataclasses.replace(lab.TINY, vocab_size=1531, embed=42, heads=3, kv_heads=3, head_dim=14, tied=False)
ASKED = lab.requests(24, longest_prompt=12, longest=16, vocab=UNTIED.vocab_size)
SMALL = dict(max_length=32, page_size=16, pages=200, steps_per_dispatch=4)


@functools.cache
def answers(slots: int, head_rows: int, rows: int = 64):
    return lab.run(lab.engine(config=UNTIED, slots=slots, row_sizes=(rows,), head_rows=head_rows, **SMALL), ASKED)


def drafted(slots: int, rows: int):
    """Returns rollouts with every row a head row, as `engine.head_rows=0` sets it where drafts are made."""
    past = [
        g for epoch in (0, 1) for g in lab.groups_of(ASKED, answers(slots, slots, rows), epoch, vocab=UNTIED.vocab_size)
    ]
    drafting = lab.drafting("ours", past, vocab=UNTIED.vocab_size, slots=slots)
    more = dict(slots=slots, row_sizes=(rows,), head_rows=rows, drafting=drafting, cost=lab.FREE_ROWS)
    engine = lab.engine(config=UNTIED, **more, **SMALL)
    out = lab.run(engine, ASKED)
    assert engine.metrics()["spec/num_accepted"] > 20
    return out


@pytest.mark.parametrize("slots, rows", [(3, 64), pytest.param(64, 128, marks=pytest.mark.extended)])
def test_an_untied_head_gives_the_same_bits_with_drafts_and_without(slots, rows):
    assert lab.same_bits(answers(slots, slots, rows), drafted(slots, rows))


@pytest.mark.extended
@pytest.mark.parametrize("head_rows", [16, 24, 48])
def test_so_does_a_number_of_head_rows_that_was_asked_for(head_rows):
    assert lab.same_bits(answers(16, head_rows), answers(16, 64))


@pytest.mark.extended
def test_planted_heads_that_are_not_tiled_give_other_bits(monkeypatch):
    want = answers(16, 64)
    monkeypatch.setattr(wire.EngineSettings, "head_tile", lambda sizes, rows: min(sizes.head_rows, rows))
    answers.cache_clear()
    assert not lab.same_bits(answers(16, 16), want)
    answers.cache_clear()


@pytest.mark.parametrize(
    "slots, heads, rows, tile, places",
    [
        (3, 3, 3, 3, 3),
        (3, 3, 16, 16, 16),
        (16, 16, 48, 48, 48),
        (16, 16, 64, 64, 64),
        (16, 16, 128, 64, 64),
        (64, 64, 128, 64, 64),
        (64, 128, 128, 64, 128),
        (100, 100, 128, 128, 128),
        (100, 100, 100, 128, 128),
        (16, 96, 96, 64, 128),
        (65, 512, 512, 96, 576),
        (65, 512, 64, 64, 64),
        (256, 512, 512, 256, 512),
    ],
)
def test_tiles_follow_from_slots_and_rows(slots, heads, rows, tile, places):
    given = dict(lab.BASE, slots=slots, row_sizes=(rows,), head_rows=heads)
    sizes = wire.EngineSettings(**given)
    assert (sizes.head_tile(rows), sizes.head_places(rows)) == (tile, places)
