"""The least loaded replica against counting, whatever finishes or is withdrawn in between."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from racing_ring import whole
from toy_ring import SAMPLING, ToyPrompts

from jaxrl_post.ring.types import Capacity, Request, RolloutId
from jaxrl_post.scheduler.placement.placement import LeastLoaded

PROMPTS = ToyPrompts(200)


def free(replicas):
    return Capacity(slots=(4,) * replicas, pages=(4,) * replicas)


def group(number, size):
    epoch, prompt = PROMPTS.at(number)
    ids = [RolloutId(7, "train", epoch, prompt.id, sample) for sample in range(size)]
    return [Request(rollout_id=id, prompt=prompt, seed=id.seed(), max_tokens=9, sampling=SAMPLING) for id in ids]


@given(
    replicas=st.integers(1, 5),
    plan=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.booleans()), max_size=60),
)
def test_a_group_goes_where_fewest_requests_are(replicas, plan):
    placement, here = LeastLoaded(replicas), {}
    for number, (size, ends, save) in enumerate(plan):
        load = Counter(here.values())
        expected = min(range(replicas), key=lambda replica: (load[replica], replica))
        placement.place([group(number, size)], 0)
        released = placement.release(free(replicas))
        assert placement.release(free(replicas)) == []
        assert [request.rollout_id for request in released] == [request.rollout_id for request in group(number, size)]
        assert {request.replica for request in released} == {expected}
        here |= {request.rollout_id: expected for request in released}
        gone = list(here)[::3][:ends]
        placement.withdraw([*gone, RolloutId(0, "train", 0, "unknown", 0)])
        here = {id: replica for id, replica in here.items() if id not in gone}
        if save:
            state, placement = placement.state_dict(), LeastLoaded(replicas)
            placement.load_state_dict(state)


def test_what_finished_takes_no_room_and_what_was_withdrawn_is_never_released():
    placement = LeastLoaded(2)
    first, second, third = group(0, 3), group(1, 1), group(2, 1)
    placement.place([first, second], 0)
    placement.withdraw([first[1].rollout_id])
    assert [(r.rollout_id, r.replica) for r in placement.release(free(2))] == [
        (first[0].rollout_id, 0),
        (first[2].rollout_id, 0),
        (second[0].rollout_id, 1),
    ]
    for rollout in whole(first):
        assert placement.learn(rollout) == ()
    placement.place([third], 0)
    assert [r.replica for r in placement.release(free(2))] == [0]
