"""Pages: in any order of calls, reference counts balance and no page is given away twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_post.engine.host.replica import Pages, SharedPrompts


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 5)), max_size=60))
def test_counts_balance(moves):
    pages, held = Pages(12, 4), []
    for move, number in moves:
        if move == "take":
            free = pages.free
            got = pages.take(number)
            assert (got is None) == (number > free)
            if got:
                assert not set(got) & {i for ids in held for i in ids}, "a held page was handed out"
                held.append(got)
        elif held and move == "share":
            pages.share(held[number % len(held)])
            held.append(list(held[number % len(held)]))
        elif held:
            pages.release(held.pop(number % len(held)))
        assert pages.free == 12 - len({i for ids in held for i in ids})
    for ids in held:
        pages.release(ids)
    assert pages.free == 12


def test_needed_and_double_release():
    pages = Pages(4, 16)
    assert [pages.needed(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    ids = pages.take(1)
    pages.release(ids)
    with pytest.raises(AssertionError, match="released twice"):
        pages.release(ids)


def test_shared_prompts_live_as_long_as_somebody_needs_them():
    pages = Pages(8, 4)
    prompts = SharedPrompts(pages)
    first = pages.take(3)
    prompts.lead("a", slot=2, ids=first[:2])
    prompts.keep_only(set())
    assert "a" in prompts.entries, "somebody is computing it"
    prompts.finish(2)
    assert prompts.entries["a"].ready
    pages.release(first)
    assert pages.free == 6, "the entry still holds two"
    prompts.keep_only({"a"})
    prompts.keep_only(set())
    assert pages.free == 8 and not prompts.entries
    prompts.lead("b", slot=1, ids=pages.take(1))
    prompts.abandon(1)
    assert not prompts.entries
