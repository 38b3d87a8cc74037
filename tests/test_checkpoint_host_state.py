"""The host's state: what comes back, and what is no state."""

import numpy as np
import pytest

from jaxrl_post.runs.checkpoint.host_state import read_state, write_state


def test_state_of_the_host(tmp_path):
    state = {
        "a": [1, 2.5, None, True, "x"],
        "b": {"c": np.arange(4, dtype=np.int64)[::2], "d": np.float32(0.1)},
        "e": np.zeros((0, 3), bool),
        "f": [np.uint32([7])],
        "pair": (1, 2),
    }
    write_state(tmp_path / "s", state)
    found = read_state(tmp_path / "s")
    assert found["a"] == state["a"] and found["pair"] == [1, 2] and found["b"]["d"] == float(np.float32(0.1))
    assert found["b"]["c"].dtype == np.int64 and found["b"]["c"].tolist() == [0, 2]
    assert found["e"].shape == (0, 3) and found["e"].dtype == bool and found["f"][0].tolist() == [7]


@pytest.mark.parametrize(
    "state, sentence",
    [
        ({"a": {1: 2}}, "the keys of state.a must be names"),
        ({"a": {"__array__": 2}}, "the keys of state.a must be names"),
        ({"a": [0, object()]}, r"state.a\[1\] is a object"),
        ({"a": np.array([None])}, "state.a is a ndarray"),
        ({"a": {2}}, "state.a is a set"),
    ],
)
def test_what_is_no_state(tmp_path, state, sentence):
    with pytest.raises(TypeError, match=sentence):
        write_state(tmp_path / "s", state)
    assert not (tmp_path / "s").exists()
