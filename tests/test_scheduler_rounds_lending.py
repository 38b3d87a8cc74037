"""When devices are lent, and for how long: at counts, once a round, never in a race, and back before the next one admits."""

import dataclasses

import numpy as np
import plain_rollouts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_ring import scheduler_of

from jaxrl_post.ring.history import Past
from jaxrl_post.ring.types import Capacity, Finish, Layout, Prompt, Sampling
from jaxrl_post.scheduler.forecast import ReplicaCapacity
from jaxrl_post.scheduler.rounds.around import Overlapped
from jaxrl_post.scheduler.rounds.lending import Lending
from jaxrl_post.scheduler.rounds.rounds import Sync
from jaxrl_post.scheduler.rounds.tail_batching import TailBatching

ALL, HALF = Layout(4, 1), Layout(2, 1)
PROMPTS = [Prompt(id=f"p{i}", tokens=[1, 2, 3]) for i in range(64)]


class Order:
    def at(self, position):
        return position // len(PROMPTS), PROMPTS[position % len(PROMPTS)]


class Steady:
    """A pace at which a step takes the engine nine of its own."""

    def steps(self, groups):
        return 9.0

    def pieces(self, groups):
        return 1


def lending(share=0.25, slots=4, kv_tokens=1000, past=lambda prompt_id: (), rounds=Sync, steps=3, apart=True, **more):
    given = dict(run_seed=0, sampling=Sampling(), max_tokens=50, group_size=2, prompts=4, max_waves=1, stream=1)
    return Lending(
        scheduler_of(rounds, Order(), steps=steps, replicas=4, **given | more),
        all_of_them=ALL,
        half=HALF,
        share=share,
        past=past,
        apart=apart,
        replica=ReplicaCapacity(slots=slots, kv_tokens=kv_tokens, cost=None),
    )


def capacity(layout=ALL):
    return Capacity(slots=(4,) * layout.replicas, pages=(64,) * layout.replicas)


def answer(request, length=5, clock=9):
    zeros = np.zeros(length)
    return plain_rollouts.rollout(request.rollout_id, request.prompt, zeros, clock=(0, clock))


def score(scheduler):
    for group in scheduler.due():
        scheduler.scored(
            type(group)(
                prompt=group.prompt, rollouts=group.rollouts, rewards=np.array([0.0, 1.0]), scored=np.ones(2, bool)
            )
        )


def turn(scheduler, requests, finish, clock, length=5):
    """Finishes these; what `layout` says then."""
    for index in finish:
        scheduler.complete(answer(requests[index], length, clock))
    score(scheduler)
    parts = scheduler.take()
    layout = scheduler.layout()
    return layout, parts, scheduler.admit(capacity(layout or ALL), clock)


def test_a_round_by_hand():
    """Eight answers, of which six find a slot in half of the replicas: with three slots a replica from the second one on."""
    one = lending(share=0.2, slots=3)
    assert one.layout() is None
    requests = one.admit(capacity(), 0)
    assert len(requests) == 8 and one.layout() is None
    assert turn(one, requests, [0], 3)[0] is None  # seven do not fit
    layout, parts, _ = turn(one, requests, [2], 4)
    assert layout == HALF and not parts
    assert one.layout() is None  # it is said once
    layout, parts, more = turn(one, requests, [1, 3], 6)
    assert layout is None and [len(part.groups) for part in parts] == [2] and not parts[0].publish and not more
    layout, parts, more = turn(one, requests, [4, 5, 6, 7], 10)
    assert layout == ALL and not parts and not more  # the devices are back before the last groups are trained on
    layout, parts, more = turn(one, requests, [], 10)
    assert layout is None and parts[-1].publish and len(more) == 8
    assert {name: value for name, value in one.metrics().items() if "len" in name} == {
        "sched/num_lendings": 1.0,
        "sched/lent_steps": 6.0,
    }


