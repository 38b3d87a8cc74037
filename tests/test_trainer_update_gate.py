"""The gate by hand: when it falls, and that only a batch of the weights in use lifts it."""

import numpy as np

from jaxrl_post.trainer.update_gate import Gate

NEAR, FAR = np.log([[0.5, 0.5], [0.5, 0.5]]), np.log([[0.9, 0.1], [0.1, 0.9]])  # old and rollout log-probs
# Of FAR rho is 9 and 1/9: (mean rho)^2 / mean rho^2 = 4.5556^2 / 40.506 = 0.512; k3 = (8 - ln 9 - 8/9 + ln 9) / 2 = 3.556


def lives(gate, *batches):
    """(pair, versions of its tokens) one after the other: which moved the weights."""
    return [gate.lets([tuple(pair)], [np.array(versions)], step) for step, (pair, versions) in enumerate(batches)]


def test_without_bounds_everything_moves():
    assert lives(Gate(), (FAR, [0, 0]), (FAR, [0, 0]), (NEAR, [0, 1])) == [True] * 3 and not Gate().watches


def test_it_falls_and_waits_for_a_batch_of_the_weights_in_use():
    """Step 0 moves (version 1 is new), step 1 is far off, steps 2 and 3 hold tokens of version 0, in step 4 all are of
    version 1 or later, which are the same weights; from there on versions below 5 are old."""
    batches = [
        (NEAR, [0, 0]),
        (FAR, [0, 0]),
        (NEAR, [0, 1]),
        (NEAR, [0, 3]),
        (NEAR, [1, 3]),
        (FAR, [5, 5]),
        (FAR, [4, 5]),
    ]
    for gate in (Gate(min_ess=0.52), Gate(max_kl=3.5)):
        assert gate.watches and lives(gate, *batches) == [True, False, False, False, True, True, False]


def test_bounds_are_met_at_their_edge():
    assert lives(Gate(min_ess=0.51), (NEAR, [0, 0]), (FAR, [0, 0])) == [True, True]
    assert lives(Gate(max_kl=3.56), (NEAR, [0, 0]), (FAR, [0, 0])) == [True, True]


def test_a_state_goes_on_alike():
    one, other = Gate(min_ess=0.52), Gate(min_ess=0.52)
    assert lives(one, (NEAR, [0, 0]), (FAR, [0, 0])) == [True, False]
    other.load_state_dict(one.state_dict())
    for gate in (one, other):
        assert not gate.lets([tuple(NEAR)], [np.array([0, 1])], 2) and gate.lets([tuple(NEAR)], [np.array([1, 1])], 3)


def test_an_empty_batch_moves_what_there_is():
    assert Gate(min_ess=0.9).lets([], [np.array([], int)], 0)
