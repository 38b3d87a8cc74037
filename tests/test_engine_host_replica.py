"""Slots and pages of one replica: numbers by hand."""

from __future__ import annotations

import numpy as np

from jaxrl_post.engine.host.replica import Replica
from jaxrl_post.engine.host.sequence import SequenceState
from jaxrl_post.ring.types import Prompt, Request, RolloutId, Sampling


def live(age: int, *, prompt: int = 9, tokens: int = 0, version: int = 0, purpose: str = "train") -> SequenceState:
    name = RolloutId(0, purpose, 0, "p", age)
    request = Request(
        rollout_id=name,
        prompt=Prompt(id="p", tokens=np.arange(prompt)),
        seed=name.seed(),
        max_tokens=20,
        sampling=Sampling(),
    )
    return SequenceState(request=request, age=age, tokens=[1] * tokens, versions=[version] * tokens)


def test_the_first_leads_the_prompts_pages_and_a_sibling_shares_the_full_ones():
    """Pages of 4 positions: a prompt of 9 needs 3 pages, and its first 8 positions fill two.

    A sibling needs one page of its own and copies none."""
    replica = Replica(slots=3, pages=8, page=4)
    first, second = live(0), live(1)
    assert replica.seat(first, None, ("k",)) == (8, 8, 0) and first.pages == [0, 1, 2] and replica.leads(first)
    replica.prompts.finish(first.slot)
    entry = replica.prompts.entries["k",]
    assert entry.ids == [0, 1] and not replica.leads(first)
    assert replica.seat(second, entry, ("k",)) == (8, 8, 0)
    assert (second.slot, second.pages, second.num_computed, replica.pages.free) == (1, [0, 1, 3], 8, 4)
    replica.leave(first)
    assert (first.slot, first.pages, first.num_computed, replica.pages.free) == (-1, [], 0, 5)


def test_a_half_full_page_is_copied():
    replica = Replica(slots=3, pages=8, page=4)
    first, second = live(0, prompt=7), live(1, prompt=7, tokens=3)
    replica.seat(first, None, ("k",))
    replica.prompts.finish(first.slot)
    assert replica.seat(second, replica.prompts.entries["k",], ("k",)) == (1, 2, 0)
    assert second.pages == [0, 2, 3] and second.num_computed == 6  # positions 0..9: page 0 shared, 1 copied to 2, 3 new


def test_too_few_pages_leave_everything_as_it_was():
    replica = Replica(slots=3, pages=2, page=4)
    one = live(0)
    assert replica.seat(one, None, ("k",)) is None
    assert (one.slot, replica.free, replica.pages.free, replica.prompts.entries) == (-1, 3, 2, {})


def test_the_victim_is_the_youngest_that_is_younger_and_of_this_version():
    replica = Replica(slots=4, pages=40, page=4)
    lives = [live(0), live(1, tokens=2, version=1), live(2, tokens=2, version=1), live(3, tokens=2, version=0)]
    for each in lives:
        replica.seat(each, None, (each.age,))
    assert replica.victim(lives[0], "train", 1) is lives[2]  # the youngest has tokens of another version
    assert replica.victim(lives[2], "train", 1) is lives[3]  # the only candidate
    assert replica.victim(lives[3], "train", 1) is None
    assert replica.victim(lives[3], "eval", 1) is lives[2]  # the other purpose makes room