def test_on_shared_devices_whole_groups_wait_for_a_loan():
    one = lending(share=0.5, slots=2, apart=False)
    requests = one.admit(capacity(), 0)
    layout, parts, _ = turn(one, requests, [0, 1, 2], 3)
    assert layout is None and not parts  # five of eight do not fit into four slots
    layout, parts, _ = turn(one, requests, [4], 5)
    assert layout == HALF and not parts
    layout, parts, _ = turn(one, requests, [3], 8)
    assert layout is None and [len(part.groups) for part in parts] == [2]
    assert turn(one, requests, [5, 6, 7], 12)[0] == ALL
    assert [(len(part.groups), part.commit) for part in one.take()] == [(2, True)]


def test_a_round_that_lends_nothing_is_trained_on_at_its_end():
    one = lending(share=1.0, apart=False)
    requests = one.admit(capacity(), 0)
    layout, parts, _ = turn(one, requests, range(7), 3)
    assert layout is None and not parts
    layout, parts, more = turn(one, requests, [7], 9)
    assert layout is None and [(len(part.groups), part.commit) for part in parts] == [(4, True)] and len(more) == 8


def test_the_share_is_of_all_answers_of_the_round():
    """Three of eight are 0.375: with 0.5 it takes four, though there were slots before."""
    one = lending(share=0.5, slots=8)
    requests = one.admit(capacity(), 0)
    assert turn(one, requests, [0, 2, 4], 3)[0] is None
    assert turn(one, requests, [6], 4)[0] == HALF


@pytest.mark.parametrize(
    "kv_tokens, past, lends",
    [
        # Six missing answers of 3 + 50 tokens where nothing is known, two a group: 318.
        (158, (), False),
        (159, (), True),
        # Last time's longest was 20: the siblings of a finished one, 5 tokens, count as 20 too: 6 * 23 = 138.
        (68, (20,), False),
        (69, (20,), True),
        # Of several answers last time the longest counts.
        (68, (5, 20, 7), False),
        (69, (5, 20, 7), True),
    ],
)
def test_what_is_left_must_fit_into_the_kv_of_half(kv_tokens, past, lends):
    known = [record(past)] if past else []
    one = lending(share=0.25, slots=8, kv_tokens=kv_tokens, past=lambda prompt_id: known)
    requests = one.admit(capacity(), 0)
    assert (turn(one, requests, [0, 1], 3)[0] == HALF) is lends


def record(lengths):
    """Of last time's answers of these lengths."""
    return Past(
        epoch=0,
        tokens=np.zeros(sum(lengths)),
        argmax_tokens=np.zeros(sum(lengths)),
        offsets=np.cumsum([0, *lengths]),
        rewards=np.zeros(len(lengths)),
        scored=np.ones(len(lengths), bool),
        versions=np.zeros(len(lengths)),
    )


def test_the_longest_of_what_is_known_counts():
    """A sibling had 5 tokens, last time's longest 20: 23 for the other one too, 7 * 23 = 161 in all."""
    for kv_tokens, lends in ((80, False), (81, True)):
        one = lending(share=0.1, slots=8, kv_tokens=kv_tokens, past=lambda prompt_id: [record((20,))])
        requests = one.admit(capacity(), 0)
        assert (turn(one, requests, [0], 3)[0] == HALF) is lends


def test_a_sibling_that_is_done_tells_how_long_the_other_may_be():
    """One of a group was 30 tokens: 33 for the other; of three groups nothing is known, 6 * 53."""
    for kv_tokens, lends in ((175, False), (176, True)):
        one = lending(share=0.1, slots=8, kv_tokens=kv_tokens)
        requests = one.admit(capacity(), 0)
        assert (turn(one, requests, [0], 3, length=30)[0] == HALF) is lends


