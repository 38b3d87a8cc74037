"""The swap policy, by hand."""

import pytest
from engine_lab import requests

from jaxrl_post.engine.host.sequence import SequenceState
from jaxrl_post.engine.host.swap_policy import SwapPolicy

ASKED = requests(4, samples=1, longest_prompt=4)


def live(number, tokens, slot=0):
    one = SequenceState(request=ASKED[number], age=number, tokens=range(tokens))
    one.slot, one.num_computed = slot, one.prompt_length + tokens - 1
    return one


def modes(carry, *lives):
    return [mode for _, mode in sorted(carry.modes(lives), key=lambda pair: pair[0].age)]


@pytest.mark.parametrize(
    "rule, with_tokens, waiting",
    [("keep", "keep", "keep"), ("recompute", "recompute", "keep"), ("verify", "verify", "verify")],
)
def test_a_rule_for_all(rule, with_tokens, waiting):
    assert modes(SwapPolicy(rule), live(0, 5), live(1, 3, slot=-1), live(2, 0), live(3, 0, slot=-1)) == [
        with_tokens,
        waiting,
        "again",
        "keep",
    ]


def test_auto_verifies_what_probably_survives():
    """Of 20 judged candidates 19 were accepted; one of each is added: a chance of 20/21 a token.

    So 19 of 100, and half of 30, are expected to be accepted."""
    carry = SwapPolicy("auto")
    carry.record_outcome([*range(19), 7, 8], [*range(19), 9, 8])
    chance = 20 / 21
    survive = {length: sum(chance**n for n in range(1, length + 1)) for length in (30, 31, 100)}
    assert survive[30] > 15 and survive[100] < 50
    assert modes(carry, live(0, 20), live(1, 100), live(2, 100, slot=-1)) == ["verify", "recompute", "keep"]


def test_the_shortest_come_first_and_who_is_beyond_the_share_keeps():
    carry = SwapPolicy("verify", 0.1)
    carry.used(400)
    assert modes(carry, live(0, 40), live(1, 6), live(2, 12), live(3, 9)) == ["keep", "verify", "verify", "verify"]
    told = carry.metrics()
    assert told["swap/num_kept"] == told["swap/num_beyond_share"] == 1 and told["swap/num_verified"] == 3
    assert told["swap/rows"] <= 40 and told["swap/rows_share"] == told["swap/rows"] / 400
    assert carry.metrics() == {}


def test_a_state_goes_on_alike():
    one, other = SwapPolicy("auto", 0.2), SwapPolicy("auto", 0.2)
    one.used(100)
    one.record_outcome([1, 2, 3], [1, 2, 4])
    modes(one, live(0, 5))
    other.load_state_dict(one.state_dict())
    for carry in (one, other):
        carry.used(50)
    assert (
        modes(one, live(1, 9), live(2, 30)) == modes(other, live(1, 9), live(2, 30))
        and one.metrics() == other.metrics()
    )
