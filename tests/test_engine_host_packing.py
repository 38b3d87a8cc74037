"""The packed arrays between host and device: settled tokens by hand, and an insertion there and back."""

from __future__ import annotations

import numpy as np

from jaxrl_post.engine.host import packing
from jaxrl_post.engine.host import wire as c
from jaxrl_post.engine.host.sequence import Settled


def test_what_a_dispatch_told_by_hand():
    """One replica with two slots: the first had 5 tokens and has 7, the second has none more.

    Stamps are step * 2 + drafted. The dispatch began at clock 1 << 33."""
    emit, begun = 4, 1 << 33
    packed, out = np.zeros((1, 2, c.TABLE), np.int32), np.zeros((1, 2, c.OUT_WINDOW + 5 * emit), np.int32)
    packed[0, :, c.NUM_TOKENS] = out[0, :, c.OUT_NUM_TOKENS] = 5, 9
    out[0, 0, c.OUT_NUM_TOKENS], out[0, :, c.OUT_NUM_COMPUTED] = 7, (6, 8)
    blocks = out[0, 0, c.OUT_WINDOW :].reshape(5, emit)
    blocks[:, :2] = (
        [11, 12],
        np.float32([-0.5, -0.25]).view(np.int32),
        np.float32([1.5, 2.5]).view(np.int32),
        [0, 7],
        [11, 13],
    )
    first, second = (packing.settled(out[0, slot], int(packed[0, slot, c.NUM_TOKENS]), begun) for slot in range(2))
    assert first == Settled(
        num_computed=6,
        tokens=[11, 12],
        logprobs=[-0.5, -0.25],
        entropies=[1.5, 2.5],
        drafted=[False, True],
        clocks=[begun + 1, begun + 4],
        argmax_tokens=[11, 13],
    )
    assert second == Settled(8, [], [], [], [], [], [])
    assert [type(x) for x in (first.tokens[0], first.logprobs[0], first.drafted[0], first.clocks[0])] == [
        int,
        float,
        bool,
        int,
    ]


def test_an_insertion_travels_as_one_array():
    noise = np.random.default_rng(0)
    for watched in (0, 6):
        sizes = dict.fromkeys(c.Entry._fields, ()) | {"tokens": (6,), "argmax_tokens": (watched,)}
        entry = c.Entry(**{name: noise.integers(0, 99, (2, 3, *more), np.int32) for name, more in sizes.items()})
        joined = entry.joined()
        assert joined.dtype == np.int32 and joined.shape == (2, 3, 8 + 6 + watched)
        for name, array in c.Entry.parted(joined, 6)._asdict().items():
            np.testing.assert_array_equal(array, getattr(entry, name), err_msg=name)