def test_what_a_group_had_when_it_was_put_off_tells_how_long_it_is():
    """The four that lose a race have 30 tokens of each answer; in the long round, where all that is done is one answer of 5, seven
    are missing: six of 33, and the other of that group, 33 too."""
    for kv_tokens, lends in ((115, False), (116, True)):
        one = lending(share=0.1, slots=16, kv_tokens=kv_tokens, rounds=TailBatching, over=2.0, prefix_mode="verify")
        requests = one.admit(capacity(), 0)
        for request in requests[:7]:
            one.complete(answer(request, 5, 4))
        parked = one.complete(answer(requests[7], 5, 5)).park
        one.parked(
            [
                dataclasses.replace(answer(request, 30, 5), finish=Finish.PARKED)
                for request in requests
                if request.rollout_id in parked
            ]
        )
        score(one)
        assert one.take()[-1].publish and one.layout() is None
        more = one.admit(capacity(), 6)
        assert [len(request.prefix) for request in more] == [30] * 8
        assert (turn(one, more, [0], 7)[0] == HALF) is lends


def test_a_race_lends_nothing_a_long_round_does():
    """Over 2: of eight groups four win, then the queue makes a long round."""
    one = lending(share=0.1, slots=16, rounds=TailBatching, over=2.0, prefix_mode="verify")
    requests = one.admit(capacity(), 0)
    assert len(requests) == 16
    assert turn(one, requests, [0], 2)[0] is None
    layout, parts, more = turn(one, requests, range(1, 8), 5)
    assert layout is None and parts[-1].publish and len(more) == 8
    assert turn(one, more, [0], 7)[0] == HALF


def test_under_an_overlapped_learner_the_loan_ends_with_the_round_not_with_the_step():
    """A round's last piece neither commits nor publishes at once: the next round begins with all devices, and its groups wait
    until the step has ended; it ends when it is due, though groups are there before."""
    one = Overlapped(lending(share=0.2, slots=8), Steady())
    requests = one.admit(capacity(), 0)
    assert turn(one, requests, [0, 2], 3)[0] == HALF
    layout, parts, more = turn(one, requests, [1, 3, 4, 5, 6, 7], 10)
    assert layout == ALL and not parts and not more
    layout, parts, more = turn(one, requests, [], 10)
    assert layout is None and len(more) == 8 and not any(part.commit for part in parts)
    layout, parts, _ = turn(one, more, [0, 1], 12)
    assert layout == HALF and not parts  # a whole group, but the step, begun at 10, is due at 19
    assert turn(one, more, [], 19)[:2] == (None, [])
    layout, parts, _ = turn(one, more, [2], 21)
    assert layout is None and [(len(part.groups), part.publish) for part in parts] == [(0, True)]
    assert [(len(part.groups), part.commit) for part in one.take()] == [(1, False)]


@settings(max_examples=60, deadline=None)
@given(
    apart=st.booleans(),
    share=st.floats(0.0, 1.0),
    slots=st.integers(1, 6),
    seed=st.integers(0, 1000),
    saved=st.integers(0, 40),
)
def test_at_most_once_a_round_and_back_before_the_next(apart, share, slots, seed, saved):
    """Any order of completions; and one that is saved and loaded in the midst decides alike."""
    rng, one = np.random.default_rng(seed), lending(share=share, slots=slots, apart=apart)
    clock, turns, layout, running, loans, taken = 0, 0, ALL, [], 0, 0
    while taken < 3:
        told = one.layout()
        if told is not None:
            assert told != layout
            assert told == ALL or 0 < len(running) <= 2 * slots
            loans, layout = loans + (told == HALF), told
        running += (fresh := one.admit(capacity(layout), clock))
        assert not fresh or layout == ALL
        if turns == saved:
            state, one = one.state_dict(), lending(share=share, slots=slots, apart=apart)
            one.load_state_dict(state)
        turns, clock = turns + 1, clock + int(rng.integers(1, 5))
        for _ in range(min(int(rng.integers(0, 4)), len(running))):
            one.complete(answer(running.pop(int(rng.integers(len(running)))), 5, clock))
        score(one)
        parts = one.take()
        assert layout == ALL or not any(part.commit for part in parts)
        taken += sum(part.publish for part in parts)
    assert loans <= 3
    told = one.metrics()
    assert told["sched/num_lendings"] == loans
