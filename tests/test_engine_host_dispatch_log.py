"""A dispatch's line gives the dispatch back; other lines are refused."""

from __future__ import annotations

import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxrl_post.engine.host import dispatch_log
from jaxrl_post.engine.host.wire import OFFERS, USES, DispatchResult

COUNTS = st.integers(0, 2**40)


def told(draw_uses, steps, offers, won, counts) -> DispatchResult:
    return DispatchResult(
        out=None,
        uses=np.array(draw_uses),
        steps=np.int32(steps),
        offers=np.array(offers),
        won=np.array(won),
        counts=np.array(counts),
    )


@hypothesis.given(st.data(), st.booleans())
def test_a_line_gives_the_dispatch_back_with_its_sums(data, drafts):
    replicas = data.draw(st.integers(1, 3))

    def block(*shape):
        size = replicas * int(np.prod(shape, dtype=int))
        return np.array(data.draw(st.lists(COUNTS, min_size=size, max_size=size)), np.int64).reshape(replicas, *shape)

    given = told(block(len(USES)), data.draw(st.integers(1, 99)), block(OFFERS), block(), block(2, 4))
    made = dispatch_log.of("train", 7, 64, drafts, given)
    assert dispatch_log.read(made.line()) == made
    assert made.uses == tuple(sum(int(row[i]) for row in given.uses) for i in range(len(USES)))
    if drafts:
        assert made.won == sum(map(int, given.won)) and made.offers[3] == sum(int(row[3]) for row in given.offers)
        assert made.counts[1][2] == sum(int(row[1][2]) for row in given.counts)
    else:
        assert set(json.loads(made.line())) == {"purpose", "clock", "rows", "steps", "uses"}


@pytest.mark.parametrize(
    "line, why",
    [
        ("{", "Expecting property name"),
        ('{"purpose":"train"}', "which has purpose, clock, rows, steps, uses and"),
        ("[1]", "where it drafted, drafts, offers"),
        ('{"purpose":"train","clock":0,"rows":64,"steps":1,"uses":[1,2]}', "has 2 uses of rows, not 6"),
    ],
)
def test_what_is_no_line_is_refused(line, why):
    with pytest.raises(ValueError, match=f"dispatches.jsonl.*{why}"):
        dispatch_log.read(line)


def test_what_reports_is_logged_at_the_end_of_a_file(tmp_path):
    class Reporting:
        report = None

    one, other = Reporting(), Reporting()
    given = told(np.ones((2, 6), int), 3, np.ones((2, 16)), np.ones(2), np.ones((2, 2, 0)))
    for clock in (4, 9):
        with dispatch_log.logged((one, other, None), tmp_path / "log"):
            for each in (one, other):
                each.report(dispatch_log.of("eval", clock, 64, False, given))
        assert one.report is None
    lines = [dispatch_log.read(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line.clock for line in lines] == [4, 4, 9, 9] and lines[0].uses == (2,) * 6
    with dispatch_log.logged((None,), tmp_path / "none"):
        assert not (tmp_path / "none").exists()
